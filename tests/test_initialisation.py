"""A new model's parameters are distributed as upstream documents."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers

import outplace

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "initializer_range": 0.05}


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_moments_equal_upstreams(name: str) -> None:
    fields = tiny.CONFIGS[tiny.family(name)] | WIDE
    torch.manual_seed(0)
    theirs = getattr(transformers, name)(getattr(transformers, f"{tiny.family(name)}Config")(**fields))
    ours = getattr(outplace, name)(tiny.config(name, **WIDE))
    expected = dict(theirs.named_parameters(remove_duplicate=False))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, parameter in ours.named_parameters(remove_duplicate=False):
        other = expected[key]
        if other.numel() == 1 or other.std() == 0:
            assert torch.equal(parameter, other), key
        else:
            # The spread of a standard deviation estimated from n draws is about 1 / sqrt(2 n).
            tolerance = 5 / (2 * other.numel()) ** 0.5
            assert parameter.std().item() == pytest.approx(0.05, rel=tolerance), key
            assert abs(parameter.mean().item()) < 5 * 0.05 / other.numel() ** 0.5, key


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_padding_rows_are_zero_and_seeds_are_kept(name: str) -> None:
    model, again = tiny.model(name), tiny.model(name)
    table = model.get_input_embeddings()
    assert not table.weight[table.padding_idx].any()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
