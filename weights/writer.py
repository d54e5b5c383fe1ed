"""Write safetensors files tensor by tensor, so that they may be larger than memory.

The library's own writer for torch needs NumPy, which is none of this package's requirements.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
METADATA = {"format": "pt"}
"""What upstream looks for in a file's header."""
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


class TensorFile:
    """A safetensors file of tensors that are known by shape and dtype, written in any order.

    Args:
        file: new, opened for writing.
        entries: dtype, one of `DTYPE_NAMES`, and shape of every tensor by its name. Of one width they
            lie in the file in this order.
        metadata: the header's free part.

    Raises:
        ValueError: more names than the format's header has room for.
    """

    def __init__(
        self,
        file: BinaryIO,
        entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        self.file, self.entries = file, entries
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self.places: dict[str, int] = {}
        end = 0
        # Wide numbers first: so each tensor begins at a multiple of its own width.
        for name, (dtype, shape) in sorted(entries.items(), key=lambda entry: -entry[1][0].itemsize):
            self.places[name], start, end = end, end, end + prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        # A file name in the metadata need not be text.
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        content = content.ljust(-(-len(content) // 8) * 8)
        if len(content) > MAX_HEADER_BYTES:
            raise ValueError(
                f"{len(entries)} names need a header of {len(content):,} bytes and safetensors allows "
                f"{MAX_HEADER_BYTES:,}; split the input into several files"
            )
        self.start = file.write(len(content).to_bytes(8, "little")) + file.write(content)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor of the promised shape and dtype in its place."""
        assert (tensor.dtype, tuple(tensor.shape)) == self.entries[name]
        tensor = tensor.detach().cpu().contiguous()
        self.file.seek(self.start + self.places[name])
        if tensor.numel():
            self.file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file of torch tensors, whole or not at all."""
    with new_file(path) as file:
        writer = TensorFile(file, {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}, METADATA)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
