"""`outplace embed FASTA -o FILE`: one vector a protein, or one a residue."""

from __future__ import annotations

import argparse
import json
import string
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .fasta import Record, read_fasta
from .options import add_model_options, load

if TYPE_CHECKING:
    from torch import Tensor

    from .models.esm import EsmConfig, EsmModel, EsmTokenizer

Pool = Literal["mean", "cls", "none"]

DESCRIPTION = """\
Embed each protein of a FASTA file with an ESM model.

FASTA is read as it is found: wrapped or not, any line ends, gzipped or not, upper or lower case.
Gaps (- and .) are dropped; a * at the end is dropped and one within counts as X, as does a letter
that the model has no token for. A record without residues, and a character that is no residue, are
errors that name the line."""

EPILOG = """\
the output is a safetensors file:
  one tensor a protein under the protein's name, the header up to the first white space
    --pool mean   [E]     the mean over the residues (start and end tokens do not count)
    --pool cls    [E]     the state of the start token
    --pool none   [L, E]  each residue's state
  metadata: model, pool, order (the names as a JSON list, in the order of the input), outplace (version)
  a name that occurs again becomes NAME#2, NAME#3, …; a record without one becomes record_N, N its place

The file appears only once it is complete.

example:
  outplace embed proteins.fasta -o vectors.safetensors --model facebook/esm2_t33_650M_UR50D
  zcat proteins.fasta.gz | outplace embed - -o vectors.safetensors --pool none

and in Python:
  import json
  from safetensors import safe_open
  with safe_open("vectors.safetensors", "pt") as file:
      vectors = {name: file.get_tensor(name) for name in json.loads(file.metadata()["order"])}"""


