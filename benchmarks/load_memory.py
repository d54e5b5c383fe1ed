"""Peak memory of loading a checkpoint, upstream's loader beside ours.

Counts anonymous pages, which cannot be reclaimed; pages mapped from the file can. Each load runs in a
process of its own. `python benchmarks/load_memory.py` prints a table; `--out` writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = [
    (library, dtype, shards)
    for shards in ("one file", "shards")
    for dtype in ("float32", "bfloat16")
    for library in ("transformers", "outplace")
]
CONFIG = {
    "vocab_size": 128100,
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
"""deberta-v3-small's shape: 141 million parameters, of which 98 million are words."""


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_of(load: Callable[[], Any]) -> tuple[Any, int]:
    """What `load` returns, and how far anonymous memory rose above the start while it ran."""
    start, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = load()
    finally:
        done.set()
        watcher.join()
    return result, max(peak, anonymous_bytes()) - start


def measure(folder: str, library: str, dtype: str) -> dict[str, Any]:
    """Load a DeBERTa-V2 masked-language model, once for warming up imports on a config alone."""
    import torch

    if library == "outplace":
        from outplace import DebertaV2Config as Config
        from outplace import DebertaV2ForMaskedLM as Model
    else:
        from transformers import DebertaV2Config as Config  # type: ignore[assignment]
        from transformers import DebertaV2ForMaskedLM as Model  # type: ignore[assignment]
    tiny = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as small:
        Model(Config(**tiny, intermediate_size=8)).save_pretrained(small)
        Model.from_pretrained(small)
    model, peak = peak_of(lambda: Model.from_pretrained(folder, dtype=getattr(torch, dtype)))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"library": library, "dtype": dtype, "model": size, "peak": peak}


def write_checkpoints(folder: Path) -> dict[str, Path]:
    """The same random weights as one file and as shards."""
    import outplace

    model = outplace.DebertaV2ForMaskedLM(outplace.DebertaV2Config(**CONFIG))
    model.save_pretrained(folder / "one", max_shard_size="5GB")
    model.save_pretrained(folder / "many", max_shard_size="100MB")
    return {"one file": folder / "one", "shards": folder / "many"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "LIBRARY", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    import torch
    import transformers

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = write_checkpoints(Path(folder))
        for library, dtype, shards in CASES:
            command = [sys.executable, __file__, "--measure", str(checkpoints[shards]), library, dtype]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(output.splitlines()[-1]) | {"files": shards})
    print("| files | loaded as | library | peak / model |")
    print("| --- | --- | --- | ---: |")
    for row in rows:
        ratio = row["peak"] / row["model"]
        print(f"| {row['files']} | {row['dtype']} | {row['library']} | {ratio:.2f} |")
    if args.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        environment = versions | {"python": platform.python_version(), "machine": platform.machine()}
        args.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
