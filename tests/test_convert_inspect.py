"""`outplace convert` and `outplace inspect`, on folders made by upstream and by `torch.save`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from outplace.weights import CheckpointError
from safetensors.torch import load_file, save_file

import outplace
from outplace.cli import main
from outplace.convert import compare, renamed

HEADED = ["DebertaForMaskedLM", "DebertaV2ForQuestionAnswering", "EsmForMaskedLM"]


def upstream(name: str, folder: Path) -> Any:
    family = tiny.family(name)
    config = getattr(transformers, f"{family}Config")(**tiny.CONFIGS[family])
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    return model


def pickle_of(folder: Path, **renames: str) -> dict[str, torch.Tensor]:
    """Turn a folder's weights into a pickle, with parts of names replaced; returns what it holds."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for old, new in renames.items():
        state = {key.replace(old, new): tensor for key, tensor in state.items()}
    torch.save(state, folder / "pytorch_model.bin")
    return state


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_a_pickled_folder_becomes_one_that_both_libraries_load(name: str, tmp_path: Path) -> None:
    source = tiny.model(name)
    source.save_pretrained(tmp_path / "old")
    torch.save(source.state_dict(), tmp_path / "old/pytorch_model.bin")
    (tmp_path / "old/model.safetensors").unlink()
    assert run("convert", tmp_path / "old", "-o", tmp_path / "new") == 0
    ours = getattr(outplace, name).from_pretrained(tmp_path / "new", strict=True)
    assert all(torch.equal(x, source.state_dict()[key]) for key, x in ours.state_dict().items())
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not theirs[1]["missing_keys"]
    written = set(load_file(tmp_path / "new/model.safetensors"))
    assert written == set(source.state_dict()) - set(source.tied())


