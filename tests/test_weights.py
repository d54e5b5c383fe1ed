"""The way of a weight: from a checkpoint's file to a parameter, and back."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from outplace.weights.renames import DEBERTA_V2, ESM, find_target, is_dropped
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import outplace

IDS = tiny.ids()


def upstream(name: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{tiny.family(name)}Config")(**tiny.CONFIGS[tiny.family(name)] | fields)
    return getattr(transformers, name)(config).eval()


def ours(name: str) -> Any:
    return getattr(outplace, name)


def inputs(name: str) -> dict[str, Tensor]:
    ids = torch.stack((IDS, IDS.roll(1, 0)), dim=1) if name.endswith("ForMultipleChoice") else IDS
    return {"input_ids": ids}


def apart(a: Any, b: Any, name: str) -> float:
    with torch.no_grad():
        return (a(**inputs(name))[0] - b(**inputs(name))[0]).abs().max().item()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A DeBERTa-V2 masked-language checkpoint written by upstream."""
    upstream("DebertaV2ForMaskedLM").save_pretrained(tmp_path)
    return tmp_path


# There and back


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_each_side_loads_what_the_other_saves(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    theirs = upstream(name, **fields)
    theirs.save_pretrained(tmp_path / "theirs")
    model = ours(name).from_pretrained(tmp_path / "theirs", strict=True)
    assert not model.training
    assert apart(model, theirs, name) <= 1e-6
    model.save_pretrained(tmp_path / "ours")
    back, report = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert apart(model, back.eval(), name) <= 1e-6
    again = ours(name).from_pretrained(tmp_path / "ours", strict=True)
    assert apart(model, again, name) == 0


def test_saved_keys_are_upstreams_and_tied_weights_are_stored_once(folder: Path, tmp_path: Path) -> None:
    model = outplace.DebertaV2ForMaskedLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved/model.safetensors")) == set(
        load_file(folder / "model.safetensors")
    )
    decoder = model.cls.predictions.decoder
    assert decoder.weight is model.deberta.embeddings.word_embeddings.weight
    assert decoder.bias is model.cls.predictions.bias


def test_shards_are_split_by_size_indexed_and_read_by_both(folder: Path, tmp_path: Path) -> None:
    model = outplace.DebertaV2ForMaskedLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    shards = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 25_000 for shard in shards)
    again = outplace.DebertaV2ForMaskedLM.from_pretrained(tmp_path / "saved", strict=True)
    theirs = transformers.DebertaV2ForMaskedLM.from_pretrained(tmp_path / "saved").eval()
    assert apart(model, again, "DebertaV2ForMaskedLM") == apart(model, theirs, "DebertaV2ForMaskedLM") == 0


def test_saving_again_leaves_no_file_of_the_old_checkpoint(folder: Path) -> None:
    model = outplace.DebertaV2ForMaskedLM.from_pretrained(folder)
    (folder / "notes.txt").write_text("kept")
    model.save_pretrained(folder, max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists()
    model.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    # The model itself was mapped from the file that is gone.
    assert apart(model, outplace.DebertaV2ForMaskedLM.from_pretrained(folder), "DebertaV2ForMaskedLM") == 0


def test_a_save_that_fails_leaves_the_old_checkpoint_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = outplace.DebertaV2ForMaskedLM.from_pretrained(folder)

    def full(self: Any, name: str, tensor: Tensor) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("outplace.weights.writer.TensorFile.write", full)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_base_models_checkpoint_fills_a_head_model_and_the_reverse(tmp_path: Path) -> None:
    base = tiny.model("DebertaV2Model")
    base.save_pretrained(tmp_path / "base")
    with_head = outplace.DebertaV2ForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5)
    assert with_head.load_report.missing == [
        "classifier.bias",
        "classifier.weight",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ]
    assert with_head.classifier.out_features == 5
    assert with_head.classifier.weight.std() > 0
    assert apart(with_head.deberta, base, "DebertaV2Model") == 0
    with_head.save_pretrained(tmp_path / "head")
    back = outplace.DebertaV2Model.from_pretrained(tmp_path / "head")
    assert back.load_report.unexpected == with_head.load_report.missing
    assert apart(back, base, "DebertaV2Model") == 0


