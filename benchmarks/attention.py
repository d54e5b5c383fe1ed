"""DeBERTa-V3 in time and memory, upstream and a peer beside ours: `make bench-attention`.

Each figure is of a process of its own, the libraries in turn; medians of the repeats. The shape is
deberta-v3-base's with 1,000 words, since the embeddings are the same in both. A step over 8 tokens comes
first: it makes the gradients, and the position tables that our inference keeps, which are counted beside.
Memory is read twice. "Live" is the most bytes of tensors that a step holds at once beyond those that were
there before, which does not vary. "Resident" is the most that the first step of a length adds to the process
(`VmHWM` - `VmRSS`), with what the allocator keeps of freed tensors. Time is the median of the steps after
that, as many as make up 2,048 tokens, but no more than 5. The floor of time is the multiply-adds of the
products that must be formed at the rate of a large product, measured beside each row (the page takes the
median of all, since one varies by half); that of memory is what backward needs and cannot have without a
product.

Each size is measured twice: where glibc returns freed memory to the system, as it does by default, and where
it is told to keep it. What was returned is mapped and cleared again in the next step, and how much that is
hangs on which tensors happen to lie last in memory.

The peer is the torch backend of disentangled-flash, the one that runs this model without a GPU; there
`flashdeberta` takes upstream's attention. It has an environment of its own, made when first needed.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

LIBRARIES = ("transformers", "outplace")
PEER = "disentangled-flash"
LENGTHS = (128, 512, 1024, 2048)
MODES = ("eval", "train")
FREED = {
    "returned": {},
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}
"""Environment variables by what becomes of freed memory; glibc takes no larger threshold for mapping."""
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


class Subject:
    """A library's model, after a step over 8 tokens."""

    def __init__(self, library: str, mode: str, layers: int) -> None:
        import torch
        from outplace.benchmarks.implementations import with_disentangled_flash

        if library == "outplace":
            from outplace import DebertaV2Config as Config
            from outplace import DebertaV2Model as Model
        else:
            from transformers import DebertaV2Config as Config  # type: ignore[assignment]
            from transformers import DebertaV2Model as Model  # type: ignore[assignment]
        torch.manual_seed(0)
        config = Config(**CONFIG | {"num_hidden_layers": layers})  # type: ignore[arg-type]
        self.model: Any = Model(config).train(mode == "train")
        self.training = mode == "train"
        if library == PEER:
            self.model = with_disentangled_flash(self.model, "cpu", 8)
        self.step(8)

    def step(self, length: int) -> None:
        import torch

        ids = torch.randint(1, 1000, (1, length))
        mask = torch.ones_like(ids)
        with torch.set_grad_enabled(self.training):
            states = self.model(ids, attention_mask=mask).last_hidden_state
        if self.training:
            states.mean().backward()


