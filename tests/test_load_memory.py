"""Loading holds the model in memory once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

import outplace

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "load_memory.py"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of 160 MB, most of it words, as one file and as shards."""
    folder = tmp_path_factory.mktemp("large")
    config = tiny.config("DebertaV2ForMaskedLM", vocab_size=80_000, hidden_size=500, conv_kernel_size=0)
    model = outplace.DebertaV2ForMaskedLM(config)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "many", max_shard_size="60MB")
    for name, zipped in (("pickle", True), ("old pickle", False)):
        (folder / name).mkdir()
        model.config.save_pretrained(folder / name)
        pickle = folder / name / "pytorch_model.bin"
        torch.save(model.state_dict(), pickle, _use_new_zipfile_serialization=zipped)
    names = {"one file": "one", "shards": "many", "pickle": "pickle", "old pickle": "old pickle"}
    return {files: folder / name for files, name in names.items()}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads anonymous memory from /proc")
@pytest.mark.parametrize(
    ("files", "dtype"),
    [
        ("one file", "float32"),
        ("one file", "bfloat16"),
        ("shards", "float32"),
        ("shards", "bfloat16"),
        ("pickle", "float32"),  # read, converted and loaded, all in one
        ("pickle", "bfloat16"),
        ("old pickle", "float32"),
    ],
)
def test_peak_memory_that_cannot_be_reclaimed_is_the_models(
    checkpoints: dict[str, Path], tmp_path: Path, files: str, dtype: str
) -> None:
    command = [sys.executable, SCRIPT, "--measure", checkpoints[files], "outplace", dtype]
    environment = os.environ | {"HF_HOME": str(tmp_path)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    row = json.loads(output.splitlines()[-1])
    assert row["model"] > (60e6 if dtype == "bfloat16" else 150e6)
    assert row["peak"] <= 1.15 * row["model"]
