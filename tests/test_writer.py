"""Safetensors files written tensor by tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outplace.weights.writer import TensorFile, new_file
from safetensors import safe_open
from safetensors.torch import load_file


def test_a_new_file_has_ordinary_permissions_and_keeps_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    with new_file(link) as file:
        file.write(b"x")
        assert not target.exists()
    (tmp_path / "ordinary").write_bytes(b"")
    assert link.is_symlink()
    assert target.read_bytes() == b"x"
    assert target.stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_failing_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), new_file(path):
        raise KeyError
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_written_in_any_order_are_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "é \"'": torch.randn(3, 5, dtype=dtype),
        "b\n": torch.randn(1, dtype=dtype),
        "c": torch.randn(2, 2, dtype=torch.float64),
        "none": torch.zeros(0, 4, dtype=dtype),
        "turned": torch.randn(2, 3, dtype=dtype).t(),
    }
    with new_file(tmp_path / "x") as file:
        entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        writer = TensorFile(file, entries, {"model": "\udcff"})
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    found = load_file(tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as reader:
        assert reader.metadata() == {"model": "?"}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_more_names_than_the_format_allows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outplace.weights.writer.MAX_HEADER_BYTES", 1000)
    entries = {f"protein {number}": (torch.float32, (8,)) for number in range(100)}
    with pytest.raises(ValueError, match=r"100 names .* split"), new_file(tmp_path / "x") as file:
        TensorFile(file, entries, {})


def test_nothing_needs_numpy(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["numpy"] = None
import outplace
from outplace.cli import main
from outplace.weights import nano
outplace.EsmForMaskedLM.from_pretrained(nano.path()).save_pretrained("saved", max_shard_size="500KB")
outplace.EsmTokenizer().save_pretrained("saved")
open("in.fasta", "w").write(">a\\nMKT\\n")
sys.exit(main(["embed", "in.fasta", "-o", "out", "--model", "saved"]) or main(["fill", "MK<mask>"]))
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    assert load_file(tmp_path / "out")["a"].shape == (80,)
