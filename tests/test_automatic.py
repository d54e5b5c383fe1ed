"""`outplace.load`: the class that a checkpoint needs, by its config and by the head that it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from outplace.weights import CheckpointError

import outplace
from outplace.automatic import model_class


def stored(name: str, folder: Path, **changes: object) -> dict[str, object]:
    """A checkpoint of a class, with fields of its `config.json` replaced, or taken away where None."""
    tiny.model(name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("architectures", ["named", "unknown", "absent"])
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_the_class_is_the_one_named_or_that_of_the_head(name: str, architectures: str) -> None:
    config = tiny.config(name).to_dict()
    named = {"named": [name], "unknown": [f"{tiny.family(name)}ForPreTraining"], "absent": None}
    keys = set(tiny.model(name).state_dict())
    found = model_class(config | {"architectures": named[architectures]}, keys)
    if name == "DebertaV2ForMultipleChoice" and architectures != "named":
        name = "DebertaV2ForSequenceClassification"  # whose parameters with one label are the same
    assert found is getattr(outplace, name)


def test_a_pre_trained_discriminator_is_loaded_without_its_leftover_head() -> None:
    keys = set(tiny.model("DebertaV2ForMaskedLM", legacy=False).state_dict())
    assert model_class({"model_type": "deberta-v2"}, keys) is outplace.DebertaV2ForMaskedLM
    keys |= {"mask_predictions.dense.weight"}
    assert model_class({"model_type": "deberta-v2"}, keys) is outplace.DebertaV2Model


@pytest.mark.parametrize("kind", ["bert", None, 3, ["esm"]])
def test_another_family_is_an_error_that_names_those_known(kind: object) -> None:
    with pytest.raises(CheckpointError, match="known here are deberta, deberta-v2, esm"):
        model_class({"model_type": kind}, set())


def test_load_gives_model_and_tokenizer(tmp_path: Path) -> None:
    stored("EsmForMaskedLM", tmp_path, architectures=None)
    outplace.EsmTokenizer().save_pretrained(tmp_path)
    model, tokenizer = outplace.load(tmp_path, dtype=torch.bfloat16)
    assert type(model) is outplace.EsmForMaskedLM
    assert type(tokenizer) is outplace.EsmTokenizer
    assert model.dtype == torch.bfloat16
    assert model.load_report is not None
    assert model.load_report.matched
    assert model(**tokenizer(["LAGVS"], return_tensors="pt")).logits.shape == (1, 7, 33)


def test_load_takes_what_from_pretrained_takes(tmp_path: Path) -> None:
    stored("EsmModel", tmp_path)
    outplace.EsmTokenizer().save_pretrained(tmp_path)
    model, _ = outplace.load(
        tmp_path, add_pooling_layer=False, attn_implementation="eager", output_attentions=True
    )
    assert model.pooler is None
    assert model.config.attn_implementation == "eager"
    assert model.config.output_attentions
    given, _ = outplace.load(tmp_path, config=model.config)
    assert type(given) is outplace.EsmModel
    with pytest.raises(TypeError, match="no_such_field"):
        outplace.load(tmp_path, no_such_field=1)
