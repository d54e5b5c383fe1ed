"""What each of two processes does in `test_distributed`: every check, one after the other, in one start."""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from outplace.parallel import tensor_parallel_plan

RANKS = 2
STEPS = 3
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = ("Deberta", "DebertaV2", "Esm")
SHARDED = [family + head for family in FAMILIES for head in ("ForMaskedLM", "ForSequenceClassification")]
UPSTREAM = [f"{family}ForSequenceClassification" for family in FAMILIES]
TENSOR_PARALLEL: dict[str, tuple[str, dict[str, Any]]] = {
    "DebertaV2": ("DebertaV2ForMaskedLM", {}),
    "DebertaV2, shared projections": ("DebertaV2ForSequenceClassification", {"share_att_key": True}),
    "Esm": ("EsmForMaskedLM", {}),
    "Esm, eager": ("EsmForTokenClassification", {"attn_implementation": "eager"}),
}


def build(name: str, **fields: Any) -> Any:
    if name == "EsmModel":
        # Else the pooler's parameters would have no gradient: what it computes is not in the loss.
        return type(tiny.model(name))(tiny.config(name, **NO_DROPOUT, **fields), add_pooling_layer=False)
    return tiny.model(name, **NO_DROPOUT, **fields).train()


def batch(name: str) -> dict[str, Tensor]:
    """Four rows, of which each half has as many real tokens as the other: a mean of means is the mean."""
    inputs = tiny.inputs(name, batch=4)
    if name.endswith("ForMultipleChoice"):
        return inputs
    hidden = inputs["attention_mask"][1] == 0
    alike = torch.zeros(4, len(hidden), dtype=torch.bool)
    alike[3] = hidden
    return {key: torch.where(alike, x[1], x) if x.ndim == 2 else x for key, x in inputs.items()}


def part(inputs: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {key: x.chunk(RANKS)[rank] for key, x in inputs.items()}


def objective(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    return output[0] if output[0].ndim == 0 else output[0][..., 0].mean()


def train(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The loss before each of a few steps, and after the last."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(STEPS):
        loss = objective(model, inputs)
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*losses, objective(model, inputs).detach()]


def mean_over_ranks(losses: list[Tensor]) -> Tensor:
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total / RANKS


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_same_training(model: nn.Module, losses: Tensor, alone: nn.Module, expected: list[Tensor]) -> None:
    assert losses[-1] < losses[0], losses
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-5, atol=1e-6)
    parameters = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole(parameters[name]), parameter, rtol=1e-4, atol=1e-5, msg=name)


def upstream(name: str) -> tuple[Any, Any]:
    """A model of transformers on our blocks, and one as it was."""
    import transformers

    from outplace.transformers import convert

    family = tiny.family(name)
    config = getattr(transformers, f"{family}Config")(**tiny.CONFIGS[family] | NO_DROPOUT)
    torch.manual_seed(0)
    plain = getattr(transformers, name)(config).train()
    return convert(copy.deepcopy(plain), quiet=True), plain


def data_parallel(name: str, rank: int, model: Any, alone: Any, *, unused: bool = False) -> None:
    inputs = batch(name)
    replica = DistributedDataParallel(model, find_unused_parameters=unused)
    losses = mean_over_ranks(train(replica, part(inputs, rank)))
    assert_same_training(model, losses, alone, train(alone, inputs))
    for key, parameter in model.named_parameters():
        assert unused or parameter.grad is not None or not parameter.requires_grad, f"{key} has no gradient"


def fully_sharded(
    name: str, rank: int, mesh: DeviceMesh, model: Any, alone: Any, *, checkpointing: bool
) -> None:
    inputs = batch(name)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for layer in model.base_model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    losses = mean_over_ranks(train(model, part(inputs, rank)))
    assert_same_training(model, losses, alone, train(alone, inputs))


def fully_sharded_and_saved(name: str, rank: int, mesh: DeviceMesh, folder: Path) -> None:
    model = build(name)
    recomputes = not name.endswith("ForMaskedLM")
    fully_sharded(name, rank, mesh, model, copy.deepcopy(model), checkpointing=recomputes)
    save(model, name, folder)


def tensor_parallel(case: str, mesh: DeviceMesh, folder: Path) -> None:
    name, fields = TENSOR_PARALLEL[case]
    model = build(name, **fields)
    alone, inputs = copy.deepcopy(model), batch(name)
    plan = tensor_parallel_plan(model)
    parallelize_module(model, mesh, plan)
    split = {key for key, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    assert split == {f"{module}.{kind}" for module in plan for kind in ("weight", "bias")}
    losses = torch.stack(train(model, inputs))
    assert_same_training(model, losses, alone, train(alone, inputs))
    save(model, case, folder)


def save(model: nn.Module, case: str, folder: Path) -> None:
    """A distributed checkpoint, and what the model that wrote it makes of the inputs."""
    name = TENSOR_PARALLEL[case][0] if case in TENSOR_PARALLEL else case
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / case)
    with torch.no_grad():
        loss = objective(model, batch(name))
    if dist.get_rank() == 0:
        torch.save(loss, folder / f"{case}.pt")


def work(rank: int, folder: Path) -> None:
    """Every check; what went wrong is written to a file, by name of the check."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=30),
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    checks: dict[str, Callable[[], None]] = {}
    for name in tiny.CLASSES:
        checks[f"DDP {name}"] = lambda name=name: data_parallel(name, rank, build(name), build(name))
    for name in SHARDED:
        checks[f"FSDP {name}"] = lambda name=name: fully_sharded_and_saved(name, rank, mesh, folder)
    for name in UPSTREAM:
        # Upstream's head for contacts is never given a gradient.
        checks[f"DDP of transformers, {name}"] = lambda name=name: data_parallel(
            name, rank, *upstream(name), unused=name.startswith("Esm")
        )
        checks[f"FSDP of transformers, {name}"] = lambda name=name: fully_sharded(
            name, rank, mesh, *upstream(name), checkpointing=True
        )
    for case in TENSOR_PARALLEL:
        checks[f"TP {case}"] = lambda case=case: tensor_parallel(case, mesh, folder)
    found = {}
    for check, run in checks.items():
        try:
            run()
            found[check] = ""
        except Exception:
            found[check] = traceback.format_exc()
    torch.save(found, folder / f"found{rank}.pt")
    # What still holds the group when the interpreter ends can abort it: replicas are in cycles.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def start(folder: Path, seconds: float) -> list[dict[str, str]]:
    """Run the ranks; what each found."""
    context = mp.spawn(work, args=(folder,), nprocs=RANKS, join=False)
    deadline = time.monotonic() + seconds
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the ranks are not done after {seconds} s")
    return [torch.load(folder / f"found{rank}.pt") for rank in range(RANKS)]