def measure(library: str, mode: str, length: int, layers: int) -> dict[str, float]:
    """Seconds of one step, and what it adds to the process."""
    from outplace.benchmarks.measure import resident

    subject = Subject(library, mode, layers)
    # What the allocator has kept of that step must not count as held before.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    subject.step(length)
    peak = resident("VmHWM") - before
    seconds = []
    for _ in range(max(min(2048 // length, 5), 1)):
        started = time.perf_counter()
        subject.step(length)
        seconds.append(time.perf_counter() - started)
    return {"seconds": median(seconds), "resident": peak}


def measure_live(library: str, mode: str, length: int, layers: int) -> dict[str, float]:
    """The most bytes of tensors alive at once in a step, beyond those before; and of the kept tables."""
    from outplace.benchmarks.memory import Ledger

    subject = Subject(library, mode, layers)
    ledger = Ledger(subject.model)
    there = [*subject.model.parameters(), *subject.model.buffers()]
    kept = (getattr(module, "kept", None) for module in subject.model.modules())
    tables = [table for of_layer in kept if of_layer is not None for table in of_layer.tables]
    ledger.name("parameters", [*there, *(x.grad for x in there), *tables])
    before = ledger.total
    ledger.start()
    with ledger:
        subject.step(length)
    return {"live": ledger.highest - before, "kept": getattr(subject.model, "kept_position_bytes", 0)}


HEAD = (
    *("step", "freed memory", "tokens", "seconds, upstream", "ours", "upstream / ours", "ours / floor"),
    *("live MB, upstream", "ours", "upstream / ours", "with kept tables", "ours / floor"),
    "resident, upstream / ours",
    *("peer's seconds / ours", "its live MB / ours"),
)


def order(key: tuple[str, str, int]) -> tuple[int, int, int]:
    """Where a row stands in the file and in the table."""
    mode, freed, length = key
    return MODES.index(mode), list(FREED).index(freed), length


def line(row: dict[str, Any], rate: float) -> list[str]:
    """A row of the table in cells; `rate` is the multiply-adds a second of a large product."""

    def over(library: str, figure: str, more: int = 0) -> str:
        theirs = row.get(f"{library} {figure}")
        return "" if theirs is None else f"{theirs / (row[f'outplace {figure}'] + more):.2f}"

    upstream, ours = LIBRARIES
    cells = [row["mode"], row["freed"], f"{row['length']:,}"]
    cells += [f"{row[f'{library} seconds']:.2f}" for library in LIBRARIES]
    cells += [over(upstream, "seconds"), f"{row[f'{ours} seconds'] * rate / row['multiply-adds']:.1f}"]
    cells += [f"{row[f'{library} live'] / 1e6:,.0f}" for library in LIBRARIES]
    cells += [over(upstream, "live"), over(upstream, "live", row["kept"]) if row["kept"] else ""]
    cells += [f"{row[f'{ours} live'] / row['least live']:.1f}", over(upstream, "resident")]
    return [*cells, over(PEER, "seconds"), over(PEER, "live")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--freed", nargs="+", default=FREED, choices=FREED)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--out",
        type=Path,
        help="put the figures into this JSON file; what was measured in this environment stays",
    )
    parser.add_argument("--page", type=Path, help="write the table into this document's block for it")
    parser.add_argument("--peers", type=Path, help="also measure the peer, its environment in this folder")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, library, mode, length = args.measure
        of = measure_live if what == "live" else measure
        print(json.dumps(of(library, mode, int(length), args.layers)))
        return
    import torch
    from outplace.benchmarks.cells import Cell
    from outplace.benchmarks.floors import floor, product_rate
    from outplace.benchmarks.peers import interpreter
    from outplace.benchmarks.running import environment
    from outplace.benchmarks.tables import put_block, table

    libraries = [*LIBRARIES, *([] if args.peers is None else [PEER])]

    def run(freed: str, *case: str) -> dict[str, float]:
        _, library, *_ = case
        python = interpreter(Cell("speed", "deberta-v3-base", library), args.peers)
        command = [str(python), *sys.orig_argv[1 : -len(sys.argv)], __file__]
        command += ["--layers", str(args.layers), "--measure", *case]
        surroundings = os.environ | FREED[freed]
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=surroundings)
        found: dict[str, float] = json.loads(output.stdout.splitlines()[-1])
        return found

    here = environment()
    found: dict[str, Any] = {"rows": []}
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text())
    rows = {(row["mode"], row["freed"], row["length"]): row for row in found["rows"]}
    print(table(HEAD, [], 2), end="")
    for size in itertools.product(args.modes, args.freed, args.lengths):
        mode, freed, length = size
        if size in rows and rows[size]["environment"] | {"date": None} == here | {"date": None}:
            continue
        runs: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
        for _ in range(args.repeats):
            for library in libraries:
                runs[library].append(run(freed, "step", library, mode, str(length)))
        live = {library: run(freed, "live", library, mode, str(length)) for library in libraries}
        kind = "infer" if mode == "eval" else "train"
        # Without parameters, what is left of the floor is activations.
        least = floor(Cell("speed", "deberta-v3-base", "outplace", length=length, mode=kind), 0)
        row: dict[str, Any] = {
            "mode": mode,
            "freed": freed,
            "length": length,
            "environment": here,
            "rate": product_rate(torch.device("cpu"), torch.float32),
            "repeats": args.repeats,
            "multiply-adds": least.multiply_adds * args.layers // 12,
            "least live": least.bytes * (args.layers / 12 if mode == "train" else 1),
            "kept": live["outplace"]["kept"],
        }
        for library in libraries:
            for figure in ("seconds", "resident"):
                row[f"{library} {figure}"] = median(run[figure] for run in runs[library])
            row[f"{library} live"] = live[library]["live"]
        rows[size] = row
        found["rows"] = [rows[key] for key in sorted(rows, key=order)]
        print("| " + " | ".join(line(row, row["rate"])) + " |", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=2) + "\n")
    if args.page:
        rate = median(row["rate"] for row in found["rows"])
        lines = (line(row, rate) for row in found["rows"])
        put_block(args.page, table(HEAD, lines, 2), "make bench-attention")


if __name__ == "__main__":
    main()
