"""The feed-forward network of a layer, exact, some tokens at a time: its inner states are a layer's widest.

In training it keeps between forward and backward its input and, of few tokens, the inner states before the
activation; of many these are formed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .attention import runs_plainly

Activation = Callable[[Tensor], Tensor]

TOKENS = 512
"""Tokens whose inner states exist together on a CPU; in training those of no more are kept."""
SHORT = 64
"""Tokens so few that autograd may keep the inner states before and after the activation."""
DEVICE_TOKENS = 8192
"""Tokens that go through together elsewhere, where small products leave a device idle."""


class Inner(Protocol):
    """First half of the network, a module: `activation(dense(x))`."""

    dense: nn.Linear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor: ...


class Outer(Protocol):
    """Second half, a module: `add(dense(x), residual)`."""

    dense: nn.Linear

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor: ...


def in_parts(inner: Inner, outer: Outer, x: Tensor, residual: Tensor) -> Tensor:
    """`outer(inner(x), residual)`, [B, L, E]; for many tokens a part at a time.

    Not so where a module of it has hooks, which are to see the whole, or is not the plain one.
    """
    batch, length, _ = x.shape
    if not runs_plainly(x.device) or batch * length <= SHORT or _has_hooks(inner, outer):
        return outer(inner(x), residual)
    if not torch.is_grad_enabled() and not outer.training:  # type: ignore[attr-defined]
        parts = zip(_split(x.flatten(0, 1)), _split(residual.flatten(0, 1)), strict=True)
        return _joined([outer(inner(part), to) for part, to in parts]).view(batch, length, -1)
    are_plain = all(type(getattr(half, "dense", None)) is nn.Linear for half in (inner, outer))
    are_ours = hasattr(inner, "activation") and hasattr(outer, "add")
    if not (are_plain and are_ours) or torch.is_autocast_enabled(x.device.type):
        return outer(inner(x), residual)
    parameters = inner.dense.weight, inner.dense.bias, outer.dense.weight, outer.dense.bias
    return outer.add(feed_forward(x, *parameters, inner.activation), residual)


def _split(x: Tensor) -> tuple[Tensor, ...]:
    """Rows that go through together."""
    parts: tuple[Tensor, ...] = x.split(TOKENS if x.device.type == "cpu" else DEVICE_TOKENS)
    return parts


def _joined(parts: list[Tensor]) -> Tensor:
    """All rows; of one part no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _has_hooks(*parts: Any) -> bool:
    modules = (module for part in parts for module in part.modules())
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def feed_forward(
    hidden_states: Tensor,
    weight_in: Tensor,
    bias_in: Tensor | None,
    weight_out: Tensor,
    bias_out: Tensor | None,
    activation: Activation,
) -> Tensor:
    """activation(x · weight_inᵀ + bias_in) · weight_outᵀ + bias_out, of hidden states [..., E]."""
    parameters = weight_in, bias_in, weight_out, bias_out
    rows: Tensor = FeedForward.apply(hidden_states.flatten(0, -2), *parameters, activation)[0]
    return rows.view(*hidden_states.shape[:-1], -1)


def forward(
    x: Tensor, w_in: Tensor, b_in: Tensor | None, w_out: Tensor, b_out: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor]:
    """`feed_forward` of rows [N, E], and the inner states of the last part."""
    parts: list[Tensor] = []
    inner = x
    for part in _split(x):
        inner = F.linear(part, w_in, b_in)
        parts = [*parts, F.linear(activation(inner), w_out, b_out)]
    return _joined(parts), inner


class FeedForward(torch.autograd.Function):
    """`forward` that keeps its arguments and, of a single part, the inner states."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.activation = inputs
        inner = output[1]
        ctx.mark_non_differentiable(inner)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, inner if inputs[0].shape[0] <= TOKENS else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, inner = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:-1]
        if not torch.is_grad_enabled():
            return (*_gradients(tuple(tensors), inner, ctx.activation, grad, wanted), None)
        # The gradient is to be differentiated itself: then autograd derives it from the forward pass.
        inputs = [x for x, want in zip(tensors, wanted, strict=True) if want]
        x, w_in, b_in, w_out, b_out = tensors
        output, _ = forward(x, w_in, b_in, w_out, b_out, ctx.activation)
        found = iter(torch.autograd.grad(output, inputs, grad, create_graph=True))
        return (*(next(found) if want else None for want in wanted), None)


def _gradients(
    tensors: tuple[Any, ...],
    inner: Tensor | None,
    activation: Activation,
    grad: Tensor,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of the five tensors, None for those that are not wanted."""
    x, w_in, b_in, w_out, _ = tensors
    of_rows = []
    of_w_in = of_b_in = of_w_out = of_b_out = None
    for part, of_output in zip(_split(x), _split(grad), strict=True):
        with torch.enable_grad():
            before = (F.linear(part, w_in, b_in) if inner is None else inner).detach().requires_grad_()
            after = activation(before)
        if wanted[3]:
            of_w_out = _plus_product(of_w_out, of_output, after.detach())
        edge = get_gradient_edge(after)
        del after
        (of_before,) = torch.autograd.grad(edge, before, of_output @ w_out)
        if wanted[1]:
            of_w_in = _plus_product(of_w_in, of_before, part)
        if wanted[2]:
            of_b_in = of_before.sum(0) if of_b_in is None else of_b_in + of_before.sum(0)
        if wanted[4]:
            of_b_out = of_output.sum(0) if of_b_out is None else of_b_out + of_output.sum(0)
        if wanted[0]:
            of_rows.append(of_before @ w_in)
    return [_joined(of_rows) if of_rows else None, of_w_in, of_b_in, of_w_out, of_b_out]


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + aᵀ · b."""
    return a.t() @ b if total is None else torch.addmm(total, a.t(), b)
