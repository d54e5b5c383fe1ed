"""Outputs behave as upstream's do."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from outplace.models.outputs import MaskedLMOutput
from torch.utils import _pytree as pytree


def both() -> tuple[MaskedLMOutput, transformers.modeling_outputs.MaskedLMOutput]:
    states = (torch.ones(1), torch.zeros(1))
    fields = {"logits": torch.arange(3), "hidden_states": states}
    return MaskedLMOutput(**fields), transformers.modeling_outputs.MaskedLMOutput(**fields)


def test_they_index_iterate_and_unpack_as_upstreams() -> None:
    ours, theirs = both()
    assert list(ours) == list(theirs) == list(ours.keys()) == ["logits", "hidden_states"]
    assert len(ours) == len(theirs) == 2
    assert ours[0] is ours["logits"] is ours.logits
    assert ours[1] is ours.hidden_states
    assert ours[:2] == ours.to_tuple() == tuple(ours.values())
    assert dict(**ours) == dict(ours.items())
    assert ours.loss is None
    assert "loss" not in ours
    assert "logits" in ours
    assert ours.get("loss", 7) == theirs.get("loss", 7) == 7
    first, second = ours
    assert (first, second) == tuple(theirs)


@pytest.mark.parametrize("key", ["loss", "nothing", 2])
def test_what_is_not_there_is_an_error_as_upstreams(key: str | int) -> None:
    for output in both():
        with pytest.raises((KeyError, IndexError)):
            output[key]


def test_they_are_made_of_dictionaries_and_take_items_as_upstreams() -> None:
    for output in both():
        again = type(output)(dict(output.items()))
        assert list(again) == ["logits", "hidden_states"]
        again["loss"] = torch.tensor(1.0)
        again["input_ids"] = torch.tensor(2)
        assert again.loss.item() == again["loss"].item() == 1
        assert again["input_ids"].item() == again[-1].item() == 2


def test_they_pass_through_pytree() -> None:
    output, _ = both()
    leaves, spec = pytree.tree_flatten(output)
    assert len(leaves) == 3
    back = pytree.tree_unflatten([leaf + 1 for leaf in leaves], spec)
    assert isinstance(back, MaskedLMOutput)
    assert back.logits.tolist() == [1, 2, 3]
    assert back.loss is None
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_hidden_states_and_attentions_are_returned_where_asked_for(name: str) -> None:
    model, inputs = tiny.model(name), tiny.inputs(name)
    assert model(**inputs).get("hidden_states") is None
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    layers = model.config.num_hidden_layers
    assert len(output.hidden_states) == layers + 1
    assert len(output.attentions) == layers
    length = inputs["input_ids"].shape[-1]
    assert output.attentions[0].shape[1:] == (4, length, length)
    if "last_hidden_state" in output:
        assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    by_config = tiny.model(name, output_attentions=True, output_hidden_states=True, return_dict=False)(
        **inputs
    )
    assert isinstance(by_config, tuple)
    assert len(by_config) == len(output)
