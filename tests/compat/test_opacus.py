"""Differentially private training with Opacus."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

opacus = pytest.importorskip("opacus", reason="trains privately: pip install 'outplace[compat]'")
HEADS = [f"{family}ForSequenceClassification" for family in tiny.CONFIGS]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def private(model: Any, inputs: dict[str, Tensor], mode: str) -> tuple[Any, Any, Any, Any]:
    engine = opacus.PrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the generator is not a cryptographic one
        made = engine.make_private(
            module=model.train(),
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            data_loader=DataLoader(TensorDataset(*inputs.values()), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    return (engine, *made)


def test_hooks_train_esm() -> None:
    name = "EsmForSequenceClassification"
    inputs = tiny.inputs(name, batch=8)
    engine, model, optimizer, loader = private(tiny.model(name), inputs, "hooks")
    before = [p.detach().clone() for p in model.parameters()]
    for rows in loader:
        optimizer.zero_grad()
        model(**dict(zip(inputs, rows, strict=True))).loss.backward()
        optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert 0 < engine.get_epsilon(1e-5) < 100


@pytest.mark.parametrize("name", HEADS)
def test_per_sample_gradients_of_vmap_train_every_family(name: str) -> None:
    """Opacus' mode `no_op`: it clips and adds noise to per-sample gradients that we put in place."""
    inputs = tiny.inputs(name, batch=8)
    engine, wrapped, optimizer, loader = private(tiny.model(name, **NO_DROPOUT), inputs, "no_op")
    model = wrapped._module

    def loss(weights: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        return functional_call(model, weights, kwargs={k: x.unsqueeze(0) for k, x in sample.items()}).loss

    for rows in loader:
        weights = {key: p.detach() for key, p in model.named_parameters()}
        gradients = vmap(grad(loss), in_dims=(None, 0))(weights, dict(zip(inputs, rows, strict=True)))
        optimizer.zero_grad()
        for key, parameter in model.named_parameters():
            parameter.grad_sample = gradients[key]
        optimizer.step()
        norms = torch.cat([g.flatten(1) for g in gradients.values()], dim=1).norm(dim=1)
        assert norms.shape == (4,)
        assert norms.isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())
    assert 0 < engine.get_epsilon(1e-5) < 100
