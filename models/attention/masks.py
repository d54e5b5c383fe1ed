"""What an attention mask means, for every family: 1 attends, 0 does not, of any dtype, never additive."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bool(mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """The mask as booleans.

    Args:
        mask: None, [B, L] (which tokens are real) or [B, L, L] (which key each query attends to).

    Raises:
        ValueError: another shape; the message has both.
    """
    if mask is None:
        return None
    if tuple(mask.shape) not in ((batch, length), (batch, length, length)):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; for this input it must be "
            f"{(batch, length)} or {(batch, length, length)}"
        )
    return mask if mask.dtype == torch.bool else mask != 0


def token_mask(mask: Tensor | None) -> Tensor | None:
    """Which tokens are real, [B, L]: for a mask [B, L, L] those that some query attends to."""
    return mask if mask is None or mask.ndim == 2 else mask.any(-2)


def key_mask(mask: Tensor | None) -> Tensor | None:
    """Mask of the scores [B, H, L, L] that hides padding keys: [B, 1, 1, L] ([B, 1, L, L] of [B, L, L])."""
    if mask is None:
        return None
    return mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]


def pair_mask(mask: Tensor | None) -> Tensor | None:
    """Mask of the scores [B, H, L, L] that hides padding keys and padding queries: [B, 1, L, L].

    A padding query is left with no key at all, so its attention is uniform, as in upstream's DeBERTa.
    """
    if mask is None:
        return None
    return (mask[:, :, None] & mask[:, None, :])[:, None] if mask.ndim == 2 else mask[:, None]


def mask_scores(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Hide scores. The lowest finite number, not -inf: a row without any key stays finite, and uniform."""
    return scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
