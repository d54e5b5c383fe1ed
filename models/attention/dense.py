"""Scaled dot-product attention: the readable function, and the one that torch fuses."""

from __future__ import annotations

import inspect
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .masks import mask_scores


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """softmax(query · keyᵀ) · value, with `query` already scaled.

    Args:
        query, key, value: [B, H, L, D].
        mask: boolean, broadcast to [B, H, L, L], or None.
        dropout: probability of dropping an attention weight.

    Returns:
        context [B, H, L, D] and the attention weights [B, H, L, L], after dropout.
    """
    scores = mask_scores(query @ key.transpose(-1, -2), mask)
    weights = F.dropout(torch.softmax(scores, dim=-1), dropout)
    return weights @ value, weights


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """The context of `eager_attention`, by `torch.nn.functional.scaled_dot_product_attention`."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=1.0)


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """`sdpa_attention` of sequences end to end, by torch's own kernel for them; see `varlen_serves`.

    Args:
        query, key, value: [1, H, total, D].
        cu_seqlens: where sequences begin, and `total`: [B + 1].
        longest: tokens of the longest sequence.

    Returns:
        context [1, H, total, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    bounds = cu_seqlens.int()
    context = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=1.0)
    assert isinstance(context, Tensor)
    return context.transpose(0, 1).unsqueeze(0)


def varlen_serves(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Whether `varlen_attention` runs: FlashAttention's terms."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and dropout == 0
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and _has_varlen()
    )


@cache
def _has_varlen() -> bool:
    """Whether this torch has the kernel, and it takes a scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "scale" in inspect.signature(varlen_attn).parameters
