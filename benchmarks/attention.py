"""DeBERTa-V3 in time and memory, upstream beside ours: `make bench-attention`.

Each figure is of a process of its own, the two libraries in turn; medians of the repeats. The shape is
deberta-v3-base's with 1,000 words, since the embeddings are the same in both. Memory is the most that the
first step of a length holds beyond what the process held before it (`VmHWM` - `VmRSS`), after a step over 8
tokens that makes the gradients. That makes the position tables too that our inference keeps, which are
counted beside. Time is of the step after that. The floor of time is the multiply-adds of the products that
must be formed at the rate of a large product, measured in the same run; that of memory is what backward needs
and cannot have without a product.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

LIBRARIES = ("transformers", "outplace")
LENGTHS = (128, 512, 1024, 2048)
MODES = ("eval", "train")
CONFIG = {
    "vocab_size": 1000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_position_embeddings": 512,
}


def measure(library: str, mode: str, length: int, layers: int) -> dict[str, float]:
    """Seconds and peak bytes of one step."""
    import torch
    from outplace.benchmarks.measure import resident

    if library == "outplace":
        from outplace import DebertaV2Config as Config
        from outplace import DebertaV2Model as Model
    else:
        from transformers import DebertaV2Config as Config  # type: ignore[assignment]
        from transformers import DebertaV2Model as Model  # type: ignore[assignment]
    torch.manual_seed(0)
    model = Model(Config(**CONFIG | {"num_hidden_layers": layers})).train(mode == "train")  # type: ignore[arg-type]

    def step(length: int) -> None:
        ids = torch.randint(1, 1000, (1, length))
        mask = torch.ones_like(ids)
        with torch.set_grad_enabled(mode == "train"):
            states = model(ids, attention_mask=mask).last_hidden_state
        if mode == "train":
            states.mean().backward()

    step(8)
    # What the allocator has kept of that step must not count as held before.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step(length)
    peak, started = resident("VmHWM") - before, time.perf_counter()
    step(length)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak": peak, "kept": getattr(model, "kept_position_bytes", 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--measure", nargs=3, metavar=("LIBRARY", "MODE", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        library, mode, length = args.measure
        print(json.dumps(measure(library, mode, int(length), args.layers)))
        return
    import torch
    import transformers
    from outplace.benchmarks.cells import Cell
    from outplace.benchmarks.floors import floor, product_rate

    rows = []
    times, sizes = "seconds, upstream | ours | ratio | floor", "MB, upstream | ours | ratio | kept | floor"
    print(f"| step | tokens | {times} | {sizes} |")
    print("| --- |" + " ---: |" * 10)
    for mode in args.modes:
        for length in args.lengths:
            runs: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
            for _ in range(args.repeats):
                for library in LIBRARIES:
                    case = ["--layers", str(args.layers), "--measure", library, mode, str(length)]
                    command = [sys.executable, *sys.orig_argv[1 : -len(sys.argv)], __file__, *case]
                    output = subprocess.run(command, check=True, capture_output=True, text=True)
                    runs[library].append(json.loads(output.stdout.splitlines()[-1]))
            rate = product_rate(torch.device("cpu"), torch.float32)
            kind = "infer" if mode == "eval" else "train"
            # Without parameters, what is left of the floor is activations.
            least = floor(Cell("speed", "deberta-v3-base", "outplace", length=length, mode=kind), 0)
            floors = {
                "seconds": least.multiply_adds / rate * args.layers / 12,
                "peak": least.bytes * (args.layers / 12 if mode == "train" else 1),
            }
            row: dict[str, Any] = {"mode": mode, "length": length, "rate": rate}
            cells = [mode, f"{length:,}"]
            for figure, unit, digits in (("seconds", 1.0, 2), ("peak", 1e6, 0)):
                theirs, mine = (median(run[figure] for run in runs[library]) for library in LIBRARIES)
                row |= {
                    f"upstream {figure}": theirs,
                    f"our {figure}": mine,
                    f"least {figure}": floors[figure],
                }
                cells += [f"{theirs / unit:.{digits}f}", f"{mine / unit:.{digits}f}", f"{theirs / mine:.2f}"]
                if figure == "peak":
                    row["kept"] = runs["outplace"][0]["kept"]
                    cells.append(f"{row['kept'] / unit:.0f}")
                cells.append(f"{floors[figure] / unit:.{digits}f}")
            rows.append(row)
            print("| " + " | ".join(cells) + " |", flush=True)
    if args.out:
        environment = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "repeats": args.repeats,
        }
        args.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
