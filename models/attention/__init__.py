"""Attention as functions of tensors: masks, dense (ESM) and disentangled (DeBERTa).

B batch, L tokens, H heads, D head width, E hidden width, R position slots.
"""

from __future__ import annotations

import torch


def transform_is_active() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is running.

    Fused attention kernels support neither.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
