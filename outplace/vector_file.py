"""A safetensors file written tensor by tensor, so that it may be larger than memory."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
MAX_HEADER_BYTES = 100_000_000
"""Longer ones are refused by the readers of the format."""


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is at `path` whole once the block ends, and not at all if the block fails.

    Until then it lies beside it under a temporary name, which only an outright kill leaves behind.

    Raises:
        OSError: the folder does not exist or cannot be written to, or `path` is no regular file.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is there and is no regular file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    temporary = path.parent / f".outplace-{secrets.token_hex(6)}.tmp"
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class VectorFile:
    """Tensors of known shapes, written in any order.

    Args:
        file: new, opened for writing.
        shapes: of every tensor by its name; in the order they lie in the file.
        dtype: of all of them, one of `DTYPE_NAMES`.
        metadata: the header's free part.

    Raises:
        ValueError: more names than the format's header has room for.
    """

    def __init__(
        self,
        file: BinaryIO,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        metadata: Mapping[str, str],
    ) -> None:
        self.file, self.dtype = file, dtype
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        self.places: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            self.places[name], start, end = end, end, end + prod(shape) * dtype.itemsize
            entries[name] = {
                "dtype": DTYPE_NAMES[str(dtype).removeprefix("torch.")],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        # A file name in the metadata need not be text.
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        header = header.ljust(-(-len(header) // 8) * 8)
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(
                f"{len(shapes)} names need a header of {len(header):,} bytes and safetensors allows "
                f"{MAX_HEADER_BYTES:,}; split the input into several files"
            )
        self.start = file.write(len(header).to_bytes(8, "little")) + file.write(header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor of the promised shape and dtype in its place."""
        from safetensors.torch import save

        assert tensor.dtype == self.dtype
        alone = save({"": tensor})
        self.file.seek(self.start + self.places[name])
        self.file.write(alone[8 + int.from_bytes(alone[:8], "little") :])
