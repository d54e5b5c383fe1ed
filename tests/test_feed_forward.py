"""The feed-forward network that keeps only its input, and dropout that keeps only a seed."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from outplace.models.attention.dropout import drop, kept_by_seed
from outplace.models.feed_forward import TOKENS, feed_forward
from outplace.models.layers import ACTIVATIONS
from torch import Tensor, nn

import outplace


def tensors(*shape: int, bias: bool = True) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(0)
    made = [torch.randn(size, dtype=torch.float64) for size in ((24, 8), (24,), (8, 24), (8,))]
    parameters = [x.requires_grad_() if bias or x.ndim == 2 else None for x in made]
    return torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True), parameters


def plain(x: Tensor, parameters: list[Any], activation: Any) -> Tensor:
    w_in, b_in, w_out, b_out = parameters
    return F.linear(activation(F.linear(x, w_in, b_in)), w_out, b_out)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("length", [1, TOKENS, TOKENS + 3])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_the_plain_network(name: str, length: int, bias: bool) -> None:
    x, parameters = tensors(2, length, bias=bias)
    wanted = [x, *(p for p in parameters if p is not None)]
    ours = feed_forward(x, *parameters, ACTIVATIONS[name])
    theirs = plain(x, parameters, ACTIVATIONS[name])
    assert torch.equal(ours, theirs)
    grad = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, wanted, grad), torch.autograd.grad(theirs, wanted, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)


def test_second_derivatives_are_right() -> None:
    x, parameters = tensors(1, 3)
    assert torch.autograd.gradgradcheck(
        lambda *given: feed_forward(given[0], *given[1:], F.gelu), (x, *parameters)
    )


def test_only_what_is_trained_gets_a_gradient() -> None:
    x, parameters = tensors(1, TOKENS + 1)
    for frozen in parameters[:2]:
        assert frozen is not None
        frozen.requires_grad_(False)
    feed_forward(x.detach(), *parameters, F.gelu).sum().backward()
    assert [p is not None and p.grad is not None for p in parameters] == [False, False, True, True]


@pytest.mark.parametrize(("tokens", "expected"), [(TOKENS, [24 * TOKENS]), (2000, [])])
def test_it_keeps_its_input_and_of_few_tokens_the_inner_states(tokens: int, expected: list[int]) -> None:
    x, parameters = tensors(1, tokens)
    known = {y.untyped_storage().data_ptr() for y in (x, *parameters) if y is not None}
    kept: list[int] = []

    def pack(y: Tensor) -> Tensor:
        if y.untyped_storage().data_ptr() not in known:
            kept.append(y.numel())
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        feed_forward(x, *parameters, F.gelu)
    assert kept == expected


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_drops_its_share_and_the_same_in_backward(p: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(400, 500, dtype=torch.float64, requires_grad=True)
    dropped = drop(nn.Dropout(p), x)
    dropped.sum().backward()
    assert torch.equal(dropped, x.grad)
    share = dropped.count_nonzero().item() / x.numel()
    assert share == pytest.approx(1 - p, abs=0.005)
    assert dropped.mean().item() == pytest.approx(0 if p == 1 else 1, abs=0.01)


def test_dropout_is_new_each_time_and_the_same_for_a_seed() -> None:
    x = torch.ones(1000)
    dropout = nn.Dropout(0.5)
    torch.manual_seed(1)
    first, second = drop(dropout, x), drop(dropout, x)
    torch.manual_seed(1)
    assert torch.equal(drop(dropout, x), first)
    assert not torch.equal(first, second)
    assert torch.equal(drop(dropout.eval(), x), x)


def projected_twice(x: Tensor, *weights: Tensor, by_seed: bool = True) -> tuple[Tensor, Any]:
    """A sum over two projections of x after dropout, and what tells whether that is alive."""
    torch.manual_seed(0)
    dropped = drop(nn.Dropout(0.3), x)
    with kept_by_seed(dropped, x) if by_seed else nullcontext():
        total = sum((F.linear(dropped.unsqueeze(0), weight).square().sum() for weight in weights), x.sum())
    return total, weakref.ref(dropped.untyped_storage())


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_kept_by_seed_is_not_kept_and_has_the_same_gradients(frozen: bool) -> None:
    x = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(4, 5, dtype=torch.float64, requires_grad=not frozen) for _ in range(2)]
    wanted = [x] if frozen else [x, *weights]
    (ours, gone), (theirs, alive) = (projected_twice(x, *weights, by_seed=by) for by in (True, False))
    assert gone() is None
    assert (alive() is None) is frozen
    for a, b in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_of_what_is_kept_by_seed_are_right() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *given: projected_twice(*given)[0], (x, weight))


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_dropped_position_tables_are_not_kept_by_layers(family: str) -> None:
    model = tiny.model(f"{family}Model", hidden_dropout_prob=0.1).train()
    alive = []
    for layer in model.encoder.layer:
        attention = layer.attention.self
        project = attention.pos_proj if family == "Deberta" else attention.pos_key_proj
        project.register_forward_pre_hook(
            lambda module, inputs: alive.append(weakref.ref(inputs[0].untyped_storage()))
        )
    output = model(tiny.ids(2, 9)).last_hidden_state
    assert len(alive) == len(model.encoder.layer)
    assert all(reference() is None for reference in alive)
    output.sum().backward()


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_a_layer_in_training_keeps_less_than_half_of_what_its_parts_keep(family: str) -> None:
    """With the network in one, and with a hook on it, which needs it in parts."""
    config = tiny.config(family, hidden_dropout_prob=0.1, intermediate_size=256, num_hidden_layers=1)
    model = getattr(outplace, f"{family}Model")(config).train()
    ids = torch.randint(5, 30, (20, 30))

    def kept() -> int:
        storages: dict[int, int] = {}

        def pack(y: Tensor) -> Tensor:
            storages[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
            return y

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            output = model(ids)  # noqa: F841  # or storages would be used again
        return sum(storages.values())

    in_one = kept()
    model.encoder.layer[0].intermediate.register_forward_hook(lambda *given: None)
    assert kept() - in_one > 2 * 4 * ids.numel() * config.intermediate_size * 0.9
