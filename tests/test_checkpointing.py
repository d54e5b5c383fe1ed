"""Gradient checkpointing, of both kinds, with everything that people combine it with."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

KINDS: dict[str, dict[str, Any]] = {
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "non-reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "default": {},
    "attention": {"attention_only": True},
    "attention, reentrant": {
        "attention_only": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def gradients(name: str, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one training step, dropout on, from a fixed random state."""
    model.train()
    torch.manual_seed(7)
    output = model(**tiny.inputs(name))
    loss = output[0] if output[0].ndim == 0 else output[0].pow(2).mean()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["nothing", "embeddings", "embeddings, inputs require grads"])
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_gradients_equal_those_without_it(name: str, frozen: str, kind: str) -> None:
    def build() -> Any:
        model = tiny.model(name)
        if frozen != "nothing":
            model.base_model.embeddings.requires_grad_(False)
        if frozen.endswith("require grads"):
            model.enable_input_require_grads()
        return model

    plain = build()
    expected_loss, expected = gradients(name, plain)
    model = build()
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable(**KINDS[kind])
    assert model.is_gradient_checkpointing
    loss, found = gradients(name, model)
    assert torch.equal(loss, expected_loss)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert torch.allclose(gradient, expected[key], rtol=1e-5, atol=1e-7), key
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["sdpa", "blockwise"])
@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_gradients_equal_those_without_it_on_every_path(family: str, path: str, kind: str) -> None:
    fields = {"attn_implementation": path} | ({"talking_head": False} if family == "Deberta" else {})
    name = f"{family}ForSequenceClassification"
    plain, model = tiny.model(name, **fields), tiny.model(name, **fields)
    model.gradient_checkpointing_enable(**KINDS[kind])
    expected_loss, expected = gradients(name, plain)
    loss, found = gradients(name, model)
    assert torch.equal(loss, expected_loss)
    for key, gradient in expected.items():
        assert torch.allclose(found[key], gradient, rtol=1e-5, atol=1e-7), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_what_is_recomputed_is_recomputed_in_training_and_only_there(family: str, kind: str) -> None:
    name = f"{family}ForSequenceClassification"
    model, inputs = tiny.model(name), tiny.inputs(name)
    model.gradient_checkpointing_enable(**KINDS[kind])
    calls: Counter[str] = Counter()
    layer = model.base_model.encoder.layer[0]
    for part, module in {"attention": layer.attention.self, "feed-forward": layer.intermediate}.items():
        module.register_forward_pre_hook(lambda *_, part=part: calls.update([part]))
    again = {"attention": 2, "feed-forward": 1 if "attention" in kind else 2}
    model.train()(**inputs).loss.backward()
    assert calls == again
    model.eval()(**inputs).loss.backward()
    with torch.no_grad():
        model.train()(**inputs)
    assert calls == {part: times + 2 for part, times in again.items()}
