"""`outplace fill SEQUENCE`: the likeliest residues at masked places."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .embed import check_lengths, padded, positive, residue_tokens, with_ends
from .fasta import Record, clean, without_stops
from .options import add_model_options, load

if TYPE_CHECKING:
    from .models.esm import EsmForMaskedLM, EsmTokenizer

MASK = "<mask>"
STANDARD_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
_MASK_LETTER = "_"
"""What stands for a mask once each residue is one letter."""

DESCRIPTION = f"""\
Say which residues an ESM model expects at the masked places of a protein.

Write {MASK} for each residue to predict. Letters are read as by `outplace embed`. Probabilities are
over all of the model's tokens; only the 20 standard residues are listed, so theirs may sum to less
than 1."""

EPILOG = f"""\
example:
  outplace fill 'MKTAYIAKQR{MASK}ISFVKSHFSRQ' --top 3
  outplace fill - --json < protein.fasta"""


def add_parser(subparsers: Any) -> None:
    """Add `fill` to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fill",
        help="predict masked residues of a protein",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sequence",
        metavar="SEQUENCE",
        help=f"one protein with {MASK} in it; - reads it from standard input, bare or as one FASTA record",
    )
    parser.add_argument(
        "--top", type=positive, default=5, metavar="K", help="residues to list a mask (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 0.

    Raises:
        OSError, ValueError: a sequence or a checkpoint that cannot be used; the message says why.
    """
    sequence = parse_masked(_stdin() if args.sequence == "-" else args.sequence)

    from .models.esm import EsmForMaskedLM

    model, tokenizer = load(EsmForMaskedLM, args)
    places = fill_masks(model, tokenizer, sequence, top=args.top)
    if args.json:
        print(json.dumps({"model": args.model, "masks": [asdict(place) for place in places]}, indent=2))
        return 0
    print("residue  likeliest, with probability")
    for place in places:
        print(f"{place.position:>7}  {'  '.join(f'{r} {p:.3f}' for r, p in place.residues.items())}")
    return 0


def _stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8-sig", errors="replace")  # a header may be anything


@dataclass(frozen=True)
class FilledMask:
    """What a model expects at one masked place.

    Args:
        position: of the residue, counted from 1.
        residues: probability by residue, the likeliest first.
    """

    position: int
    residues: dict[str, float]


def fill_masks(
    model: EsmForMaskedLM, tokenizer: EsmTokenizer, sequence: str, *, top: int = 5
) -> list[FilledMask]:
    """The likeliest of the standard residues at each `<mask>` of a protein.

    Args:
        model: in eval mode.
        sequence: as `parse_masked` reads it.
        top: how many residues; no more than there are are returned.

    Raises:
        ValueError: as `parse_masked`, or a protein longer than the model's absolute positions.
    """
    import torch

    letters = parse_masked(sequence).replace(MASK, _MASK_LETTER)
    check_lengths(model.config, [Record("the sequence", "", letters, 1)])
    table = residue_tokens(tokenizer) | {_MASK_LETTER: tokenizer.mask_token_id}
    row = with_ends([table[letter] for letter in letters], tokenizer)
    input_ids, mask = padded([row], tokenizer, model.device)
    masked = [place for place, letter in enumerate(letters) if letter == _MASK_LETTER]
    with torch.inference_mode():
        logits = model(input_ids, mask).logits[0]  # [L, V]
        columns = [table[residue] for residue in STANDARD_RESIDUES]
        probabilities = (
            logits[[place + 1 for place in masked]].cpu().double().softmax(-1)[:, columns].tolist()
        )
    filled = []
    for place, row_of in zip(masked, probabilities, strict=True):
        ranked = sorted(zip(STANDARD_RESIDUES, row_of, strict=True), key=lambda pair: -pair[1])
        filled.append(FilledMask(place + 1, dict(ranked[:top])))
    return filled


def parse_masked(text: str) -> str:
    """One protein, bare or as one FASTA record, cleaned as by `read_fasta`; its masks stay `<mask>`.

    Raises:
        ValueError: no mask, several proteins, or a character that stands for no residue.
    """
    lines = text.splitlines()
    headers = [place for place, line in enumerate(lines) if line.startswith(">")]
    body = text.split() if not headers else ["".join(lines[headers[0] + 1 :])]
    if len(headers) > 1 or len(body) > 1:
        raise ValueError(
            f"several sequences, or white space in one: {max(len(headers), len(body))} parts; give one, "
            "wrapped only below a FASTA header"
        )
    if headers and any(line.strip() for line in lines[: headers[0]]):
        raise ValueError("text stands before the '>' of the sequence")
    pieces = [clean(piece) for piece in "".join(body).split(MASK)]
    if len(pieces) == 1:
        raise ValueError(f"the sequence has no {MASK} to fill")
    return without_stops(_MASK_LETTER.join(pieces)).replace(_MASK_LETTER, MASK)
