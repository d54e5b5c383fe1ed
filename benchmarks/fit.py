"""`outplace fit`: the largest batch that a GPU trains, by plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .cells import MODES, Cell
from .shapes import MODELS

GPUS = (8, 16, 24, 40, 80, 141)
GB = 10**9
"""A card sold with 24 GB has 24 · 2³⁰ bytes; the 7 % between are left for CUDA itself and for gaps."""
PLANNED = 32, 64
"""Batches that are planned: memory is taken to be linear. In smaller ones the peak of backward may be the
gradients', which do not grow with the batch; the optimiser's step is never below that."""

Figures = dict[str, Any]
"""A row of the results."""

DESCRIPTION = """\
The largest batch of a published model that fits a GPU. Two batches are planned without a GPU and without
numbers (PyTorch's fake tensors); memory of forward and backward is linear in the batch, and the result is
planned too, but for attention by blocks. A card of N GB is taken to have N · 10⁹ bytes for tensors."""

EPILOG = """\
example:
  outplace fit microsoft/deberta-v3-base --gpu 24 --length 512 --mode qlora"""


def add_parser(subparsers: Any) -> None:
    """Add `fit` to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fit",
        help="the largest batch that a GPU trains",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=f"one of {', '.join(MODELS)}; an owner may precede it")
    parser.add_argument("--gpu", type=float, metavar="GB", help=f"its memory (default: {GPUS}, each)")
    parser.add_argument("--length", type=int, default=512, metavar="TOKENS", help="(default: 512)")
    parser.add_argument("--mode", choices=MODES, default="train", help="(default: train)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, … (default: float32)")
    parser.add_argument(
        "--impl", default="outplace", help="outplace, outplace-blockwise, transformers, … (default: outplace)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the largest batch.

    Raises:
        ValueError: no such model, or one that cannot be planned; the message says why.
    """
    from .measure import results

    name = args.model.rpartition("/")[2]
    if name not in MODELS:
        raise ValueError(f"{args.model} is none of the published models: {', '.join(MODELS)}")
    for name_of, value in (("--length", args.length), ("--gpu", args.gpu or 1)):
        if value <= 0:
            raise ValueError(f"{name_of} is {value}; it must be more than 0")

    def figures(batch: int) -> Figures:
        cell = Cell("memory", name, args.impl, "plan", args.dtype, batch, args.length, args.mode)
        found = next(results(cell, None))
        if "reason" in found:
            raise ValueError(f"{name} cannot be planned: {found['reason']}")
        return found

    planned = {batch: figures(batch) for batch in PLANNED}
    for gpu in GPUS if args.gpu is None else (args.gpu,):
        batch = largest_batch(planned, gpu * GB)
        # Blocks take time in proportion to the batch even here.
        if args.impl != "outplace-blockwise":
            batch = exact_batch(lambda size: int(figures(size)["peak"]), gpu * GB, batch)
        what = f"{args.impl}, {args.mode}, {args.dtype}, {args.length} tokens"
        print(f"{name} on {gpu:g} GB: {batch or 'not one'} ({what})")
    return 0


def largest_batch(planned: dict[int, Figures], capacity: float) -> int:
    """The largest batch within `capacity` bytes, from the figures of two batches; 0 where not one fits.

    Forward and backward are taken to be linear in the batch; the optimiser's step does not depend on it.
    """
    (low, at_low), (high, at_high) = sorted(planned.items())
    if at_low["of phases"].get("optimizer", 0) > capacity:
        return 0
    first, second = (
        max(found["of phases"].get(phase, 0) for phase in ("forward", "backward"))
        for found in (at_low, at_high)
    )
    slope = (second - first) / (high - low)
    return max(int(low + (capacity - first) // slope), 0)


def exact_batch(peak: Callable[[int], int], capacity: float, guess: int) -> int:
    """The largest batch within `capacity` bytes, by planning a guess and its neighbours."""
    batch = guess
    while batch > 0 and peak(batch) > capacity:
        batch -= 1
    while peak(batch + 1) <= capacity:
        batch += 1
    return batch
