"""How far two models are apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VANISHING = 1e-5
"""A gradient below this share of the model's largest is measured against that one. Such are rounding errors
of what is zero in exact arithmetic: of a bias that shifts all scores of a softmax alike (a key's bias, the
classifier's of multiple choice)."""


def relative(ours: Tensor, upstream: Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return _apart(ours, upstream) / (_size(upstream) or 1.0)


def _apart(ours: Tensor, upstream: Tensor) -> float:
    assert ours.shape == upstream.shape, (ours.shape, upstream.shape)
    return (ours.double() - upstream.double()).abs().max().item()


def _size(x: Tensor) -> float:
    return x.double().abs().max().item()


def tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of an output by name: hidden states and attentions one by one."""
    found: dict[str, Tensor] = {}
    for name, value in output.items():
        if isinstance(value, Tensor):
            found[name] = value
        else:
            found |= {f"{name}[{i}]": tensor for i, tensor in enumerate(value)}
    return found


def outputs_apart(ours: Any, upstream: Any) -> float:
    """Largest relative difference of any output; both must have the same outputs, in the same order."""
    mine, theirs = tensors(ours), tensors(upstream)
    assert list(mine) == list(theirs), (list(mine), list(theirs))
    return max(relative(mine[name], theirs[name]) for name in theirs)


def objective(output: Any) -> Tensor:
    """A scalar whose gradient reaches every parameter that the output depends on."""
    if output.get("loss") is not None:
        return output["loss"]
    states = output["last_hidden_state"]
    weights = torch.linspace(-1, 1, states[0].numel(), dtype=states.dtype).view(states[0].shape)
    total = (states * weights).sum()
    pooled = output.get("pooler_output")
    return total if pooled is None else total + pooled.sum()


def gradients(model: nn.Module, output: Any) -> dict[str, Tensor]:
    model.zero_grad()
    objective(output).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_apart(ours: dict[str, Tensor], upstream: dict[str, Tensor]) -> float:
    """Largest relative difference of any gradient; those that upstream has as zeros may be absent here."""
    assert set(ours) <= set(upstream)
    assert not any(upstream[name].any() for name in set(upstream) - set(ours))
    sizes = {name: _size(gradient) for name, gradient in upstream.items()}
    largest = max(sizes.values())
    return max(
        _apart(ours[name], upstream[name]) / (sizes[name] if sizes[name] > VANISHING * largest else largest)
        for name in ours
    )
