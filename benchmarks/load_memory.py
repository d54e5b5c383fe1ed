"""Peak memory of loading a checkpoint and time to its first forward pass, upstream's loader beside ours.

Memory is anonymous pages, which cannot be reclaimed; pages mapped from the file can. Each load runs in a
process of its own, the two libraries in turn; figures are medians. `python benchmarks/load_memory.py`
prints a table; `--out` writes the figures as JSON. Of pickles ours makes safetensors once: "pickle" is the
first load, with that, and "pickle, again" a later one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

FILES = ("one file", "shards", "pickle", "pickle, again")
CASES = [
    (library, dtype, files)
    for files in FILES
    for dtype in ("float32", "bfloat16")
    for library in ("transformers", "outplace")
]
REPEATS = 5
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
    """Load a DeBERTa-V2 masked-language model and run it, after warming up on a tiny one."""
    import torch

    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if library == "outplace":
        from outplace import DebertaV2Config as Config
        from outplace import DebertaV2ForMaskedLM as Model

        options["allow_pickle"] = True
    else:
        from transformers import DebertaV2Config as Config  # type: ignore[assignment]
        from transformers import DebertaV2ForMaskedLM as Model  # type: ignore[assignment]
    ids = torch.arange(1, 8)[None]
    tiny = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as small, torch.no_grad():
        Model(Config(**tiny, intermediate_size=8)).save_pretrained(small)
        Model.from_pretrained(small)(ids)
    started = time.perf_counter()
    model, peak = peak_of(lambda: Model.from_pretrained(folder, **options))
    with torch.no_grad():
        model(ids)
    seconds = time.perf_counter() - started
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"library": library, "dtype": dtype, "model": size, "peak": peak, "seconds": seconds}


def write_checkpoints(folder: Path) -> dict[str, Path]:
    """The same random weights in each form."""
    import torch

    import outplace

    model = outplace.DebertaV2ForMaskedLM(outplace.DebertaV2Config(**CONFIG))
    model.save_pretrained(folder / "one", max_shard_size="5GB")
    model.save_pretrained(folder / "many", max_shard_size="100MB")
    (folder / "pickle").mkdir()
    model.config.save_pretrained(folder / "pickle")
    torch.save(model.state_dict(), folder / "pickle" / "pytorch_model.bin")
    names = ("one", "many", "pickle", "pickle")
    return {files: folder / name for files, name in zip(FILES, names, strict=True)}


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

    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = write_checkpoints(folder)
        for _ in range(REPEATS):
            for library, dtype, files in CASES:
                if files == "pickle":
                    shutil.rmtree(folder / "home", ignore_errors=True)
                command = [sys.executable, __file__, "--measure", str(checkpoints[files]), library, dtype]
                environment = os.environ | {"HF_HOME": str(folder / "home")}
                output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                runs[library, dtype, files].append(json.loads(output.stdout.splitlines()[-1]))
    rows = []
    for (library, dtype, files), measured in runs.items():
        figures = {key: median(run[key] for run in measured) for key in ("model", "peak", "seconds")}
        spread = [min(run["seconds"] for run in measured), max(run["seconds"] for run in measured)]
        rows.append({"library": library, "dtype": dtype, "files": files, **figures, "spread": spread})
    print("| files | loaded as | library | peak / model | seconds to first forward |")
    print("| --- | --- | --- | ---: | ---: |")
    for row in rows:
        ratio, seconds = row["peak"] / row["model"], row["seconds"]
        print(f"| {row['files']} | {row['dtype']} | {row['library']} | {ratio:.2f} | {seconds:.2f} |")
    if args.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        environment = versions | {"python": platform.python_version(), "machine": platform.machine()}
        args.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
