"""Read tensors from safetensors files, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError

# Names in a safetensors header of the dtypes that a parameter can have.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Reader:
    """The tensors of a checkpoint's files; they stay mapped, and come into memory as they are read.

    Args:
        paths: safetensors files.
        weight_map: which file (by its name) each key is in; each file's own keys where it is None.

    Raises:
        CheckpointError: a file is truncated or none of safetensors, or lacks a key that the map puts in it.
    """

    def __init__(self, paths: list[Path], weight_map: dict[str, str] | None) -> None:
        self._stack = ExitStack()
        self._home: dict[str, tuple[Path, Any]] = {}
        try:
            files = {path.name: (path, self._open(path)) for path in paths}
            for path, file in files.values():
                keys = set(file.keys())
                expected = {k for k, name in (weight_map or {}).items() if name == path.name}
                for key in sorted(expected - keys):
                    raise CheckpointError(f"{path} lacks the tensor {key!r}, which the index puts in it")
                self._home |= dict.fromkeys(keys if weight_map is None else expected, (path, file))
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            again = "; force_download=True fetches it again" if "snapshots" in path.parts else ""
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}{again}") from error

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._home))

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """The tensor's dtype as the file's header names it."""
        return self._slice(key).get_dtype()  # type: ignore[no-any-return]

    def float_dtype(self, key: str) -> torch.dtype | None:
        """The tensor's dtype where it is a floating one that a parameter can have."""
        return _FLOATS.get(self.dtype(key))

    def _slice(self, key: str) -> Any:
        return self._home[key][1].get_slice(key)

    def read(self, key: str) -> Tensor:
        path, file = self._home[key]
        try:
            return file.get_tensor(key)  # type: ignore[no-any-return]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: cannot read the tensor {key!r}: {error}") from error