def add_parser(subparsers: Any) -> None:
    """Add `embed` to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "embed",
        help="turn the proteins of a FASTA file into vectors",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fasta", metavar="FASTA", help="the proteins; - for standard input")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="replaced if it exists"
    )
    parser.add_argument("--pool", choices=("mean", "cls", "none"), default="mean", help="(default: mean)")
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="tokens that go through the model at once, padding counted; a longer protein goes alone. "
        "Lower it where memory runs out (default: 4096)",
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def run(args: argparse.Namespace) -> int:
    """Write the file. Returns 0.

    Raises:
        OSError, ValueError: input, output or checkpoint that cannot be used; the message says which.
    """
    source = sys.stdin.buffer if args.fasta == "-" else Path(args.fasta)
    if isinstance(source, Path) and args.output.exists() and args.output.samefile(source):
        raise ValueError(f"{args.output} is the input; give another file for the output")
    found = list(read_fasta(source))  # type: ignore[arg-type]
    if not found:
        raise ValueError(f"{'standard input' if args.fasta == '-' else args.fasta} holds no proteins")
    records = with_unique_names(found)
    renamed = [new.name for old, new in zip(found, records, strict=True) if new.name != old.name]
    if renamed:
        warn(
            f"{len(renamed)} names are empty or occur more than once and were changed, first to {renamed[0]}"
        )

    from .models.esm import EsmModel
    from .weights.writer import TensorFile, new_file

    start = time.monotonic()
    with new_file(args.output) as file:
        model, tokenizer = load(EsmModel, args, add_pooling_layer=False)
        foreign = unknown_residues(tokenizer, records)
        if foreign:
            warn(f"{foreign.total()} residues ({', '.join(sorted(foreign))}) have no token and are read as X")
        vectors = embed_records(model, tokenizer, records, pool=args.pool, batch_tokens=args.batch_tokens)
        width = model.config.hidden_size
        entries = {
            r.name: (model.dtype, (len(r.sequence), width) if args.pool == "none" else (width,))
            for r in records
        }
        writer = TensorFile(file, entries, _metadata(args, records))
        with progress_bar(sum(len(record.sequence) for record in records)) as bar:
            for record, vector in vectors:
                writer.write(record.name, vector)
                bar.update(len(record.sequence))
    seconds = time.monotonic() - start
    print(
        f"{args.output}: {len(records)} proteins, vectors of {width}, {args.model}, {seconds:.1f} s",
        file=sys.stderr,
    )
    return 0


def warn(message: str) -> None:
    print(f"outplace: warning: {message}", file=sys.stderr)


def progress_bar(residues: int) -> Any:
    """A bar on standard error, where that is a terminal."""
    from huggingface_hub.utils.tqdm import tqdm

    return tqdm(total=residues, unit="residue", unit_scale=True, disable=None, leave=False)


def _metadata(args: argparse.Namespace, records: Sequence[Record]) -> dict[str, str]:
    from . import __version__

    return {
        "format": "pt",
        "model": args.model,
        "pool": args.pool,
        "order": json.dumps([record.name for record in records], ensure_ascii=False),
        "outplace": __version__,
    }


def with_unique_names(records: Sequence[Record]) -> list[Record]:
    """The records, each with a name of its own that no other had.

    A name's second record is called NAME#2 and so on, one without a name record_N by its place from 1.
    """
    reserved = {record.name for record in records} | {"__metadata__"}  # a key of the format's own
    seen = {"__metadata__"}
    numbers: dict[str, Iterator[int]] = {}
    unique = []
    for place, record in enumerate(records, 1):
        name = base = record.name or f"record_{place}"
        if name in seen or (not record.name and name in reserved):
            number = numbers.setdefault(base, count(2))
            while name in seen or name in reserved:
                name = f"{base}#{next(number)}"
        seen.add(name)
        unique.append(replace(record, name=name))
    return unique


# From proteins to vectors


def embed_records(
    model: EsmModel,
    tokenizer: EsmTokenizer,
    records: Sequence[Record],
    *,
    pool: Pool = "mean",
    batch_tokens: int = 4096,
) -> Iterator[tuple[Record, Tensor]]:
    """Each record and its embedding on the CPU, the longest first: not in the order of the input.

    Every residue has exactly one token, here too where the model has none for its letter. A dictionary
    by name is `{record.name: vector for record, vector in embed_records(model, tokenizer, records)}`.

    Args:
        model: in eval mode.
        pool: "mean" over the residues [E], "cls" the start token's state [E], or "none" each residue's
            state [L, E].
        batch_tokens: the most tokens of a batch, padding counted, unless one record has more.

    Raises:
        ValueError: a record longer than the model's absolute positions, before anything is computed;
            or a `pool` or `batch_tokens` that is none.
    """
    if pool not in ("mean", "cls", "none"):
        raise ValueError(f"pool is {pool!r}; it must be 'mean', 'cls' or 'none'")
    check_lengths(model.config, records)
    batches = batches_within(batch_tokens, [len(record.sequence) + 2 for record in records])
    return _embed(model, tokenizer, [[records[i] for i in batch] for batch in batches], pool)


def _embed(
    model: EsmModel, tokenizer: EsmTokenizer, batches: Sequence[Sequence[Record]], pool: Pool
) -> Iterator[tuple[Record, Tensor]]:
    import torch

    table = residue_tokens(tokenizer)
    for batch in batches:
        rows = [with_ends([table[r] for r in record.sequence], tokenizer) for record in batch]
        input_ids, mask = padded(rows, tokenizer, model.device)
        with torch.inference_mode():
            states = model(input_ids, mask).last_hidden_state  # [B, L, E]
            vectors = [pooled(row[: len(r.sequence) + 1], pool) for row, r in zip(states, batch, strict=True)]
        yield from zip(batch, [vector.cpu() for vector in vectors], strict=True)


def pooled(states: Tensor, pool: Pool) -> Tensor:
    """[1 + L, E], the start token's state and the residues', to [E] or [L, E]; means in at least float32."""
    from .models.layers import at_least_float32

    if pool == "cls":
        return states[0]
    if pool == "none":
        return states[1:]
    return states[1:].to(at_least_float32(states.dtype)).mean(0).to(states.dtype)


def batches_within(budget: int, lengths: Sequence[int]) -> list[list[int]]:
    """Places of `lengths`, the longest first, in batches of at most `budget` once padded.

    A length beyond the budget is a batch of its own. The longest first, so that what fits in memory
    at the beginning fits to the end.

    Raises:
        ValueError: a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"batch_tokens is {budget}; it must be at least 1")
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def check_lengths(config: EsmConfig, records: Sequence[Record]) -> None:
    """Raises `ValueError` naming the first record that is longer than absolute positions allow."""
    if config.position_embedding_type != "absolute":
        return
    # Positions count from `pad_token_id + 1`; two are the start and end tokens'.
    limit = config.max_position_embeddings - (config.pad_token_id or 0) - 1 - 2
    for record in records:
        if len(record.sequence) > limit:
            raise ValueError(
                f"record {record.name!r} (line {record.line}) has {len(record.sequence)} residues; "
                f"the model's absolute positions allow {limit}"
            )


# From residues to tokens


def residue_tokens(tokenizer: EsmTokenizer) -> dict[str, int]:
    """The token number of each letter A to Z; the unknown residue's, X, for one that has none.

    The tokenizer itself makes one token of a whole run of such letters.
    """
    ids = tokenizer.convert_tokens_to_ids([*string.ascii_uppercase])
    known = dict(zip(string.ascii_uppercase, ids, strict=True))
    return {
        letter: known["X"] if number == tokenizer.unk_token_id else number for letter, number in known.items()
    }


def unknown_residues(tokenizer: EsmTokenizer, records: Sequence[Record]) -> Counter[str]:
    """How often each letter occurs that has no token of its own."""
    table = residue_tokens(tokenizer)
    letters: Counter[str] = Counter()
    for record in records:
        letters.update(record.sequence)
    return Counter({r: n for r, n in letters.items() if r != "X" and table[r] == table["X"]})


def with_ends(tokens: list[int], tokenizer: EsmTokenizer) -> list[int]:
    """Residues between the start and the end token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [tokenizer.cls_token_id, *tokens, *end]


def padded(rows: Sequence[list[int]], tokenizer: EsmTokenizer, device: Any) -> tuple[Tensor, Tensor]:
    """Rows of tokens to ids and mask, [B, L] each."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=tokenizer.pad_token_id
    )
    return ids.to(device), (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
