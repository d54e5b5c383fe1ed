"""ESM-2 35M over a padded and a uniform batch, upstream's sdpa beside ours: `make bench-packing`.

Eight sequences of at most 256 tokens; the padded batch is 56 % full. Times are of one process in which the
two libraries take turns, step by step; medians. Memory is the most that a step holds beyond what its process
held before (`VmHWM` - `VmRSS`), of processes of their own, after a small step that makes the gradients. The
two libraries have the same weights, and the largest difference of real tokens is printed beside.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

LIBRARIES = ("transformers", "outplace")
MODES = ("eval", "train")
LENGTHS = {"56 % full": (256, 224, 176, 144, 120, 96, 80, 52), "uniform": (256,) * 8}
CONFIG = {
    "vocab_size": 33,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "hidden_size": 480,
    "num_hidden_layers": 12,
    "num_attention_heads": 20,
    "intermediate_size": 1920,
    "max_position_embeddings": 1026,
    "position_embedding_type": "rotary",
    "emb_layer_norm_before": False,
    "token_dropout": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


HEAD = (
    *("step", "batch", "seconds, upstream", "ours", "upstream / ours"),
    *("extra peak MB, upstream", "ours", "upstream / ours", "logits apart"),
)


def build(library: str, mode: str, layers: int) -> Any:
    import torch

    torch.manual_seed(0)
    config = CONFIG | {"num_hidden_layers": layers}
    if library == "outplace":
        from outplace import EsmConfig, EsmForMaskedLM

        return EsmForMaskedLM(EsmConfig(**config)).train(mode == "train")  # type: ignore[arg-type]
    import transformers

    upstream = transformers.EsmConfig(**config)  # type: ignore[arg-type]
    upstream._attn_implementation = "sdpa"
    return transformers.EsmForMaskedLM(upstream).train(mode == "train")


def batch(lengths: tuple[int, ...]) -> dict[str, Any]:
    import torch

    ids = torch.randint(4, 24, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    labels = torch.where(mask & (ids % 7 == 0), ids, -100)
    ids = torch.where(labels == -100, torch.where(mask, ids, 1), 32)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def step(model: Any, inputs: dict[str, Any], mode: str) -> Any:
    import torch

    with torch.set_grad_enabled(mode == "train"):
        output = model(**inputs)
    if mode == "train":
        output.loss.backward()
    return output.logits.detach()


def peak(library: str, mode: str, case: str, layers: int) -> int:
    """Bytes that one step holds beyond what the process held before it, at the most."""
    from outplace.benchmarks.measure import resident

    model = build(library, mode, layers)
    step(model, batch((8, 8)), mode)
    # What the allocator has kept of that step must not count as held before.
    ctypes.CDLL(None).malloc_trim(0)
    inputs = batch(LENGTHS[case])
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step(model, inputs, mode)
    return resident("VmHWM") - before


def peaks(mode: str, case: str, layers: int, repeats: int) -> dict[str, float]:
    found: dict[str, list[int]] = {library: [] for library in LIBRARIES}
    for _ in range(repeats):
        for library in LIBRARIES:
            asked = ["--layers", str(layers), "--peak", library, mode, case]
            command = [sys.executable, *sys.orig_argv[1 : -len(sys.argv)], __file__, *asked]
            output = subprocess.run(command, check=True, capture_output=True, text=True)
            found[library].append(int(output.stdout.splitlines()[-1]))
    return {library: median(values) for library, values in found.items()}


def times(mode: str, case: str, layers: int, repeats: int) -> tuple[dict[str, float], float]:
    """Seconds of a step of each library, and how far their logits of real tokens are apart."""
    models = {library: build(library, mode, layers) for library in LIBRARIES}
    models["outplace"].load_state_dict(models["transformers"].state_dict())
    inputs = batch(LENGTHS[case])
    logits = {library: step(model, inputs, mode) for library, model in models.items()}
    real = inputs["attention_mask"].bool()
    apart = float((logits["outplace"] - logits["transformers"])[real].abs().max())
    found: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for _ in range(repeats):
        for library, model in models.items():
            started = time.perf_counter()
            step(model, inputs, mode)
            found[library].append(time.perf_counter() - started)
    return {library: median(values) for library, values in found.items()}, apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--memory-repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--page", type=Path, help="write the table into this document's block for it")
    parser.add_argument("--peak", nargs=3, metavar=("LIBRARY", "MODE", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak(*args.peak, args.layers))
        return
    from outplace.benchmarks.running import environment
    from outplace.benchmarks.tables import put_block, table

    rows: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    print(table(HEAD, [], 2), end="")
    for mode in MODES:
        for case in LENGTHS:
            seconds, apart = times(mode, case, args.layers, args.repeats)
            held = peaks(mode, case, args.layers, args.memory_repeats)
            rows.append({"mode": mode, "case": case, "seconds": seconds, "peak": held, "apart": apart})
            cells = [mode, case]
            for figure, unit, digits in ((seconds, 1.0, 2), (held, 1e6, 0)):
                theirs, mine = figure["transformers"], figure["outplace"]
                cells += [f"{theirs / unit:.{digits}f}", f"{mine / unit:.{digits}f}", f"{theirs / mine:.2f}"]
            lines.append([*cells, f"{apart:.0e}"])
            print("| " + " | ".join(lines[-1]) + " |", flush=True)
    if args.out:
        found = {"environment": environment(), "repeats": args.repeats, "rows": rows}
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    if args.page:
        put_block(args.page, table(HEAD, lines, 2), "make bench-packing")


if __name__ == "__main__":
    main()
