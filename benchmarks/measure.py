"""Cells in this process, a line of JSON for each. `running.py` starts it."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from .cells import Cell
from .floors import floor, product_rate
from .implementations import PEERS, Classifier, Unavailable, as_states, build, configuration, prepare
from .memory import CUDA_BLOCK, Ledger, Peak
from .shapes import MODELS

CHECKED = 1, 300
"""Rows and tokens on which outputs are compared: enough for attention by blocks."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""Of the largest difference from upstream's float32 on a CPU, relative to its largest magnitude."""
TIMED = 0.3
"""Seconds that are to be filled with timed steps, by one at least, after one that does not count."""


class Step:
    """A model, its optimiser and its batch; calling it is one step."""

    def __init__(self, model: nn.Module, width: int, cell: Cell, device: torch.device) -> None:
        self.training = cell.mode != "infer"
        states = as_states(model)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        with device:
            self.model = Classifier(states, nn.Linear(width, 2, dtype=dtype)).train(self.training)
        self.ids = torch.randint(4, 24, (cell.batch, cell.length), device=device)
        self.labels = torch.zeros(cell.batch, dtype=torch.long, device=device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # What torch itself chooses on CUDA, and what on a CPU.
        foreach = cell.device in ("plan", "cuda")
        self.optimizer = torch.optim.AdamW(trained, foreach=foreach) if self.training else None
        if self.optimizer is not None:
            # Its state is there before the step that is measured.
            for parameter in trained:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32)} | moments

    def __call__(self, ledger: Ledger | None = None) -> None:
        if ledger is not None:
            ledger.start()
        if self.optimizer is None:
            with torch.no_grad():
                self.model(self.ids, self.labels)
            return
        loss = self.model(self.ids, self.labels)
        if ledger is not None:
            ledger.end_forward()
        loss.backward()
        if ledger is not None:
            ledger.name("gradients", (p.grad for p in self.model.parameters()))
            ledger.phase = "optimizer"
        self.optimizer.step()
        if ledger is not None:
            ledger.name("optimizer state", self.state())
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        """What the optimiser holds."""
        assert self.optimizer is not None
        return [x for values in self.optimizer.state.values() for x in values.values()]

    def ledger(self, rounding: int = 1) -> Peak:
        """The most memory of a step, once the optimiser has its state."""
        ledger = Ledger(self.model, rounding)
        ledger.name("parameters", [*self.model.parameters(), *self.model.buffers()])
        ledger.name("inputs", [self.ids, self.labels])
        if self.optimizer is not None:
            ledger.name("optimizer state", self.state())
        with ledger.watching():
            # In inference the first pass may keep what the next ones use.
            for _ in range(1 if self.training else 2):
                self(ledger)
        return ledger.peak()


def described(peak: Peak) -> dict[str, Any]:
    """What of a peak goes into the results; layers are put together."""
    modules: Counter[str] = Counter()
    for name, size in peak.by_module("saved activations", "temporaries").items():
        short = ".".join("*" if part.isdigit() else part for part in name.split("."))
        modules.update({short.removeprefix("states.backbone."): size})
    return {
        "peak": peak.bytes,
        "phase": peak.phase,
        "of phases": peak.of_phases,
        "parts": peak.parts(),
        "modules": dict(modules.most_common(12)),
        "largest": peak.largest(5),
    }


def attention_path(model: Any, cell: Cell, device: torch.device) -> str:
    """Which attention is taken."""
    if cell.impl.startswith("outplace"):
        from outplace.models.attention.plan import choose

        return choose(model.config, cell.batch, cell.length, device, False).path
    if cell.impl in PEERS:  # it puts another in the place of what the configuration names
        return "its own"
    return str(getattr(getattr(model, "config", None), "_attn_implementation", "its own"))


def plan(cell: Cell) -> dict[str, Any]:
    """Memory of a step on fake tensors.

    Raises:
        Unavailable: a CPU's operators do not tell what CUDA's would allocate.
    """
    from .planning import Target, planned

    target = "cpu" if cell.device == "plan-cpu" else "cuda"
    with (
        planned(cast(Target, target)),
        own_lines(cell),
        default_dtype("float32" if cell.mode == "qlora" else cell.dtype),
    ):
        model: Any = build(cell, None)
        path = attention_path(model, cell, torch.device(target))
        if cell.impl.startswith("outplace"):
            model.config.attn_implementation = path
        dropout = model.config.attention_probs_dropout_prob if cell.mode != "infer" else 0
        if target == "cuda" and path == "sdpa" and dropout:
            raise Unavailable("fused attention with dropout has no counterpart on a CPU to plan by")
        width, parameters = model.config.hidden_size, sum(p.numel() for p in model.parameters())
        step = Step(prepare(model, cell, fake=True), width, cell, torch.device("cpu"))
        peak = step.ledger(CUDA_BLOCK if target == "cuda" else 1)
    least = floor(cell, parameters)
    found = {"path": path, "parameters": parameters, **described(peak), "floor": least.bytes}
    if cell.mode == "qlora":
        found["note"] = "4-bit linears by a stand-in with the layout of bitsandbytes"
    return found


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Make new tensors of this dtype; fake parameters cannot be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def own_lines(cell: Cell) -> Any:
    """What changes our models for the cell's implementation."""
    if cell.impl != "outplace-in-place":
        return nullcontext()
    from .in_place import in_place

    return in_place()


