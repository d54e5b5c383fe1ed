"""What one line brings: programs on transformers' classes, without it and with it: `make bench-line`.

    import outplace.transformers; outplace.transformers.install()

Three sides take turns in one process and share one set of parameters: transformers as it is, the same model
with the line, and our own class around it. Training goes through `Trainer`: a sequence classifier with all
its 128,100 words, AdamW, all parameters or LoRA with checkpointing; 512 tokens a step. Inference is the model
without a head, one sequence. ESM-2 embeds as its page shows: batches of 8 as they come, padded, and the mean
of each sequence's states. Time is the median of the rounds, and a ratio that of the rounds' ratios; memory is
the most bytes of tensors alive at once in a step beyond those before it (`memory.Ledger`).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import outplace
from outplace import transformers as under

from .memory import Ledger
from .running import environment
from .shapes import MODELS
from .tables import MIB, put_block, table

SIDES = ("transformers", "line", "outplace")
TOKENS = 512
"""Tokens of a training step."""
LENGTHS = (128, 256, 512)
INFERENCE = (128, 512, 1024, 2048)
PROTEINS = (60, 90, 120, 150, 200, 260, 340, 450)
"""Residues of the proteins: each batch of 8 has one of each, in an order of its own."""
Step = Callable[[], None]
Row = dict[str, Any]


@contextmanager
def line(side: str) -> Iterator[None]:
    """Have the line in force for its side."""
    with under.installed() if side == "line" else nullcontext():
        yield


def build(shape: str, head: str) -> dict[str, nn.Module]:
    """Return the model of each side, all of the same parameters."""
    family, fields = MODELS[shape]
    torch.manual_seed(0)
    with under.installed():  # so that its configuration asks for no attention by name
        config = getattr(transformers, f"{family}Config")(**fields)
        model = getattr(transformers, f"{family}{head}")(config)
    return {"transformers": model, "line": model, "outplace": outplace.from_transformers(model)}


def measured(rounds: int, run: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return each side's seconds, by round; the sides take turns, and who begins changes."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in SIDES[turn % 3 :] + SIDES[: turn % 3]:
            with line(side):
                seconds[side].append(run[side]())
    return seconds


def row(what: str, model: str, size: str, seconds: dict[str, list[float]], live: dict[str, int]) -> Row:
    upstream, with_line, ours = (seconds[side] for side in SIDES)
    return {
        "what": what,
        "model": model,
        "size": size,
        "seconds": {side: median(seconds[side]) for side in SIDES},
        "rounds": seconds,
        "live": live,
        "faster": median(a / b for a, b in zip(upstream, with_line, strict=True)),
        "beside our class": median(a / b for a, b in zip(ours, with_line, strict=True)),
        "environment": environment(),
    }


def peak(model: nn.Module, step: Step) -> int:
    """Return the most bytes of tensors that a step adds."""
    step()  # makes gradients, optimiser state and kept tables, which are no part of a step
    ledger = Ledger(model)
    kept = (getattr(module, "kept", None) for module in model.modules())
    tables = [x for of_layer in kept if of_layer is not None for x in of_layer.tables if x is not None]
    gradients = [x.grad for x in model.parameters()]
    ledger.name("parameters", [*model.parameters(), *model.buffers(), *gradients, *tables])
    before = ledger.total
    ledger.start()
    with ledger:
        step()
    return ledger.highest - before


class Timer(transformers.TrainerCallback):
    """Times each step of `Trainer`: forward, backward, clipping and optimiser."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def training(shape: str, length: int, lora: bool, rounds: int) -> Row:
    models = build(shape, "ForSequenceClassification")
    if lora:
        import peft

        options = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query_proj", "value_proj"])
        wrapped: Any = peft.get_peft_model(models["line"], options)
        wrapped.enable_input_require_grads()
        models = {"transformers": wrapped, "line": wrapped, "outplace": outplace.from_transformers(wrapped)}
        models["outplace"].enable_input_require_grads()  # type: ignore[operator]
    batch = TOKENS // length
    rows = [
        {
            "input_ids": torch.randint(5, 128_000, (length,)),
            "attention_mask": torch.ones(length),
            "labels": i % 2,
        }
        for i in range(batch * 2)
    ]

    def run(side: str) -> float:
        timer = Timer()
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                max_steps=2,
                per_device_train_batch_size=batch,
                gradient_checkpointing=lora,
                gradient_checkpointing_kwargs={"use_reentrant": False},
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            )
            trainer = transformers.Trainer(models[side], arguments, train_dataset=rows, callbacks=[timer])
            trainer.train()
        models[side].zero_grad(set_to_none=True)
        return timer.seconds[-1]

    inputs = {key: torch.stack([torch.as_tensor(x[key]) for x in rows[:batch]]) for key in rows[0]}

    def step(side: str) -> Step:
        def once() -> None:
            models[side].train()(**inputs).loss.backward()

        return once

    seconds = measured(rounds, {side: lambda side=side: run(side) for side in SIDES})  # type: ignore[misc]
    live = {}
    for side in SIDES:
        with line(side):
            live[side] = peak(models[side], step(side))
    what = "LoRA, checkpointing" if lora else "all parameters"
    return row(f"training, {what}", shape, f"{batch} × {length:,}", seconds, live)


def timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@torch.no_grad()
def inference(shape: str, length: int, rounds: int) -> Row:
    models = {side: model.eval() for side, model in build(shape, "Model").items()}
    ids = torch.randint(5, 128_000, (1, length))
    mask = torch.ones_like(ids)
    return timed_passes("inference", shape, f"1 × {length:,}", models, rounds, [(ids, mask)])


@torch.no_grad()
def embedding(shape: str, rounds: int) -> Row:
    models = {side: model.eval() for side, model in build(shape, "Model").items()}
    order, batches = random.Random(0), []
    for _ in range(3):
        lengths = order.sample(PROTEINS, len(PROTEINS))
        mask = (torch.arange(max(lengths) + 2) < torch.tensor(lengths)[:, None] + 2).long()
        batches.append((torch.where(mask == 1, torch.randint(4, 24, mask.shape), 1), mask))
    return timed_passes(
        "embedding, batches of 8", shape, f"24 × {min(PROTEINS)} to {max(PROTEINS)}", models, rounds, batches
    )


def timed_passes(
    what: str,
    shape: str,
    size: str,
    models: dict[str, Any],
    rounds: int,
    batches: list[tuple[Tensor, Tensor]],
) -> Row:
    def step(side: str) -> Step:
        def once() -> None:
            for ids, mask in batches:
                states = models[side](input_ids=ids, attention_mask=mask).last_hidden_state
                (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

        return once

    steps = {side: step(side) for side in SIDES}
    live = {}
    for side in SIDES:
        with line(side):
            live[side] = peak(models[side], steps[side])
    seconds = measured(rounds, {side: lambda side=side: timed(steps[side]) for side in SIDES})  # type: ignore[misc]
    return row(what, shape, size, seconds, live)


HEAD = (
    *("what", "model", "size", "seconds, without the line", "with it", "faster"),
    *("extra memory, MB, without", "with it", "less"),
    "our own class / the line, time",
)


def cells(x: Row) -> list[str]:
    """Return a row of the table."""
    upstream, with_line, _ = (x["live"][side] for side in SIDES)
    seconds = [f"{x['seconds'][side]:.2f}" for side in SIDES[:2]]
    sizes = [f"{size / MIB:,.0f}" for size in (upstream, with_line)]
    ratio = f"{upstream / with_line:.1f} ×"
    return [
        x["what"],
        x["model"],
        x["size"],
        *seconds,
        f"{x['faster']:.2f} ×",
        *sizes,
        ratio,
        f"{x['beside our class']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["training", "inference", "embedding"])
    parser.add_argument("--out", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="write the table into this document's block for it")
    options = parser.parse_args()
    rounds, rows = options.rounds, []
    plans: list[Callable[[], Row]] = []
    if "inference" in options.only:
        plans += [lambda n=n: inference("deberta-v3-base", n, rounds + 2) for n in INFERENCE]  # type: ignore[misc]
    if "embedding" in options.only:
        plans += [lambda: embedding("esm2_t12_35M_UR50D", rounds + 2)]
    if "training" in options.only:
        plans += [
            lambda s=s, n=n, lora=lora: training(s, n, lora, rounds)  # type: ignore[misc]
            for s in ("deberta-v3-small", "deberta-v3-base")
            for lora in (False, True)
            for n in LENGTHS
        ]
    print(table(HEAD, [], 3), end="")
    for plan in plans:
        rows = [*rows, plan()]
        print("| " + " | ".join(cells(rows[-1])) + " |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    if options.page:
        put_block(options.page, table(HEAD, map(cells, rows), 3), "make bench-line")


if __name__ == "__main__":
    main()
