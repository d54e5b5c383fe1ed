"""Read tensors from the pickles of `torch.save`, and nothing but tensors."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from .errors import CheckpointError
from .hub import Weights
from .writer import DTYPE_NAMES


def read_pickles(pickles: Weights) -> dict[str, Tensor]:
    """The tensors of a checkpoint's pickles by their names, on the CPU.

    A pickle is a program. torch's restricted unpickler runs none but what builds tensors, and refuses
    the file at the first thing else. Files of the zip format stay mapped, and come into memory as they
    are read; those of the format before torch 1.6 are read whole.

    Raises:
        CheckpointError: a file is damaged, holds more than tensors by name, or lacks a tensor that the
            index puts in it.
    """
    paths, weight_map = pickles
    tensors: dict[str, Tensor] = {}
    for path in paths:
        held = _read(path)
        names = held if weight_map is None else [key for key, name in weight_map.items() if name == path.name]
        for name in names:
            if name not in held:
                raise CheckpointError(f"{path} lacks the tensor {name!r}, which the index puts in it")
            tensors[name] = held[name]
    return tensors


def _read(path: Path) -> dict[str, Tensor]:
    try:
        # Only explicit arguments: weights_only=True given here cannot be lifted by the environment.
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    # A damaged pickle can fail in as many ways as there are instructions.
    except Exception as error:
        refused = re.search(r"(?:GLOBAL|Unsupported (?:class|global):?) ([\w.]+)", str(error))
        what = (
            f"holds more than tensors, which is not read: {refused[1]}"
            if refused
            else f"is not a whole file of torch.save: {_first_line(error)}"
        )
        raise CheckpointError(f"{path} {what}") from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{path} holds a {type(held).__name__}, not tensors by name")
    for name, tensor in held.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise CheckpointError(f"{path} holds a {type(tensor).__name__} under {name!r}, not a tensor")
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{path}: {name} is of dtype {tensor.dtype} and layout {tensor.layout}, which safetensors "
                "has not"
            )
    return held


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
