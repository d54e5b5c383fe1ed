"""The kernels compiled for devices that are not there: `python triton_build.py ARCHITECTURE...`.

Prints a line for each kernel, and fails where one takes more shared memory than a block can have.
`test_triton.py` runs this in a process of its own.
"""

from __future__ import annotations

import argparse

import torch
import triton
from outplace.models.attention import fused, kernels
from triton.backends.compiler import GPUTarget

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block can have, by compute capability."""
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
TYPES = {"LSE": "*fp32", "DELTA": "*fp32", "MASK": "*u8", "SLOTS": "*i32", "CU": "*i32"}
NUMBERS = {"scale": "fp32", "dropout": "fp32", "seed": "i64"}


def shared_memory(name: str, architecture: int, dtype: torch.dtype, width: int, dropout: bool) -> int:
    """Bytes that a block of a kernel takes."""
    table = fused.FORWARD if name == "forward" else fused.BACKWARD
    blocks = table[fused.padded(width), dtype.itemsize]
    constants = {
        "C2P": True,
        "P2C": True,
        "MASKED": True,
        "DROPOUT": dropout,
        "PRECISION": "ieee",
        "WIDTH": width,
        "PADDED": fused.padded(width),
        "M": blocks.queries,
        "N": blocks.keys,
    }
    kernel = getattr(kernels, name)
    signature = {
        x: "constexpr"
        if x in constants
        else TYPES.get(x, f"*{NAMES[dtype]}")
        if x.isupper()
        else NUMBERS.get(x, "i32")
        for x in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (x, kind) in enumerate(signature.items())
        if kind.startswith("*") or x.endswith(("_token", "_head"))
    }
    compiled = triton.compile(
        triton.compiler.ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": blocks.warps, "num_stages": blocks.stages},
    )
    return int(compiled.metadata.shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", type=int, nargs="+", choices=SHARED)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 48, 64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16", "float32"])
    parser.add_argument("--dropout", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--kernels", nargs="+", default=["forward", "backward_of_queries", "backward_of_keys"]
    )
    args = parser.parse_args()
    for architecture in args.architectures:
        for dtype in args.dtypes:
            for width in args.widths:
                for dropout in args.dropout:
                    for name in args.kernels:
                        taken = shared_memory(name, architecture, getattr(torch, dtype), width, bool(dropout))
                        case = f"{name}, {architecture}, {dtype}, heads {width} wide, dropout {dropout}"
                        print(f"{case}: {taken:,} bytes", flush=True)
                        if taken > SHARED[architecture] << 10:
                            raise SystemExit(f"{case}: takes more than {SHARED[architecture]} KiB")


if __name__ == "__main__":
    main()