def resident(field: str) -> int:
    """A field of this process' memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def difference(model: Any, folder: Path, device: torch.device) -> float:
    """The largest difference from upstream's output, relative to its largest magnitude.

    What padding does is tested elsewhere; these batches have none.
    """
    from safetensors.torch import load_file

    reference = load_file(folder / "reference.safetensors")
    with torch.no_grad():
        found = as_states(model).eval()(reference["ids"].to(device)).float().cpu()
    return float((found - reference["states"]).abs().max() / reference["states"].abs().max())


def real(cell: Cell, folder: Path, snapshot: Path | None) -> Iterator[dict[str, Any]]:
    """Memory of a step on numbers; or all but time, and then time as often as it is asked for.

    Raises:
        Unavailable: the implementation has no such mode, or its outputs differ from upstream's.
    """
    device, dtype = torch.device(cell.device), getattr(torch, cell.dtype)
    with own_lines(cell):
        torch.manual_seed(0)
        model: Any = build(cell, folder)
        path = attention_path(model, cell, device)
        width = MODELS[cell.model][1]["hidden_size"]
        parameters = sum(p.numel() for p in model.parameters())
        # Beside 4-bit weights all stays in float32.
        model = model.to(device, torch.float32 if cell.mode == "qlora" else dtype)
        far = difference(model, folder, device)
        if not far <= TOLERANCES[cell.dtype]:
            raise Unavailable(f"its outputs differ from upstream's by {far:.1e}, relative to the largest")
        found: dict[str, Any] = {"path": path, "parameters": parameters, "difference": far}
        step = Step(prepare(model, cell, fake=False), width, cell, device)
        least = floor(cell, parameters)
        if cell.what == "speed":
            yield found
            # Others may have been getting ready until now.
            rate = product_rate(device, dtype)
            while True:
                yield {"seconds": timed(step, device), "rate": rate, "floor": least.multiply_adds / rate}
        step()
        if device.type == "cuda":
            yield found | cuda_memory(step, snapshot) | {"floor": least.bytes}
            return
        # What the allocator has kept of the first step must not count as held before.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        step()
        rise = resident("VmHWM") - before
        yield found | described(step.ledger()) | {"resident rise": rise, "floor": least.bytes}


def timed(step: Step, device: torch.device) -> float:
    """Seconds a step, the median of some."""
    step()
    found: list[float] = []
    while sum(found) < TIMED:
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    if device.type == "cuda":
        # Others are waiting for their turn on the device.
        torch.cuda.empty_cache()
    return median(found)


def cuda_memory(step: Step, snapshot: Path | None) -> dict[str, Any]:
    """What the CUDA allocator says of a step, which a ledger breaks down in another."""
    if snapshot is not None:
        torch.cuda.memory._record_memory_history()
    torch.cuda.reset_peak_memory_stats()
    step()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    if snapshot is not None:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
    parts = described(step.ledger(CUDA_BLOCK))
    return {**parts, "peak by ledger": parts["peak"], "peak": allocated, "reserved": reserved}


def write_checkpoint(model_name: str, folder: Path) -> None:
    """Upstream's encoder and its output of a batch; its weights are wide enough for every term to count."""
    import transformers
    from safetensors.torch import save_file

    cell = Cell("speed", model_name, "transformers")
    extra = {"add_pooling_layer": False} if cell.family == "Esm" else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{cell.family}Model")(configuration(cell, transformers), **extra).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if name.endswith("orm.weight") else 0.0, 0.1)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        ids = torch.randint(4, 24, CHECKED)
        states = model(ids).last_hidden_state
    model.save_pretrained(folder)
    save_file({"ids": ids, "states": states.contiguous()}, folder / "reference.safetensors")


def results(cell: Cell, folder: Path | None, snapshot: Path | None = None) -> Iterator[dict[str, Any]]:
    """The figures of a cell, and its seconds as often as they are asked for; or why there are none."""
    try:
        if cell.device.startswith("plan"):
            yield plan(cell)
        elif cell.device == "cuda" and not torch.cuda.is_available():
            yield {"reason": "not yet measured"}
        else:
            assert folder is not None
            yield from real(cell, folder, snapshot)
    except Exception as error:  # a row says why: whatever a library raises is a result
        first = (str(error).strip() or "no message").splitlines()[0]
        if isinstance(error, torch.cuda.OutOfMemoryError) or "allocate memory" in first:
            yield {"reason": f"out of memory: {first}"}
        else:
            yield {"reason": first if isinstance(error, Unavailable) else f"{type(error).__name__}: {first}"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", type=json.loads)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--snapshot", type=Path)
    parser.add_argument("--write-checkpoint", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.write_checkpoint:
        write_checkpoint(cast(str, args.cells[0]["model"]), args.folder)
        return 0
    for row in args.cells:
        cell = Cell.of(row)
        found = results(cell, args.folder, args.snapshot)
        print(json.dumps(next(found)), flush=True)
        if cell.what == "speed":
            # A line for each turn.
            for _, seconds in zip(sys.stdin, found, strict=False):
                print(json.dumps(seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
