"""Scaled dot-product attention: the readable function, and the one that torch fuses."""

from __future__ import annotations

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
