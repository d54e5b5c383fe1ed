"""Two processes on the CPU do as one: data parallel, fully sharded, tensor parallel, and their checkpoints.

The processes are started once (`distributed_worker`); each test reads what they found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import distributed_worker as worker
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from outplace.parallel import tensor_parallel_plan

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)
EXAMPLE = Path(__file__).parent.parent / "examples" / "train_ddp.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, str]]:
    return worker.start(folder, seconds=100)


def assert_no_rank_failed(found: list[dict[str, str]], check: str) -> None:
    for rank, results in enumerate(found):
        assert not results[check], f"rank {rank}: {results[check]}"


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_data_parallel_training_is_that_of_one_process(name: str, found: list[dict[str, str]]) -> None:
    """With `find_unused_parameters=False`: every trainable parameter gets a gradient in every step."""
    assert_no_rank_failed(found, f"DDP {name}")


@pytest.mark.parametrize("name", worker.SHARDED)
def test_fully_sharded_training_is_that_of_one_process(name: str, found: list[dict[str, str]]) -> None:
    """Layers are sharded one by one, then the rest; the classifiers recompute their activations."""
    assert_no_rank_failed(found, f"FSDP {name}")


@pytest.mark.parametrize("how", ["DDP", "FSDP"])
@pytest.mark.parametrize("name", worker.UPSTREAM)
def test_upstreams_class_on_our_blocks_trains_as_upstream(
    name: str, how: str, found: list[dict[str, str]]
) -> None:
    """Beside the plain model of transformers in one process."""
    assert_no_rank_failed(found, f"{how} of transformers, {name}")


@pytest.mark.parametrize("case", worker.TENSOR_PARALLEL)
def test_tensor_parallel_training_is_that_of_one_process(case: str, found: list[dict[str, str]]) -> None:
    assert_no_rank_failed(found, f"TP {case}")


@pytest.mark.parametrize("case", [*worker.SHARDED, *worker.TENSOR_PARALLEL])
def test_checkpoint_of_two_ranks_loads_in_one_process(
    case: str, found: list[dict[str, str]], folder: Path
) -> None:
    name, fields = worker.TENSOR_PARALLEL.get(case, (case, {}))
    model = worker.build(name, **fields)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / case, no_dist=True)
    model.load_state_dict(state)
    with torch.no_grad():
        loss = worker.objective(model, worker.batch(name))
    assert not torch.equal(loss, worker.objective(worker.build(name, **fields), worker.batch(name)))
    torch.testing.assert_close(loss, torch.load(folder / f"{case}.pt"))


@pytest.mark.parametrize("name", [name for name in tiny.CLASSES if tiny.family(name) == "Deberta"])
def test_deberta_has_no_tensor_parallel_plan(name: str) -> None:
    with pytest.raises(ValueError, match="q_bias and v_bias"):
        tensor_parallel_plan(tiny.model(name))


def test_plan_names_every_linear_of_the_layers() -> None:
    for name in ("DebertaV2Model", "EsmModel"):
        model = tiny.model(name)
        linears = {
            f"encoder.layer.{key}"
            for key, module in model.encoder.layer.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        assert tensor_parallel_plan(model).keys() == linears


def test_torchrun_recipe_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLE), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "model.safetensors").is_file()
