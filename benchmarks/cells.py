"""What is measured: one implementation of one model at one size, and how a result names it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .shapes import MODELS

What = Literal["memory", "speed"]
Device = Literal["plan", "plan-cpu", "cpu", "cuda"]
Mode = Literal["infer", "train", "train-checkpoint", "train-selective", "lora", "qlora"]
DEVICES: tuple[Device, ...] = ("plan", "plan-cpu", "cpu", "cuda")
MODES: tuple[Mode, ...] = ("infer", "train", "train-checkpoint", "train-selective", "lora", "qlora")
IMPLEMENTATIONS = (
    "transformers",
    "transformers-sdpa",
    "transformers-historic",
    "outplace",
    "outplace-eager",
    "outplace-sdpa",
    "outplace-blockwise",
    "outplace-in-place",
    "fair-esm",
    "flashdeberta",
    "disentangled-flash",
    "faesm",
    "esm-cpp",
    "onnxruntime",
)
"""Library and attention path; `outplace` alone takes its "auto". "transformers-historic" is the release
that a report was made about, and "outplace-in-place" is "outplace-eager" with that release's lines."""


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        device: "cpu" and "cuda" run; "plan" says what CUDA would allocate, "plan-cpu" what a CPU would.
        mode: a forward pass, or a whole step of training with AdamW: of all parameters, with every layer
            recomputed, with attention alone recomputed, of adapters, and of adapters over 4-bit weights
            with every layer recomputed.
    """

    what: What
    model: str
    impl: str
    device: Device = "cpu"
    dtype: str = "float32"
    batch: int = 1
    length: int = 128
    mode: Mode = "infer"

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(asdict(self).values())

    @property
    def family(self) -> str:
        return MODELS[self.model][0]

    @classmethod
    def of(cls, row: dict[str, Any]) -> Cell:
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def grid(
    what: What,
    models: Iterable[str],
    impls: Iterable[str],
    devices: Iterable[Device],
    dtypes: Iterable[str],
    batches: Iterable[int],
    lengths: Iterable[int],
    modes: Iterable[Mode],
) -> list[Cell]:
    """Every combination that exists; implementations of one size follow each other."""
    sizes = itertools.product(models, devices, dtypes, batches, lengths, modes, impls)
    cells = [
        Cell(what, model, impl, device, dtype, batch, length, mode)
        for model, device, dtype, batch, length, mode, impl in sizes
    ]
    return [cell for cell in cells if serves(cell.impl, cell.family)]


def serves(impl: str, family: str) -> bool:
    """Whether an implementation has the family at all."""
    if impl in ("transformers-sdpa", "fair-esm", "faesm", "esm-cpp"):
        return family == "Esm"
    if impl in ("flashdeberta", "disentangled-flash"):
        return family == "DebertaV2"
    return not (impl == "outplace-blockwise" and family == "Esm")


def shard(cells: list[Cell], part: str) -> list[Cell]:
    """Part i of n of the cells, "i/n" with i from 1; implementations of one size stay together.

    Raises:
        ValueError: no such part.
    """
    try:
        i, n = map(int, part.split("/"))
        if not 1 <= i <= n:
            raise ValueError
    except ValueError:
        raise ValueError(f"--shard is {part!r}; it must be i/n with i from 1 to n") from None
    groups = [list(group) for _, group in itertools.groupby(cells, size_of)]
    return [cell for group in groups[i - 1 :: n] for cell in group]


def size_of(cell: Cell) -> tuple[Any, ...]:
    """All of a cell but the implementation."""
    return (cell.what, cell.model, cell.device, cell.dtype, cell.batch, cell.length, cell.mode)
