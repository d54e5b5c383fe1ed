"""`outplace verify`: does a checkpoint give here what it gives in transformers?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .embed import positive
from .fasta import read_fasta
from .options import DTYPES, add_hub_options, hub_options

if TYPE_CHECKING:
    from .comparison import Report
    from .counterparts import Ours, Settings, Theirs

TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Of the relative difference: some tens or hundreds of roundings. In float64 those of float32 count,
for transformers computes the scale of scores and the rotary angles in it."""

DESCRIPTION = """\
Load a checkpoint here and in transformers (extra: pip install 'outplace[verify]'), give both the same
tokens, and print for each hidden state and output the largest difference, absolute and relative to
transformers' largest magnitude. Tokens on which the two tokenizers differ are listed, and keys that
either library misses or has no use for. Both models get this library's tokens, and only real tokens
are compared: what stands at padding means nothing. One model is in memory at a time."""

EPILOG = f"""\
parameters that the checkpoint lacks are random in both libraries: transformers' are given the values
they have here, and the report says so.

exit status: 0 all tokens equal and all outputs within the tolerance, 1 not, or an error

tolerance unless given: {", ".join(f"{value:.0e} in {name}" for name, value in TOLERANCES.items())}

example:
  outplace verify microsoft/deberta-v3-base --text 'The cat sat on the [MASK].'
  outplace verify facebook/esm2_t12_35M_UR50D --fasta proteins.fasta --json report.json"""


def add_parser(subparsers: Any) -> None:
    """Add `verify` to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="compare a checkpoint here with transformers, layer by layer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="REPO_OR_DIR")
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument(
        "--text",
        action="append",
        metavar="TEXT",
        help="may be repeated (default: a few built in; random tokens where there is no tokenizer)",
    )
    inputs.add_argument("--fasta", metavar="FILE", type=Path, help="proteins, for ESM")
    parser.add_argument(
        "--limit", type=positive, default=8, metavar="N", help="proteins taken of FILE (default: 8)"
    )
    parser.add_argument("--class", dest="class_name", metavar="NAME", help="the checkpoint's unless given")
    parser.add_argument("--attentions", action="store_true", help="compare attention weights too")
    parser.add_argument("--tolerance", type=_tolerance, metavar="X", help="of the relative difference")
    parser.add_argument(
        "--attn-implementation",
        choices=("eager", "sdpa"),
        default="eager",
        help="of both; DeBERTa has only eager (default: eager)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of both (default: float32)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … or auto (default: cpu)")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled weights, tensors only")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it instead")
    add_hub_options(parser)
    parser.set_defaults(run=run)


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no relative difference of 0 or more")
    return number


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 where all is equal, else 1.

    Raises:
        ImportError: there is no transformers.
        OSError, ValueError: as `verify`, or a FASTA file that cannot be read.
    """
    from .counterparts import Settings

    texts: list[str] | None = args.text
    source = "the texts given"
    if args.fasta is not None:
        records = list(islice(read_fasta(args.fasta), args.limit + 1))
        if not records:
            raise ValueError(f"{args.fasta} holds no proteins")
        texts = [record.sequence for record in records[: args.limit]]
        which = "all" if len(records) == len(texts) else "the first"
        source = f"{which} {len(texts)} proteins of {args.fasta}"
    settings = Settings(
        args.checkpoint,
        class_name=args.class_name,
        dtype=args.dtype,
        device=args.device,
        attn_implementation=args.attn_implementation,
        attentions=args.attentions,
        allow_pickle=args.allow_pickle,
        hub=hub_options(args),
    )
    report = verify(settings, texts, source=source, proteins=args.fasta is not None, tolerance=args.tolerance)
    text = json.dumps(report.to_json(), indent=2, ensure_ascii=False)
    if args.json == "-":
        print(text)
    else:
        print(report)
        if args.json is not None:
            Path(args.json).write_text(f"{text}\n", encoding="utf-8")
    return 0 if report.within else 1