# Options


def test_config_overrides_and_labels(folder: Path) -> None:
    cls = outplace.DebertaV2ForSequenceClassification
    model = cls.from_pretrained(folder, id2label={0: "no", 1: "yes", 2: "maybe"}, hidden_dropout_prob=0.0)
    assert model.config.num_labels == 3
    assert model.config.label2id["maybe"] == 2
    assert model.config.hidden_dropout_prob == 0
    assert cls.from_pretrained(folder, num_labels=4).config.id2label[3] == "LABEL_3"
    config = outplace.DebertaV2Config.from_pretrained(folder, num_labels=6)
    assert cls.from_pretrained(folder, config=config).config.num_labels == 6
    assert cls.from_pretrained(folder, config=config, num_labels=7).config.num_labels == 7
    assert config.num_labels == 6


def test_a_misspelt_override_is_an_error(folder: Path) -> None:
    with pytest.raises(TypeError, match="num_label"):
        outplace.DebertaV2ForSequenceClassification.from_pretrained(folder, num_label=4)


def test_constructor_keywords_pass_through(tmp_path: Path) -> None:
    tiny.model("EsmModel").save_pretrained(tmp_path)
    model = outplace.EsmModel.from_pretrained(tmp_path, add_pooling_layer=False, attn_implementation="eager")
    assert model.pooler is None
    assert model.config.attn_implementation == "eager"


