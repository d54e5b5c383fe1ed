"""`torch.func` on every class: per-sample gradients, forward mode, second derivatives, ensembles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def loss_of(model: Any, weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    output = functional_call(model, weights, kwargs=inputs)
    return output[0] if output[0].ndim == 0 else output[0].sin().mean()


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_per_sample_gradients_equal_one_sample_at_a_time(name: str) -> None:
    model, inputs = tiny.model(name).double(), tiny.inputs(name)
    weights = parameters(model)

    def one(weights: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        return loss_of(model, weights, {key: x.unsqueeze(0) for key, x in sample.items()})

    found = vmap(grad(one), in_dims=(None, 0))(weights, inputs)
    for row in range(3):
        expected = grad(one)(weights, {key: x[row] for key, x in inputs.items()})
        for key, gradient in expected.items():
            assert torch.allclose(found[key][row], gradient, rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_forward_mode_equals_reverse_mode(name: str) -> None:
    model, inputs = tiny.model(name).double(), tiny.inputs(name)
    weights = parameters(model)
    generator = torch.Generator().manual_seed(0)
    tangents = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in weights.items()}
    _, forward = jvp(lambda w: loss_of(model, w, inputs), (weights,), (tangents,))
    gradients = grad(lambda w: loss_of(model, w, inputs))(weights)
    reverse = sum((gradients[key] * tangents[key]).sum() for key in weights)
    assert torch.allclose(forward, torch.as_tensor(reverse), rtol=1e-9)


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_a_hessian_is_symmetric_and_right(name: str) -> None:
    model = tiny.model(name).double()
    inputs, weights = tiny.inputs(name, batch=2, length=5), parameters(model)
    key = next(k for k in weights if k.endswith("layer.0.output.dense.bias"))

    def loss(bias: Tensor) -> Tensor:
        return loss_of(model, weights | {key: bias}, inputs)

    found = hessian(loss)(weights[key])
    assert torch.allclose(found, found.t(), atol=1e-12)
    step = torch.zeros_like(weights[key])
    step[0] = 1e-5
    difference = (grad(loss)(weights[key] + step) - grad(loss)(weights[key] - step)) / 2e-5
    assert torch.allclose(found[0], difference, rtol=1e-4, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_an_ensemble_equals_its_members(name: str) -> None:
    members = [tiny.model(name), tiny.model(name)]
    for parameter in members[1].parameters():
        parameter.mul_(1.1)
    inputs = tiny.inputs(name)
    stacked, buffers = stack_module_state(members)
    skeleton = copy.deepcopy(members[0]).to("meta")

    def one(weights: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
        return functional_call(skeleton, (weights, state), kwargs=inputs)[-1]

    together = vmap(one)(stacked, buffers)
    for index, member in enumerate(members):
        assert torch.allclose(together[index], member(**inputs)[-1], atol=1e-5)
