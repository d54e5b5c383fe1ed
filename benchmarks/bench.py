"""`outplace bench`: memory, time, loading and tokenizing, beside other implementations."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .cells import DEVICES, IMPLEMENTATIONS, MODES, Cell, Mode, What, grid, shard
from .fit import PLANNED
from .shapes import MODELS

if TYPE_CHECKING:
    from .running import Results

KINDS: tuple[What, What] = ("memory", "speed")
OURS_AND_UPSTREAM = ("transformers", "transformers-sdpa", "outplace", "outplace-blockwise")
IN_PLACE_AND_NOT = (
    "transformers",
    "transformers-sdpa",
    "transformers-historic",
    "outplace",
    "outplace-eager",
    "outplace-in-place",
)
OTHERS = ("fair-esm", "flashdeberta", "disentangled-flash", "faesm", "esm-cpp", "onnxruntime")
BASES = ("deberta-base", "deberta-v3-base", "esm2_t12_35M_UR50D")
SMALL = ("deberta-v3-xsmall", "esm2_t6_8M_UR50D")

DESCRIPTION = """\
Measure implementations of the published models, each cell in a process of its own, and write what is
found into one file; what is in it already is not measured again. Without options that choose cells, memory
and speed are of a small set; with --device cuda, of one for a GPU. Times compare only within a run, so name
with --impl whatever is to be compared. "peers" is memory and speed beside other projects than upstream, and
speed beside its old releases and lines, "scaling" the time of texts of many lengths. "fit" plans two batches
of every published model, from which a report tells the largest that a GPU trains. "conditions" puts
upstream's old lines that wrote in place back one by one and trains tiny models in many ways: which raise,
which are wrong. "compare" says whether two files of results agree; it fails where a plan differs.