@pytest.mark.parametrize("asked", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_the_dtype_asked_for_is_every_parameters(asked: Any, tmp_path: Path) -> None:
    for name in tiny.CLASSES:
        tiny.model(name).save_pretrained(tmp_path / name)
        model = ours(name).from_pretrained(tmp_path / name, dtype=asked)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        output = model(**inputs(name))[0]
        assert output.dtype == torch.bfloat16
        assert torch.isfinite(output).all()


def test_the_dtype_is_the_checkpoints_unless_asked(tmp_path: Path) -> None:
    tiny.model("EsmForMaskedLM").half().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    assert outplace.EsmForMaskedLM.from_pretrained(tmp_path).dtype == torch.float16
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert outplace.EsmForMaskedLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float16


@pytest.mark.parametrize("dtype", ["float33", torch.int32, "int8"])
def test_a_dtype_that_is_none_is_an_error(folder: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="is no floating dtype"):
        outplace.DebertaV2Model.from_pretrained(folder, dtype=dtype)


# Old names


def test_every_row_of_the_tables_leads_to_a_parameter_or_is_dropped() -> None:
    v2 = outplace.DebertaV2ForMaskedLM(tiny.config("DebertaV2ForMaskedLM")).state_dict()
    original = outplace.DebertaV2ForMaskedLM(tiny.config("DebertaV2ForMaskedLM", legacy=False)).state_dict()
    esm = outplace.EsmForMaskedLM(tiny.config("EsmForMaskedLM")).state_dict()
    head = "cls.predictions"
    expected = [
        (v2, DEBERTA_V2, "deberta.embeddings.LayerNorm.gamma", "deberta.embeddings.LayerNorm.weight"),
        (v2, DEBERTA_V2, "deberta.embeddings.LayerNorm.beta", "deberta.embeddings.LayerNorm.bias"),
        (v2, DEBERTA_V2, "embeddings.LayerNorm.beta", "deberta.embeddings.LayerNorm.bias"),
        (v2, DEBERTA_V2, "lm_predictions.lm_head.dense.weight", f"{head}.transform.dense.weight"),
        (v2, DEBERTA_V2, "lm_predictions.lm_head.LayerNorm.bias", f"{head}.transform.LayerNorm.bias"),
        (v2, DEBERTA_V2, "lm_predictions.lm_head.bias", f"{head}.bias"),
        (original, DEBERTA_V2, f"{head}.transform.dense.bias", "lm_predictions.lm_head.dense.bias"),
        (original, DEBERTA_V2, f"{head}.bias", "lm_predictions.lm_head.bias"),
        (esm, ESM, "esm.encoder.emb_layer_norm_after.gamma", "esm.encoder.emb_layer_norm_after.weight"),
        (
            esm,
            ESM,
            "esm.encoder.layer.1.attention.self.rotary_embeddings.inv_freq",
            "esm.rotary_embeddings.inv_freq",
        ),
        (
            esm,
            ESM,
            "encoder.layer.*.attention.self.rotary_embeddings.inv_freq",
            "esm.rotary_embeddings.inv_freq",
        ),
    ]
    for names, table, key, name in expected:
        prefix = "esm." if names is esm else "deberta."
        assert find_target(key, names, prefix, table) == name, key
    for table, key in (
        (DEBERTA_V2, "deberta.embeddings.position_ids"),
        (DEBERTA_V2, "mask_predictions.dense.weight"),
        (ESM, "esm.embeddings.position_ids"),
        (ESM, "esm.embeddings.position_embeddings.weight"),
    ):
        names = esm if table is ESM else {}
        assert find_target(key, names, "esm.", table) is None
        assert is_dropped(key, table), key
    used = {row for table in (DEBERTA_V2, ESM) for row in table}
    keys = [key for _, _, key, _ in expected] + [
        "position_ids",
        "mask_predictions.",
        "embeddings.position_embeddings.weight",
    ]
    assert all(any(re.search(row.pattern, key) for key in keys) for row in used)


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def test_an_old_checkpoint_loads_whole(folder: Path) -> None:
    expected = outplace.DebertaV2ForMaskedLM.from_pretrained(folder)

    def age(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, before in old.items():
            tensors = {key.replace(new, before): tensor for key, tensor in tensors.items()}
        return tensors | {
            "deberta.embeddings.position_ids": torch.arange(4),
            "mask_predictions.dense.weight": torch.ones(2, 2),
        }

    rewrite(folder, age)
    model = outplace.DebertaV2ForMaskedLM.from_pretrained(folder, strict=True)
    assert model.load_report.ignored == ["deberta.embeddings.position_ids", "mask_predictions.dense.weight"]
    assert apart(model, expected, "DebertaV2ForMaskedLM") == 0


@pytest.mark.parametrize("layer", ["0", "1", "*"])
def test_the_stored_rotary_frequencies_are_used_and_stay_in_float32(layer: str, tmp_path: Path) -> None:
    tiny.model("EsmForMaskedLM").save_pretrained(tmp_path)
    stored = torch.tensor([0.9, 0.5, 0.25, 0.125])

    def age(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["esm.rotary_embeddings.inv_freq"]
        return tensors | {f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq": stored}

    rewrite(tmp_path, age)
    model = outplace.EsmForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16, strict=True)
    for cast in (model, model.half(), model.float(), model.bfloat16()):
        assert cast.esm.rotary_embeddings.inv_freq.dtype == torch.float32
        assert torch.equal(cast.esm.rotary_embeddings.inv_freq, stored)
    assert model.double().esm.rotary_embeddings.inv_freq.dtype == torch.float64


def test_a_rotary_model_without_stored_frequencies_gets_the_formulas(tmp_path: Path) -> None:
    expected = tiny.model("EsmModel")
    expected.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {key: x for key, x in tensors.items() if "inv_freq" not in key})
    model = outplace.EsmModel.from_pretrained(tmp_path)
    assert model.load_report.missing == ["rotary_embeddings.inv_freq"]
    assert apart(model, expected, "EsmModel") == 0


# Reports and errors


def test_the_report_says_what_was_missing_and_unexpected_and_strict_makes_it_an_error(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["deberta.encoder.LayerNorm.weight"]
        return tensors | {"stranger": torch.ones(2)}

    rewrite(folder, change)
    model = outplace.DebertaV2ForMaskedLM.from_pretrained(folder)
    assert model.load_report.missing == ["deberta.encoder.LayerNorm.weight"]
    assert model.load_report.unexpected == ["stranger"]
    assert "stranger" in str(model.load_report)
    assert torch.equal(model.deberta.encoder.LayerNorm.weight, torch.ones(32))
    with pytest.raises(outplace.CheckpointError, match=r"deberta\.encoder\.LayerNorm\.weight.*stranger"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(folder, strict=True)


def test_a_wrong_shape_is_an_error_with_the_key_and_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.bias": torch.ones(7)})
    with pytest.raises(outplace.CheckpointError, match=r"cls\.predictions\.bias has shape \(7,\).*\(61,\)"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(folder)


def test_an_integer_tensor_for_a_parameter_is_an_error(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.bias": torch.ones(61, dtype=torch.int8)})
    with pytest.raises(outplace.CheckpointError, match=r"cls\.predictions\.bias.*I8"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(folder)


def test_tied_weights_that_differ_stay_apart(folder: Path, tmp_path: Path) -> None:
    other = torch.full((61, 32), 0.5)
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.decoder.weight": other})
    model = outplace.DebertaV2ForMaskedLM.from_pretrained(folder)
    assert model.load_report.untied == ["cls.predictions.decoder.weight"]
    assert torch.equal(model.cls.predictions.decoder.weight, other)
    model.save_pretrained(tmp_path / "saved")
    again = outplace.DebertaV2ForMaskedLM.from_pretrained(tmp_path / "saved")
    assert apart(model, again, "DebertaV2ForMaskedLM") == 0


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def foreign(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(1000))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def huge_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:])


@pytest.mark.parametrize("damage", [truncated, foreign, empty, huge_header])
def test_a_damaged_file_is_an_error_naming_it(folder: Path, damage: Any) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(outplace.CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(folder)


@pytest.fixture
def sharded(folder: Path) -> Path:
    outplace.DebertaV2ForMaskedLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    return folder


def reindex(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_naming_a_missing_shard_is_an_error_naming_both(sharded: Path) -> None:
    reindex(sharded, lambda weight_map: weight_map.update({"cls.predictions.bias": "model-9.safetensors"}))
    with pytest.raises(outplace.CheckpointError, match=r"index\.json names model-9\.safetensors"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(sharded)


def test_an_index_naming_a_tensor_that_its_shard_lacks_is_an_error(sharded: Path) -> None:
    reindex(sharded, lambda weight_map: weight_map.update({"stranger": weight_map["cls.predictions.bias"]}))
    with pytest.raises(outplace.CheckpointError, match="lacks the tensor 'stranger'"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(sharded)


@pytest.mark.parametrize(
    "path", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b"]
)
def test_a_shard_path_that_leaves_the_folder_is_an_error(sharded: Path, path: str) -> None:
    reindex(sharded, lambda weight_map: weight_map.update({"cls.predictions.bias": path}))
    with pytest.raises(outplace.CheckpointError, match="is no file beside it"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(sharded)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {"a": 1}}', "{"])
def test_a_malformed_index_is_an_error_naming_it(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(outplace.CheckpointError, match=r"model\.safetensors\.index\.json"):
        outplace.DebertaV2ForMaskedLM.from_pretrained(sharded)


def test_a_folder_without_weights_or_config_says_what_it_lacks(folder: Path) -> None:
    cls = outplace.DebertaV2ForMaskedLM
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors, only a pickled pytorch_model\.bin"):
        cls.from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no weights: no model\.safetensors"):
        cls.from_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="is a file"):
        cls.from_pretrained(folder / "config.json")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        cls.from_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        cls.from_pretrained(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match="neither a folder here nor the name of a Hub repository"):
        cls.from_pretrained("a/b/c")


def test_the_metadata_tells_the_format(folder: Path, tmp_path: Path) -> None:
    outplace.DebertaV2ForMaskedLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
