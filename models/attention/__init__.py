"""Attention as functions of tensors: masks, dense (ESM) and disentangled (DeBERTa).

B batch, L tokens, H heads, D head width, E hidden width, R position slots.
"""

from __future__ import annotations

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey


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


def runs_plainly(device: torch.device) -> bool:
    """Whether operators run now, on numbers: nothing traces, compiles, exports or transforms them."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    modes = (_get_dispatch_mode(key) for key in (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY))
    return not (transform_is_active() or device.type == "meta" or any(mode is not None for mode in modes))