def verify(
    settings: Settings,
    texts: Sequence[str] | None = None,
    *,
    source: str = "the texts given",
    proteins: bool = False,
    tolerance: float | None = None,
) -> Report:
    """Run a checkpoint in both libraries and compare.

    Args:
        texts: the inputs, in one padded batch; a few built-in ones unless given, or random tokens where
            the checkpoint has no tokenizer.
        source: what the report calls them.
        proteins: whether the texts are proteins, which only ESM reads.
        tolerance: the largest relative difference; by `TOLERANCES` unless given.

    Raises:
        ImportError: there is no transformers.
        FileNotFoundError, CheckpointError: as `PretrainedModel.from_pretrained`; or texts are given for
            a checkpoint that has no tokenizer.
        ValueError: no such class or device, or transformers cannot run the checkpoint; the message says why.
    """
    transformers = import_transformers()

    import torch

    import outplace

    from .automatic import family
    from .comparison import Report, difference
    from .counterparts import make_inputs, quiet, run_ours, run_theirs
    from .models.config import read_json_object
    from .options import resolve_device
    from .weights.hub import fetch_config

    device = resolve_device(settings.device)
    values = read_json_object(fetch_config(settings.checkpoint, **settings.hub))
    prefix = family(values)
    if proteins and prefix != "Esm":
        raise ValueError(f"{settings.checkpoint} is of the family {prefix}, which reads no proteins")
    config = getattr(outplace, f"{prefix}Config").from_dict(values)
    with quiet(transformers):
        inputs = make_inputs(transformers, settings, config, texts, source)
        ours = run_ours(settings, inputs, device)
        theirs = run_theirs(transformers, settings, inputs, device, ours)
    odd = sorted(ours.outputs.keys() ^ theirs.outputs.keys())
    if odd:
        raise ValueError(f"only one of the two libraries returns {', '.join(odd)} of {ours.class_name}")
    return Report(
        checkpoint=str(settings.checkpoint),
        class_name=ours.class_name,
        dtype=settings.dtype,
        device=str(device),
        attn_implementation=settings.attn_implementation,
        versions={
            "outplace": outplace.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        tolerance=TOLERANCES[settings.dtype] if tolerance is None else tolerance,
        inputs=inputs.source,
        input_tokens=int(inputs.mask.sum()),
        tokens=inputs.tokens,
        differences=[difference(name, x, theirs.outputs[name]) for name, x in ours.outputs.items()],
        keys={"outplace": ours.keys, "transformers": theirs.keys},
        copied=theirs.copied,
        notes=[*inputs.notes, *_notes(values, ours, theirs)],
    )


def import_transformers() -> Any:
    """The module. Raises `ImportError` that says what to install where it is absent."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("outplace verify compares with transformers; install outplace[verify]") from error
    return transformers


def _notes(values: dict[str, Any], ours: Ours, theirs: Theirs) -> list[str]:
    """What of the two runs bears on the numbers. `values` is what `config.json` holds."""
    here, there = set(ours.keys.missing), set(theirs.keys.missing)
    notes = []
    if ours.class_name.endswith("ForMaskedLM") and ours.legacy not in (None, values.get("legacy", True)):
        notes.append(
            f"transformers was told legacy={ours.legacy}, for the head that the checkpoint holds; "
            "unless told, it leaves that head unread and initialises another"
        )
    if here & there:
        notes.append(
            f"the checkpoint lacks {_few(here & there)}: the same random values were put in both models"
        )
    given = set(theirs.copied) - here
    if given:
        notes.append(
            f"transformers did not find {_few(given)}, which outplace did: "
            "the checkpoint's values were put in both models"
        )
    if there - here - given:
        notes.append(
            f"transformers did not find {_few(there - here - given)}, which outplace does not have: "
            "they are as transformers initialises them"
        )
    if here - there:
        notes.append(
            f"outplace did not find {_few(here - there)}, which transformers did: they are random here"
        )
    return notes


def _few(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return f"{len(names)} parameters ({first}{', …' if len(names) > 3 else ''})"