def test_older_names_become_todays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upstream("DebertaV2ForMaskedLM", tmp_path / "old")
    state = pickle_of(
        tmp_path / "old", **{"LayerNorm.weight": "LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    )
    assert any(key.endswith("gamma") for key in state)
    assert run("convert", tmp_path / "old", "-o", tmp_path / "new") == 0
    written = load_file(tmp_path / "new/model.safetensors")
    assert len(written) == len(state)
    assert not any(key.endswith(("gamma", "beta")) for key in written)
    out = capsys.readouterr().out
    assert "renamed: deberta.embeddings.LayerNorm.gamma to deberta.embeddings.LayerNorm.weight" in out
    assert "read back and equal" in out


def test_what_no_class_knows_is_kept_and_only_counters_and_copies_are_left_out() -> None:
    model = tiny.model("EsmForMaskedLM")
    state = dict(model.state_dict())
    frequencies = state.pop("esm.rotary_embeddings.inv_freq")
    for layer in range(2):
        state[f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"] = frequencies.clone()
    state["esm.embeddings.position_ids"] = torch.arange(40)[None]
    state["esm.embeddings.position_embeddings.weight"] = torch.ones(4, 32)
    state["something.of.mine"] = torch.ones(3)
    found, notes = renamed(state, model.config.to_dict())
    known = set(model.state_dict()) - set(model.tied())
    assert set(found) == known | {"something.of.mine", "esm.embeddings.position_embeddings.weight"}
    assert torch.equal(found["esm.rotary_embeddings.inv_freq"], frequencies)
    assert len(notes) == 4  # renamed, its copy, the counter, the tied decoder


def test_two_values_for_one_name_are_both_kept() -> None:
    model = tiny.model("EsmForMaskedLM")
    state = dict(model.state_dict())
    state["esm.encoder.layer.0.LayerNorm.gamma"] = state["esm.encoder.layer.0.LayerNorm.weight"] + 1
    state["lm_head.decoder.weight"] = state["lm_head.decoder.weight"] + 1
    found, notes = renamed(state, model.config.to_dict())
    assert set(found) == set(state)
    assert notes == [
        "kept: esm.encoder.layer.0.LayerNorm.gamma, which differs from esm.encoder.layer.0.LayerNorm.weight"
    ]


def test_a_base_models_names_keep_their_prefix_or_the_lack_of_it(tmp_path: Path) -> None:
    model = tiny.model("DebertaV2Model")
    bare = dict(model.state_dict())
    config = model.config.to_dict() | {"architectures": ["DebertaV2Model"]}
    assert set(renamed(bare, config)[0]) == set(bare)
    prefixed = {f"deberta.{key}": tensor for key, tensor in bare.items()}
    assert set(renamed(prefixed, config)[0]) == set(prefixed)


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    tiny.model("EsmForMaskedLM").save_pretrained(tmp_path / "old")
    outplace.EsmTokenizer().save_pretrained(tmp_path / "old")
    assert run("convert", tmp_path / "old", "-o", tmp_path / "new", "--max-shard-size", "20KB") == 0
    assert outplace.EsmTokenizer.from_pretrained(tmp_path / "new").mask_token_id == 32
    assert (tmp_path / "new/model.safetensors.index.json").is_file()
    config = (tmp_path / "old/config.json").read_bytes()
    assert (tmp_path / "new/config.json").read_bytes() == config


def test_a_file_that_reads_back_otherwise_is_an_error(tmp_path: Path) -> None:
    save_file({"one": torch.zeros(2)}, tmp_path / "model.safetensors")
    compare(tmp_path, {"one": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="differently than it was written: one"):
        compare(tmp_path, {"one": torch.ones(2)})


def test_nan_reads_back_as_itself(tmp_path: Path) -> None:
    save_file({"one": torch.tensor([torch.nan])}, tmp_path / "model.safetensors")
    compare(tmp_path, {"one": torch.tensor([torch.nan])})


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("absent", "new", "there is no folder"),
        ("empty", "new", "holds no config.json"),
        ("old", "taken", "is a file; give a folder"),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, target: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").write_text("mine")
    tiny.model("EsmModel").save_pretrained(tmp_path / "old")
    assert run("convert", tmp_path / source, "-o", tmp_path / target) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("name", HEADED)
def test_inspect_names_tensors_and_the_classes_that_they_fill(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream(name, tmp_path)
    assert run("inspect", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    state = load_file(tmp_path / "model.safetensors")
    assert {key: entry["shape"] for key, entry in found["tensors"].items()} == {
        key: list(tensor.shape) for key, tensor in state.items()
    }
    assert found["total"] == {
        "tensors": len(state),
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "bytes": sum(tensor.nbytes for tensor in state.values()),
    }
    assert found["config"]["model_type"] == tiny.config(name).model_type
    family = tiny.family(name)
    assert set(found["classes"]) == {x for x in tiny.CLASSES if tiny.family(x) == family}
    assert found["classes"][name]["missing"] == []
    for other, report in found["classes"].items():
        loaded = getattr(outplace, other).from_pretrained(tmp_path).load_report
        assert report == {"missing": loaded.missing, "unexpected": loaded.unexpected}, other


def test_inspect_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.model("EsmForMaskedLM")
    model.half().save_pretrained(tmp_path)
    assert run("inspect", tmp_path) == 0
    out = capsys.readouterr().out
    assert "F16" in out
    assert "[33, 32]" in out
    assert "EsmForMaskedLM: complete" in out
    assert "EsmForTokenClassification: missing 2: classifier.bias, classifier.weight" in out


def test_inspect_calls_a_tensor_of_another_shape_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.model("EsmForTokenClassification", num_labels=5).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {
        key: value for key, value in config.items() if key not in ("id2label", "label2id", "num_labels")
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("inspect", tmp_path, "--json") == 0
    missing = json.loads(capsys.readouterr().out)["classes"]["EsmForTokenClassification"]["missing"]
    assert missing == [
        "classifier.bias [2], which is [5] there",
        "classifier.weight [2, 32], which is [5, 32] there",
    ]


def test_inspect_reads_pickles_only_where_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upstream("EsmForMaskedLM", tmp_path)
    pickle_of(tmp_path)
    assert run("inspect", tmp_path) == 1
    assert "allow_pickle" in capsys.readouterr().err
    assert run("inspect", tmp_path, "--allow-pickle") == 0
    assert "EsmForMaskedLM: complete" in capsys.readouterr().out
