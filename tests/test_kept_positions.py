"""Projected position tables kept between passes of inference: never those of other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import outplace

FAMILIES = ["Deberta", "DebertaV2"]


def kept_and_not(family: str) -> tuple[Any, Any]:
    """Two models of the same weights; one keeps its tables."""
    models = tuple(tiny.model(f"{family}Model", initializer_range=0.5) for _ in range(2))
    for model, keep in zip(models, (True, False), strict=True):
        model.keep_positions(keep)
    return models


def calls_of(model: Any) -> list[int]:
    """How many rows the first layer's position queries are projected of, call by call."""
    rows: list[int] = []
    attention = model.encoder.layer[0].attention.self
    projection = attention.pos_q_proj if hasattr(attention, "pos_q_proj") else attention.pos_query_proj
    projection.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[-2]))
    return rows


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_projected_once_for_all_lengths(family: str) -> None:
    model, plain = kept_and_not(family)
    rows = calls_of(model)
    for length in (12, 5, 20):
        found, expected = (x(tiny.ids(2, length)).last_hidden_state for x in (model, plain))
        assert torch.allclose(found, expected, atol=1e-6)
    table = model.encoder.rel_embeddings.num_embeddings
    assert sorted(rows) == [1, 1, 1, table]
    assert model.kept_position_bytes == 2 * 2 * table * 32 * 4
    model.keep_positions(False)
    assert model.kept_position_bytes == 0


def write_through_data(model: Any) -> None:
    for parameter in model.encoder.layer[0].attention.self.parameters():
        parameter.data.mul_(1.5)


def write_to_table(model: Any) -> None:
    table = model.encoder.rel_embeddings.weight
    table.data.copy_(table.flip(0))


def replace(model: Any) -> None:
    for module in model.encoder.layer[1].attention.self.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.flip(0))


def load(model: Any) -> None:
    model.load_state_dict({name: x + 0.1 for name, x in model.state_dict().items()})


def cast(model: Any) -> None:
    model.double()


@torch.no_grad()
@pytest.mark.parametrize("change", [write_through_data, write_to_table, replace, load, cast])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_give_other_tables(family: str, change: Callable[[Any], None]) -> None:
    model, plain = kept_and_not(family)
    before = model(tiny.ids()).last_hidden_state
    change(model)
    change(plain)
    found, expected = (x(tiny.ids()).last_hidden_state for x in (model, plain))
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.dtype != before.dtype or not torch.allclose(found, before, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_neither_keeps_nor_reads_them(family: str) -> None:
    model, plain = kept_and_not(family)
    with torch.no_grad():
        model(tiny.ids())

    def gradient(x: Any) -> Tensor:
        x(tiny.ids()).last_hidden_state.pow(2).sum().backward()
        return x.encoder.rel_embeddings.weight.grad

    assert torch.allclose(gradient(model), gradient(plain), rtol=1e-4, atol=1e-4)
    assert model.kept_position_bytes == 0


def test_large_models_do_not_keep_them_unless_told() -> None:
    small = {"num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8, "relative_attention": True}
    small |= {"pos_att_type": ["c2p", "p2c"], "position_buckets": 256, "max_relative_positions": 512}
    with torch.device("meta"):
        base, large = (
            outplace.DebertaV2Model(outplace.DebertaV2Config(**small, hidden_size=e, num_hidden_layers=n))
            for e, n in ((768, 12), (1024, 24))
        )
    assert base.encoder.keep_positions
    assert not large.encoder.keep_positions
