"""A model's steps on tensors without numbers: what would be allocated, whatever the machine.

Everything runs under torch's `FakeTensorMode`. Decisions of ours that look at numbers are made here instead,
so that the paths a step takes are those that it takes on numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from outplace.models import attention, feed_forward
from outplace.models.attention import blockwise, dropout, fused, plan
from outplace.models.attention.slots import SlotTable
from outplace.models.deberta import blocks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

Target = Literal["cpu", "cuda"]
CPU = torch.device("cpu")


def _dropout_of_cuda(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout that keeps a boolean for each number, as on CUDA; on a CPU torch keeps one of `x`'s dtype."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _runs_plainly(device: torch.device) -> bool:
    """Whether it would without the fake tensors."""
    with unset_fake_temporarily():
        return attention.runs_plainly(device)


class _Kernels(torch.autograd.Function):
    """The operator of `fused`, not hidden behind it what is allocated around its kernels."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return fused.forward(fused.Call(*arguments))

    setup_context = staticmethod(fused._setup_context)
    backward = staticmethod(fused._backward)


def _gradients(grad: Tensor, context: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return fused.gradients(fused.Call(*arguments), grad, context, lse)


@contextmanager
def planned(target: Target) -> Iterator[FakeTensorMode]:
    """Make tensors fake, as on a CPU or a CUDA device of any size."""
    mode = FakeTensorMode()
    slots = blocks.Encoder.slots

    def known_slots(encoder: blocks.Encoder, length: int, device: torch.device) -> SlotTable | None:
        with unset_fake_temporarily(), torch.device(CPU):
            table = slots(encoder, length, CPU)
        return table and replace(table, by_distance=mode.from_tensor(table.by_distance))

    def same_form(a: Tensor | None, b: Tensor | None) -> bool:
        return (a is None) == (b is None)

    with ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        for module in (plan, blocks, feed_forward):
            patch(module, "runs_plainly", _runs_plainly)
        # Fake parameters cannot be moved; all are made where, and as what, they are to be.
        patch(nn.Module, "to", lambda module, *args, **kwargs: module)
        patch(blocks.Encoder, "slots", known_slots)
        patch(blocks, "_equal", same_form)
        for module in (blockwise, dropout, fused):
            patch(module, "draw_seed", lambda: 0)
        patch(fused, "missing", lambda width, dtype, device: None)
        patch(fused, "attention", _Kernels.apply)
        patch(fused, "attention_backward", _gradients)
        patch(fused.Call, "launch", lambda *arguments: None)
        # Dropout that is drawn again is taken on CPUs only.
        patch(dropout, "runs_plainly", _runs_plainly if target == "cpu" else lambda device: False)
        if target == "cuda":
            patch(feed_forward, "_split", lambda x: x.split(feed_forward.DEVICE_TOKENS))
            patch(F, "dropout", _dropout_of_cuda)
        stack.enter_context(mode)
        yield mode
