"""What people do to a model besides running it: copy, pickle, resize, swap, freeze."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import outplace

MASKED = [
    ("DebertaForMaskedLM", {}),
    ("DebertaForMaskedLM", {"legacy": False}),
    ("DebertaForMaskedLM", {"tie_word_embeddings": False}),
    ("DebertaV2ForMaskedLM", {}),
    ("DebertaV2ForMaskedLM", {"legacy": False}),
    ("DebertaV2ForMaskedLM", {"tie_word_embeddings": False}),
    ("EsmForMaskedLM", {}),
    ("EsmForMaskedLM", {"tie_word_embeddings": False}),
]
OTHERS = [(name, {}) for name in tiny.CLASSES if "MaskedLM" not in name]


def equal(a: Any, b: Any, name: str) -> bool:
    with torch.no_grad():
        return torch.equal(a(**tiny.inputs(name))[0], b(**tiny.inputs(name))[0])


def is_tied(model: Any) -> list[bool]:
    return [model.get_parameter(name) is model.get_parameter(owner) for name, owner in model.ties().items()]


@pytest.mark.parametrize(("name", "fields"), [*MASKED, *OTHERS], ids=str)
def test_copies_are_equal_separate_and_tied_in_themselves(name: str, fields: dict[str, Any]) -> None:
    model = tiny.model(name, **fields)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(model, other, name)
        assert is_tied(other) == is_tied(model)
        theirs = {id(p) for p in other.parameters()}
        assert not theirs & {id(p) for p in model.parameters()}
        assert len(theirs) == len(list(model.parameters()))


@pytest.mark.parametrize(("name", "fields"), [*MASKED, *OTHERS], ids=str)
def test_a_model_on_meta_is_filled_by_its_state_dict(name: str, fields: dict[str, Any]) -> None:
    model = tiny.model(name, **fields)
    with torch.device("meta"):
        assigned = type(model)(model.config).eval()
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with torch.device("meta"):
        emptied = type(model)(model.config).eval()
    emptied = emptied.to_empty(device="cpu")
    assert is_tied(emptied) == is_tied(model)
    emptied.load_state_dict(model.state_dict())
    assert equal(model, assigned, name)
    assert equal(model, emptied, name)


@pytest.mark.parametrize("size", [70, 40])
@pytest.mark.parametrize(("name", "fields"), [*MASKED, *OTHERS], ids=str)
def test_another_size_of_the_vocabulary_keeps_what_was_there(
    name: str, fields: dict[str, Any], size: int, tmp_path: Path
) -> None:
    model = tiny.model(name, **fields)
    size = min(size, 31) if name.startswith("Esm") and size == 40 else size
    before, config = copy.deepcopy(model), model.config
    embeddings = model.resize_token_embeddings(size)
    assert embeddings is model.get_input_embeddings()
    assert embeddings.num_embeddings == len(embeddings.weight) == model.config.vocab_size == size
    assert config.vocab_size == before.config.vocab_size != size
    assert is_tied(model) == is_tied(before)
    inputs = {key: x for key, x in tiny.inputs(name).items() if key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        old, new = before(**inputs)[0], model(**inputs)[0]
    if "MaskedLM" in name:
        assert new.shape[-1] == size
        kept = min(size, old.shape[-1])
        old, new = old[..., :kept], new[..., :kept]
    assert torch.allclose(old, new, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert equal(model, type(model).from_pretrained(tmp_path, strict=True), name)
    model(**tiny.inputs(name))[0].sum().backward()
    assert embeddings.weight.grad is not None


def test_new_rows_are_initialised_and_rounded_up() -> None:
    model = tiny.model("EsmForMaskedLM")
    table = model.resize_token_embeddings(pad_to_multiple_of=64)
    assert table.num_embeddings == 64
    assert 0.01 < table.weight[33:].std() < 0.03
    assert not model.lm_head.bias[33:].any()


def test_a_vocabulary_without_its_padding_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for the padding token, number 1"):
        tiny.model("EsmModel").resize_token_embeddings(1)


@pytest.mark.parametrize(("name", "fields"), MASKED, ids=str)
def test_new_input_embeddings_are_used_and_tied(name: str, fields: dict[str, Any]) -> None:
    model = tiny.model(name, **fields)
    table = nn.Embedding(model.config.vocab_size, 32, padding_idx=0)
    tied = is_tied(model)
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table
    assert is_tied(model) == tied
    assert torch.isfinite(model(tiny.ids()).logits).all()


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_freezing_by_name_moves_only_the_rest(name: str) -> None:
    model = tiny.model(name).train()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not ("embeddings" in key or "layer.0." in key or "contact_head" in key))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    output = model(**tiny.inputs(name))
    (output[0] if output[0].ndim == 0 else output[0].sin().sum()).backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, before[key]), key
        elif "layer.1.output.dense" in key:
            assert not torch.equal(parameter, before[key]), key


@pytest.mark.parametrize("name", [name for name in tiny.CLASSES if not name.endswith("Model")])
def test_every_trainable_parameter_of_a_head_gets_a_gradient(name: str) -> None:
    """What DistributedDataParallel asks for, unless it is told to search for unused parameters."""
    for fields in ({}, {"legacy": False} if "Deberta" in name and "MaskedLM" in name else {}):
        model = tiny.model(name, **fields)
        inputs = tiny.inputs(name)
        if "Deberta" in name and model.config.type_vocab_size:
            inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
        model(**inputs).loss.backward()
        assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_the_contact_heads_parameters_are_frozen_and_saved(tmp_path: Path) -> None:
    model = tiny.model("EsmForMaskedLM")
    assert not any(p.requires_grad for p in model.esm.contact_head.parameters())
    assert "esm.contact_head.regression.weight" in model.state_dict()
    model.save_pretrained(tmp_path)
    again = outplace.EsmForMaskedLM.from_pretrained(tmp_path, strict=True)
    assert not any(p.requires_grad for p in again.esm.contact_head.parameters())
