"""The Triton kernels: under the interpreter, and on a CUDA device where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from outplace.models.attention import fused, plan

HERE = Path(__file__).parent
CASES = HERE / "triton_cases.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@needs_triton
def test_the_kernels_under_the_interpreter() -> None:
    run(["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)], **INTERPRETED)


@needs_triton
def test_the_benchmark_measures_and_checks_every_path(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [str(HERE.parent / "benchmarks" / "attention_cuda.py"), "--smoke", "--out", str(out)]
    run(command, **INTERPRETED)
    rows = json.loads(out.read_text())["rows"]
    assert {row["impl"] for row in rows} >= {"eager", "sdpa", "blockwise", "triton", "triton-packed"}
    assert all(row["difference"] < 1e-5 and row["seconds"] > 0 for row in rows)
    written = out.stat().st_mtime_ns
    run(command, **INTERPRETED)  # all is measured
    assert out.stat().st_mtime_ns == written


@pytest.mark.cuda
@needs_triton
def test_the_kernels_on_a_device() -> None:
    run(["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)], TRITON_INTERPRET="0")


# What is compiled, without a device

BUILD = str(HERE / "triton_build.py")


@needs_triton
@pytest.mark.parametrize("architecture", ["80", "90", "120"])
def test_a_kernel_compiles_for_each_generation_of_devices(architecture: str) -> None:
    case = ["--widths", "32", "--dtypes", "float16", "--dropout", "0", "--kernels", "backward_of_queries"]
    run([BUILD, architecture, *case], TRITON_INTERPRET="0")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90", "100", "120"])
def test_all_kernels_compile_for_each_architecture_within_its_shared_memory(architecture: str) -> None:
    run([BUILD, architecture], TRITON_INTERPRET="0")


# The plan, where there is no kernel to run


def test_missing_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fused, "_triton_is_installed", lambda: False)
    assert "triton is not installed" in str(fused.missing(64, torch.float32, cuda))
    monkeypatch.setattr(fused, "_triton_is_installed", lambda: True)
    assert fused.missing(64, torch.float32, cuda) is None
    assert "not on cpu, unless TRITON_INTERPRET=1" in str(fused.missing(64, torch.float32, cpu))
    assert "heads are 256 wide" in str(fused.missing(256, torch.float32, cuda))
    assert "not in torch.float64" in str(fused.missing(64, torch.float64, cuda))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused.missing(64, torch.float32, cpu) is None


def test_old_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_triton_is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, why in (
        ((7, 5), "it needs compute capability 8.0, and the device has 7.5"),
        ((8, 0), None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert fused.missing(64, torch.float16, torch.device("cuda")) == why


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_auto_on_cuda_takes_the_kernels_where_they_can_serve(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"talking_head": False} if family == "Deberta" else {}
    config, cuda = tiny.config(f"{family}Model", **fields), torch.device("cuda")
    monkeypatch.setattr(fused, "_triton_is_installed", lambda: True)
    taken = plan.choose(config, 1, 9, cuda, output_attentions=False)
    assert taken.path == "triton"
    assert taken.reason == "Triton is there, heads are 8 wide, no mask or one [B, L]"
    assert plan.choose(config, 1, 9, cuda, output_attentions=True).path == "eager"
    assert plan.choose(config, 1, 9, cuda, False, torch.float64).path == "eager"
    pairs = plan.choose(config, 1, 9, cuda, False, pairs=True)
    assert pairs == plan.AttentionPlan(
        "eager", "no Triton kernels: its masks are [B, L], and this one is [B, L, L]"
    )
    monkeypatch.setattr(fused, "_triton_is_installed", lambda: False)
    assert "triton is not installed" in plan.choose(config, 1, 9, cuda, False).reason


def test_a_model_that_is_told_to_take_them_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fused, "_triton_is_installed", lambda: True)
    model = tiny.model("DebertaV2Model", attn_implementation="triton")
    with pytest.raises(ValueError, match="'triton' cannot be taken: it runs on CUDA devices, not on cpu"):
        model(tiny.ids())
