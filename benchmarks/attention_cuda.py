"""Disentangled attention on a GPU: `python -m outplace.benchmarks.attention_cuda --out results.json`.

Attention alone, and whole deberta-v3-base and deberta-base, on every path here, in transformers, and in
peers that are installed. What a cell computes is compared with eager attention (float64; of models,
transformers' eager in float32) before its time counts. Cells come in the order of their worth, each is
written as soon as it is measured, and those in the file already are left out: run the command again to go
on. `--tune` times choices of blocks.

Seconds are medians, of forward passes or of forward and backward; bytes are the most that is allocated
beyond what was before.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from outplace.benchmarks.shapes import MODELS
from outplace.models.attention import fused
from outplace.models.attention.blockwise import blockwise_attention
from outplace.models.attention.disentangled import eager_attention, log_bucket, sdpa_attention, slots
from outplace.models.attention.masks import pair_mask
from outplace.models.attention.slots import SlotTable
from torch import Tensor

PATHS = ("eager", "sdpa", "blockwise", "triton")
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Of the largest difference, relative to the largest magnitude."""
TOKENS, WIDTH, SPAN = 16_384, 64, 256
MNLI = (12, 17, 19, 22, 24, 26, 28, 31, 33, 36, 39, 43, 48, 55, 68, 128)
"""Tokens of a batch's texts: short ones, and one that fills the batch."""
GRID = (
    (64, 32, 4, 1),
    (64, 32, 4, 2),
    (64, 64, 4, 1),
    (64, 64, 8, 2),
    (128, 32, 8, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
)
"""Blocks that `--tune` tries."""


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        what: "attention", or a model's name.
        impl: a path of ours, with `-packed` or `-graph`, or a library.
        mode: "forward" or "backward", which is both.
        lengths: of the sequences; padded to the longest.
    """

    what: str
    impl: str
    mode: str
    dtype: str
    lengths: tuple[int, ...]


def grid(smoke: bool) -> list[Cell]:
    """The cells, the most telling first."""
    if smoke:
        paths = [Cell("attention", impl, "backward", "float32", (40, 25)) for impl in PATHS]
        models = ("transformers", "eager", "triton", "triton-packed")
        return [*paths, *(Cell("tiny", impl, "forward", "float32", (30, 9)) for impl in models)]
    cells = []
    ours = ("triton", "triton-packed", "eager", "sdpa", "blockwise", "triton-graph")
    peers = ("transformers", "disentangled-flash", "flashdeberta")
    for dtype, mode in product(("bfloat16", "float16", "float32"), ("forward", "backward")):
        for length in (8192, 2048, 512, 128):
            batch = (length,) * max(TOKENS // length, 1)
            cells += [Cell("attention", impl, mode, dtype, batch) for impl in PATHS]
        for what in ("deberta-v3-base", "deberta-base"):
            cells += [Cell(what, impl, mode, dtype, MNLI * 2) for impl in (*ours[:5], *peers)]
            cells += [Cell(what, impl, mode, dtype, (2048,) * 2) for impl in (*ours[:1], *ours[2:5], *peers)]
            if mode == "forward":
                cells += [Cell(what, impl, mode, dtype, (128,)) for impl in (ours[0], ours[5], peers[0])]
    return cells


class Unavailable(Exception):
    """It cannot be measured here; the message says why."""


Step = Callable[[], Tensor]
"""Runs what is measured, and returns what is compared."""


def bench(step: Step, device: torch.device, seconds: float) -> dict[str, Any]:
    """Median seconds of the step, and the peak bytes of one."""
    step()
    cuda = device.type == "cuda"
    held = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    step()
    if cuda:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held if cuda else None
    times: list[float] = []
    while len(times) < (3 if seconds else 1) or (sum(times) < seconds and len(times) < 100):
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return {"seconds": median(times), "runs": len(times), "bytes": peak}


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def table_of(length: int, device: torch.device) -> SlotTable:
    """Slots as deberta-v3-base has them."""
    distance = torch.arange(1 - length, length, device=device)
    return SlotTable.of(slots(log_bucket(distance, SPAN, 512), SPAN), 2 * SPAN)


def attention(cell: Cell, device: torch.device, heads: int) -> tuple[Step, Callable[[], float]]:
    """Attention of random tensors as a step; and how far it is from eager attention in float64.

    That is compared on one sequence and two heads, gradients of all inputs included where they are taken.
    """
    dtype, length = getattr(torch, cell.dtype), max(cell.lengths)
    places = table_of(length, device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(len(cell.lengths), heads, length, WIDTH)] * 3 + [(heads, places.rows, WIDTH)] * 2
    tensors = [torch.randn(x, generator=generator, device=device).to(dtype) for x in shapes]
    mask = torch.arange(length, device=device) < torch.tensor(cell.lengths, device=device)[:, None]
    given = None if min(cell.lengths) == length else mask
    scale, pairs = (3.0 * WIDTH) ** 0.5, places.pairs() if cell.impl in ("eager", "sdpa") else None

    def run(impl: str, inputs: Any, mask: Tensor | None, pairs: Tensor | None) -> Tensor:
        query, key, value, to_key, to_query = inputs
        content, tables = (query, key, value), (to_key, to_query)
        if impl == "eager":
            return eager_attention(*content, *tables, pairs, pair_mask(mask), scale, 0.0)[0].transpose(1, 2)
        if impl == "sdpa":
            return sdpa_attention(*content, *tables, pairs, pair_mask(mask), scale, 0.0).transpose(1, 2)
        function = fused.triton_attention if impl == "triton" else blockwise_attention
        return function(*content, *tables, places, mask, scale, 0.0)

    def results(impl: str, inputs: Any, mask: Tensor | None, pairs: Tensor | None) -> list[Tensor]:
        if cell.mode == "forward":
            with torch.no_grad():
                return [run(impl, inputs, mask, pairs)]
        leaves = [x.detach().requires_grad_() for x in inputs]
        context = run(impl, leaves, mask, pairs)
        return [context.detach(), *torch.autograd.grad(context.sum(), leaves)]

    def difference() -> float:
        part = [x[:1, :2] for x in tensors[:3]] + [x[:2] for x in tensors[3:]]
        seen = None if given is None else given[:1]
        exact = results("eager", [x.double() for x in part], seen, places.pairs())
        return max(map(apart, results(cell.impl, part, seen, pairs), exact))

    return lambda: results(cell.impl, tensors, given, pairs)[0], difference


def models(cell: Cell, device: torch.device) -> tuple[Step, Callable[[], float]]:
    """A whole model as a step; and how far its states are from those of transformers' eager in float32.

    Raises:
        Unavailable: the implementation has no such model.
        ImportError: a package is not installed.
    """
    import transformers

    import outplace

    name = "deberta-v3-xsmall" if cell.what == "tiny" else cell.what
    family, fields = MODELS[name]
    if cell.what == "tiny":
        fields = fields | {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        fields = fields | {"intermediate_size": 64, "vocab_size": 100}
    dtype, length = getattr(torch, cell.dtype), max(cell.lengths)
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{family}Config")(**fields, **dropouts)
    torch.manual_seed(0)
    upstream = getattr(transformers, f"{family}Model")(config).to(device).eval()
    ids = torch.randint(1, config.vocab_size, (len(cell.lengths), length), device=device)
    mask = torch.arange(length, device=device) < torch.tensor(cell.lengths, device=device)[:, None]
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    with torch.no_grad():
        expected = upstream(**inputs).last_hidden_state[mask].cpu()
    path, _, how = cell.impl.partition("-")
    options: dict[str, Any] = {}
    if path in PATHS:
        ours = getattr(outplace, f"{family}Config")(**fields, **dropouts)
        model: Any = getattr(outplace, f"{family}Model")(ours, attn_implementation=path)
        model.load_state_dict(upstream.state_dict())
        options = {"pack": how == "packed"}
    elif cell.impl == "transformers":
        model = upstream
    elif family != "DebertaV2":
        raise Unavailable(f"{cell.impl} has no {family}")
    elif cell.impl == "flashdeberta":
        from flashdeberta import FlashDebertaV2Model  # type: ignore[import-not-found]

        model = FlashDebertaV2Model(config)
        model.load_state_dict(upstream.state_dict())
    else:
        import disentangled_flash  # type: ignore[import-not-found]

        model = copy.deepcopy(upstream).to(dtype)
        if cell.mode == "forward":
            disentangled_flash.optimize_deberta(model.eval(), sequence_lengths=[length])
        else:
            disentangled_flash.optimize_deberta_training(model)
    model = model.to(device, dtype).train(cell.mode == "backward")
    if how == "graph":
        from outplace.graphs import capture

        graph, output = capture(model, **inputs)

        def replay() -> Tensor:
            graph.replay()
            replayed: Tensor = output.last_hidden_state[mask]
            return replayed

        return replay, lambda: apart(replay().cpu(), expected)

    def step() -> Tensor:
        if cell.mode == "forward":
            with torch.no_grad():
                states: Tensor = model(**inputs, **options).last_hidden_state[mask]
            return states
        states = model(**inputs, **options).last_hidden_state[mask]
        states.float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        return states.detach()

    return step, lambda: apart(step().cpu(), expected)


def measure(cell: Cell, device: torch.device, heads: int, seconds: float) -> dict[str, Any]:
    """The figures of a cell, or why there are none."""
    try:
        build = attention(cell, device, heads) if cell.what == "attention" else models(cell, device)
        step, difference = build
        found = difference()
        if not found <= TOLERANCE[cell.dtype]:
            return {"difference": found, "failed": f"it differs by more than {TOLERANCE[cell.dtype]}"}
        return {"difference": found, **bench(step, device, seconds)}
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except (ImportError, Unavailable) as error:
        return {"failed": str(error)}
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        if "CUDA error" in str(error):
            raise  # nothing runs in this process after it
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def tune(width: int, dtype: str, device: torch.device, seconds: float) -> Iterator[str]:
    """The fastest blocks of the grid at 2,048 tokens, forward and for both kernels of backward."""
    global WIDTH
    WIDTH, key = width, (fused.padded(width), getattr(torch, dtype).itemsize)
    for name, table, mode in (
        ("FORWARD", fused.FORWARD, "forward"),
        ("BACKWARD", fused.BACKWARD, "backward"),
    ):
        found: dict[fused.Blocks, float] = {}
        usual = table[key]
        for blocks in dict.fromkeys((usual, *(fused.Blocks(*x) for x in GRID))):
            table[key] = blocks
            row = measure(Cell("attention", "triton", mode, dtype, (2048,) * 8), device, 12, seconds)
            figure = row.get("failed") or f"{row['seconds'] * 1e3:.2f} ms"
            yield f"{name} {key} {blocks}: {figure}"
            if "seconds" in row:
                found[blocks] = row["seconds"]
        table[key] = min(found, key=found.__getitem__) if found else usual
        yield f"{name}: {key}: {table[key]},"


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "interpreted": fused.is_interpreted(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON to write, and to go on with")
    parser.add_argument("--seconds", type=float, default=540.0, help="no cell is begun after so many")
    parser.add_argument("--each", type=float, default=0.3, help="seconds of repeats of a cell, at most")
    parser.add_argument("--only", nargs="+", help="implementations")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU with TRITON_INTERPRET=1")
    parser.add_argument("--tune", action="store_true", help="time blocks instead")
    parser.add_argument("--widths", type=int, nargs="+", default=[64], help="of heads, for --tune")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=TOLERANCE, help="for --tune")
    args = parser.parse_args()
    started = time.monotonic()
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit("no CUDA device: nothing is measured (--smoke runs tiny sizes on a CPU)")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tune:
        for width, dtype in product(args.widths, args.dtypes):
            for line in tune(width, dtype, device, args.each):
                print(line, flush=True)
                if time.monotonic() - started > args.seconds:
                    return
        return
    state: dict[str, Any] = {"environment": environment(device), "rows": []}
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text())
        if before["environment"] != state["environment"]:
            raise SystemExit(f"{args.out} is of {before['environment']}; this is {state['environment']}")
        state = before
    names = list(Cell.__dataclass_fields__)
    done = {json.dumps([row[name] for name in names]) for row in state["rows"]}
    for cell in grid(args.smoke):
        if json.dumps([*asdict(cell).values()]) in done or (args.only and cell.impl not in args.only):
            continue
        if time.monotonic() - started > args.seconds:
            print("the time is up; run it again to go on", flush=True)
            break
        row = asdict(cell) | measure(cell, device, 2 if args.smoke else 12, 0.0 if args.smoke else args.each)
        state["rows"].append(row)
        if args.out:
            whole = args.out.with_suffix(".part")
            whole.write_text(json.dumps(state, indent=1) + "\n")
            whole.replace(args.out)
        figure = row.get("failed") or f"{row['seconds'] * 1e3:.2f} ms, {(row['bytes'] or 0) / 1e6:.0f} MB"
        size = f"{len(cell.lengths)} x {max(cell.lengths)}"
        print(f"{cell.what} {size} {cell.dtype} {cell.mode} {cell.impl}: {figure}", flush=True)


if __name__ == "__main__":
    main()
