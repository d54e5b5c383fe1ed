"""Checkpoints that hold only pickles: read restricted to tensors, and only where that is allowed."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outplace.weights import CheckpointError
from outplace.weights.pickled import read_pickles
from torch import Tensor

import outplace

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def pickled(folder: Path, *, shards: int = 1, zipped: bool = True) -> outplace.EsmForMaskedLM:
    """A folder as `torch.save` leaves it; returns the model whose weights it holds."""
    model = tiny.model("EsmForMaskedLM")
    folder.mkdir()
    model.config.save_pretrained(folder)
    state = model.state_dict()
    names = list(state)
    files = {}
    for i in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        part = OrderedDict((key, state[key]) for key in names[i::shards])
        torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
        files |= dict.fromkeys(part, name)
    if shards > 1:
        index = f'{{"weight_map": {str(files).replace(chr(39), chr(34))}}}'
        (folder / "pytorch_model.bin.index.json").write_text(index)
    return model


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_load_where_they_are_allowed(
    tmp_path: Path, own_cache: Path, shards: int, zipped: bool
) -> None:
    expected = pickled(tmp_path / "model", shards=shards, zipped=zipped)
    loaded = outplace.EsmForMaskedLM.from_pretrained(tmp_path / "model", allow_pickle=True)
    assert_same(loaded, expected)
    assert loaded.load_report is not None
    assert loaded.load_report.matched


def test_pickles_are_converted_once_and_again_when_they_change(tmp_path: Path, own_cache: Path) -> None:
    folder = tmp_path / "model"
    pickled(folder)
    load = outplace.EsmForMaskedLM.from_pretrained
    load(folder, allow_pickle=True)
    (first,) = own_cache.rglob("*.safetensors")
    written = first.stat().st_mtime_ns
    load(folder, allow_pickle=True)
    assert first.stat().st_mtime_ns == written

    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    torch.save(changed, folder / "pytorch_model.bin")
    os.utime(folder / "pytorch_model.bin", ns=(1, 1))
    again = load(folder, allow_pickle=True)
    assert torch.equal(again.lm_head.bias, changed["lm_head.bias"])
    assert len(list(own_cache.rglob("*.safetensors"))) == 1  # the stale one is gone


def test_pickles_are_refused_unless_allowed_with_both_ways_out_in_one_line(tmp_path: Path) -> None:
    pickled(tmp_path / "model")
    with pytest.raises(FileNotFoundError) as caught:
        outplace.EsmForMaskedLM.from_pretrained(tmp_path / "model")
    message = str(caught.value)
    assert "\n" not in message
    assert "allow_pickle=True" in message
    assert f"outplace convert {tmp_path / 'model'} -o" in message


def test_safetensors_are_taken_before_pickles(tmp_path: Path) -> None:
    pickled(tmp_path / "model")
    (tmp_path / "model/pytorch_model.bin").write_bytes(b"never read")
    expected = tiny.model("EsmForMaskedLM")
    expected.save_pretrained(tmp_path / "model")
    assert_same(outplace.EsmForMaskedLM.from_pretrained(tmp_path / "model", allow_pickle=True), expected)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("lifted", [False, True], ids=["", "restriction lifted in the environment"])
def test_a_malicious_pickle_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool, lifted: bool
) -> None:
    if lifted:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    folder, target = tmp_path / "model", tmp_path / "was here"
    pickled(folder)
    weights = {"weight": torch.zeros(2), "payload": Malicious(target)}
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds more than tensors.*mkdir"):
        outplace.EsmForMaskedLM.from_pretrained(folder, allow_pickle=True)
    assert not target.exists()
    # The file is as bad as it is meant to be: an unrestricted reader would have run it.
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert target.exists()


def test_a_bare_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(pickle.dumps(Malicious(tmp_path / "was here")))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        read_pickles(([path], None))
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "holds a list, not tensors by name"),
        ({"model": {"weight": torch.zeros(2)}}, "holds a dict under 'model', not a tensor"),
        ({"weight": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({"weight": torch.zeros(2, 2).to_sparse()}, "sparse"),
    ],
)
def test_what_is_no_table_of_tensors_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        read_pickles(([path], None))


def test_a_shard_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model-00001-of-00001.bin"
    torch.save({"one": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="lacks the tensor 'two'"):
        read_pickles(([path], {"one": path.name, "two": path.name}))


def _bytes_of(zipped: bool, tmp: Path) -> bytes:
    torch.save({"weight": torch.arange(6.0)}, tmp, _use_new_zipfile_serialization=zipped)
    return tmp.read_bytes()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_pickle_is_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, zipped: bool, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "pytorch_model.bin"
    whole = _bytes_of(zipped, path)
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    path.write_bytes(damaged)
    try:
        tensors = read_pickles(([path], None))
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:  # a flip in the numbers, or in padding, goes unseen
        assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