Memory is read in three ways. "cuda" is the peak of torch's CUDA allocator. "cpu" adds up the live storages
that operators return, and beside it gives the rise of resident memory. "plan" runs the step on tensors
without numbers, exactly repeatable, as CUDA would (plan-cpu: as a CPU would).
"""

EPILOG = """\
examples:
  outplace bench all --out results.json
  outplace bench memory --model deberta-v3-base --device plan --mode train --length 512 1024
  outplace bench all --device cuda --shard 1/8 --out cuda.json
  outplace bench report results.json -o report"""


def add_parser(subparsers: Any) -> None:
    """Add `bench` to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure memory and time beside other implementations",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        choices=(
            *("memory", "speed", "load", "tokenizer", "conditions", "fit", "peers", "scaling", "all"),
            *("report", "compare"),
        ),
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="for report: files of results; for compare: one and another",
    )
    parser.add_argument("-o", dest="folder", type=Path, metavar="DIR", help="for report: where it is written")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="for report: a document that holds a block of it"
    )
    parser.add_argument(
        "--front", type=Path, metavar="FILE", help="for report: a document that holds a summary of it"
    )
    chosen = parser.add_argument_group("cells", "each option takes one value or more")
    chosen.add_argument("--model", nargs="+", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    chosen.add_argument(
        "--impl", nargs="+", choices=IMPLEMENTATIONS, metavar="NAME", help=", ".join(IMPLEMENTATIONS)
    )
    chosen.add_argument("--device", nargs="+", choices=DEVICES)
    chosen.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"))
    chosen.add_argument("--batch", nargs="+", type=int)
    chosen.add_argument("--length", nargs="+", type=int)
    chosen.add_argument("--mode", nargs="+", choices=MODES)
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="(default: results.json)")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="only part I of N of the cells")
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds in which time is measured (default: 5)"
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="of a process (default: 600)")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="environments of others")
    parser.add_argument("--weights", type=Path, help="keep upstream's checkpoints in this folder")
    parser.add_argument("--snapshots", type=Path, metavar="DIR", help="write CUDA's memory snapshots there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, write the report, or compare.

    Raises:
        ValueError: wrong options.
    """
    if args.what == "report":
        from .report import write

        if not args.results or args.folder is None:
            raise ValueError("a report needs files of results, and -o with a folder")
        write([json.loads(path.read_text()) for path in args.results], args.folder, args.page, args.front)
        return 0

    if args.what == "compare":
        from .compared import compare

        if len(args.results) != 2:
            raise ValueError("compare takes two files of results")
        text, same = compare(*(json.loads(path.read_text()) for path in args.results))
        print(text)
        return 0 if same else 1

    from .running import Results, Runner, measure, scratch_folder

    results = Results(args.out)
    if args.what in ("load", "tokenizer"):
        run_script(args.what, results)
        return 0
    if args.what == "conditions":
        from .conditions import tried

        results.found["conditions"] = {"environment": results.here, "rows": list(tried())}
        results.save()
        return 0
    with scratch_folder(args.weights) as folder:
        runner = Runner(folder, args.peers, args.timeout, args.snapshots)
        measure(shard(chosen_cells(args), args.shard), results, runner, args.repeats)
    return 0


def chosen_cells(args: argparse.Namespace) -> list[Cell]:
    """The cells that the options name, or the set for a device."""
    if args.what == "fit":
        return fit_set()
    if args.what == "peers":
        return peers_set()
    if args.what == "scaling":
        return scaling_set()
    kinds: tuple[What, ...] = KINDS if args.what == "all" else (args.what,)
    options = (args.model, args.impl, args.dtype, args.batch, args.length, args.mode)
    if not any(options):
        cells = cuda_set() if args.device == ["cuda"] else small_set()
        kept = (cell for cell in cells if args.device is None or cell.device in args.device)
        return [cell for cell in kept if cell.what in kinds]
    return [
        cell
        for what in kinds
        for cell in grid(
            what,
            args.model or BASES,
            args.impl or OURS_AND_UPSTREAM,
            args.device or ("plan" if what == "memory" else "cpu",),
            args.dtype or ("float32",),
            args.batch or (1,),
            args.length or (512,),
            args.mode or ("train",),
        )
        if not (what == "speed" and cell.device.startswith("plan"))
    ]


def small_set() -> list[Cell]:
    """Plans of the published models, and small ones on the CPU."""

    def plans(batch: int, lengths: tuple[int, ...], *modes: Mode) -> list[Cell]:
        return grid("memory", BASES, IN_PLACE_AND_NOT, ("plan",), ("float32",), (batch,), lengths, modes)

    lengths = plans(1, (128, 512, 1024, 2048, 4096, 8192), "infer", "train")
    modes = plans(4, (512,), *MODES)

    held, timed = (on_cpu(what, SMALL, OURS_AND_UPSTREAM[:3]) for what in KINDS)
    return list(dict.fromkeys([*lengths, *modes, *held, *timed]))


def peers_set() -> list[Cell]:
    """Other projects beside upstream and ours, and the speed of old releases and lines in small models."""
    held, timed = (on_cpu(what, BASES[1:], (*OURS_AND_UPSTREAM[:3], *OTHERS)) for what in KINDS)
    return [*held, *timed, *on_cpu("speed", SMALL, IN_PLACE_AND_NOT)]


def on_cpu(what: What, models: tuple[str, ...], impls: tuple[str, ...]) -> list[Cell]:
    """Steps over 512 tokens."""
    return grid(what, models, impls, ("cpu",), ("float32",), (1,), (512,), ("infer", "train"))


def scaling_set() -> list[Cell]:
    """Time against length on the CPU; upstream's memory ends it at 4,096 tokens."""
    lengths = (128, 512, 1024, 2048, 4096)
    return grid("speed", SMALL, OURS_AND_UPSTREAM[:3], ("cpu",), ("float32",), (1,), lengths, ("infer",))


def fit_set() -> list[Cell]:
    """Two batches of every published model, which tell the largest that fits."""
    impls, modes = OURS_AND_UPSTREAM[:3], ("train", "qlora")
    return grid(
        "memory", MODELS, impls, ("plan",), ("float32",), PLANNED, (512,), cast(tuple[Mode, ...], modes)
    )


def cuda_set() -> list[Cell]:
    """What a GPU is to measure; eight shards take minutes each."""
    return [
        cell
        for what in KINDS
        for cell in grid(
            what,
            ("deberta-base", "deberta-v3-base", "esm2_t33_650M_UR50D"),
            (*OURS_AND_UPSTREAM, "outplace-in-place", *OTHERS),
            ("cuda",),
            ("float32", "bfloat16"),
            (8,),
            (128, 512, 2048),
            ("infer", "train"),
        )
    ]


def run_script(what: str, results: Results) -> None:
    """The scripts that measure loading and tokenizing; their figures go into the results.

    Raises:
        ValueError: a script failed; the message is its last line.
    """
    script = {"load": "load_memory", "tokenizer": "tokenizers_speed"}[what]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"{__package__}.{script}", "--out", str(out)]
        surroundings = os.environ | {"PYTHONSAFEPATH": "1"}
        finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=surroundings)
        if finished.returncode:
            raise ValueError(f"{script} failed: {finished.stderr.strip().splitlines()[-1]}")
        results.found[what] = json.loads(out.read_text())
    results.save()
