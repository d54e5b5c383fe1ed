"""Disentangled attention (DeBERTa, He et al. 2020, https://arxiv.org/abs/2006.03654, section 3.1).

The score of query i and key j is the sum of content-to-content, content-to-position (c2p) and
position-to-content (p2c), equation 4:

    A[i, j] = Qc[i] · Kc[j] + Qc[i] · Kr[s(i, j)] + Kc[j] · Qr[s(j, i)]

Position enters through a slot of the distance i - j. Slots are odd around the middle of the table,
so s(j, i) of the paper, looked up from the key's side with the sign turned, is the same row as
s(i, j): one index serves c2p and p2c.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .masks import mask_scores


def distances(length: int, device: torch.device) -> Tensor:
    """Distance i - j of query i and key j, [L, L]."""
    position = torch.arange(length, device=device)
    return position[:, None] - position[None, :]


def log_bucket(distance: Tensor, buckets: int, max_distance: int, clamp: bool = False) -> Tensor:
    """DeBERTa-V2's buckets: exact up to half of them, logarithmic beyond.

    Distances past `max_distance` land past the last bucket, where the slot is clamped to the end of
    the table: upstream's rule, and the default. The original implementation, which trained the
    published checkpoints, clamps the distance first: distances of -max_distance and below then take
    slot 1, which was trained, where upstream takes slot 0, which never was. `clamp=True` does as the
    original. The two differ only for sequences longer than `max_distance`.

    Args:
        distance: integers, any shape.
        buckets: how many buckets lie on each side of zero.
        max_distance: the distance that the last bucket ends before.
        clamp: whether distances are limited to [1 - max_distance, max_distance - 1] first.
    """
    if clamp:
        distance = distance.clamp(1 - max_distance, max_distance - 1)
    middle = buckets // 2
    size = distance.abs().clamp(min=middle)
    # Both logarithms in one precision: their ratio must be exactly 1 at the last distance.
    steps = torch.log(size / middle) / torch.log(torch.tensor((max_distance - 1) / middle)) * (middle - 1)
    bucket = (torch.ceil(steps).long() + middle) * distance.sign()
    return torch.where(distance.abs() <= middle, distance, bucket)


def slots(distance: Tensor, span: int) -> Tensor:
    """Row of the position table for each distance (equation 3): distance + span, kept inside [0, 2 span)."""
    return (distance + span).clamp(0, 2 * span - 1)


def c2p_scores(query: Tensor, pos_key: Tensor, slot: Tensor) -> Tensor:
    """Content to position: query i with the projected position of its distance to j.

    Args:
        query: [B, H, L, D].
        pos_key: projected position table, [H, R, D].
        slot: [L, L].

    Returns:
        [B, H, L, L].
    """
    by_slot = _times_table(query, pos_key)
    return by_slot.gather(-1, slot.expand(*by_slot.shape[:-1], -1))


def p2c_scores(key: Tensor, pos_query: Tensor, slot: Tensor) -> Tensor:
    """Position to content: key j with the projected position of its distance from i. As `c2p_scores`."""
    by_slot = _times_table(key, pos_query)
    return by_slot.gather(-1, slot.t().expand(*by_slot.shape[:-1], -1)).transpose(-1, -2)


def position_scores(
    query: Tensor,
    key: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    slot: Tensor | None,
    scale: float,
) -> Tensor | None:
    """Both position terms together, [B, H, L, L]; None where there is none. As `eager_attention`."""
    position = None
    if pos_key is not None and slot is not None:
        position = _divide(c2p_scores(query, pos_key, slot), scale)
    if pos_query is not None and slot is not None:
        p2c = _divide(p2c_scores(key, pos_query, slot), scale)
        position = p2c if position is None else position + p2c
    return position


def _times_table(x: Tensor, table: Tensor) -> Tensor:
    """x [B, H, L, D] · tableᵀ [H, R, D] to [B, H, L, R]; in upstream's layout, which rounds alike."""
    return x @ table.expand(x.shape[0], -1, -1, -1).contiguous().transpose(-1, -2)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    slot: Tensor | None,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    mix_scores: nn.Module | None = None,
    mix_weights: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """Disentangled attention, spelt out: the specification of every faster path.

    Args:
        query, key, value: [B, H, L, D].
        pos_key, pos_query: projected position tables [H, R, D], or None where the term is off.
        slot: row of those tables for each query and key, [L, L].
        mask: boolean, broadcast to [B, H, L, L], or None.
        scale: what the scores are divided by; 1 where the caller has divided the factors.
        dropout: probability of dropping an attention weight.
        mix_scores, mix_weights: linear maps over the heads (talking heads), before and after softmax.

    Returns:
        context [B, H, L, D] and the attention weights [B, H, L, L], after dropout.
    """
    scores = query @ _divide(key.transpose(-1, -2), scale)
    position = position_scores(query, key, pos_key, pos_query, slot, scale)
    if position is not None:
        scores = scores + position
    if mix_scores is not None:
        scores = _over_heads(mix_scores, scores)
    weights = F.dropout(torch.softmax(mask_scores(scores, mask), dim=-1), dropout)
    if mix_weights is not None:
        weights = _over_heads(mix_weights, weights)
    return weights @ value, weights


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    slot: Tensor | None,
    mask: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """The context of `eager_attention`, by `torch.nn.functional.scaled_dot_product_attention`.

    Position, and what is hidden, go into its mask, a matrix of all pairs.
    """
    bias = position_scores(query, key, pos_key, pos_query, slot, scale)
    if mask is not None:
        # A query without any key attends uniformly: all its scores are made 0.
        some = mask.any(-1, keepdim=True)
        query = query.masked_fill(~some, 0)
        bias = query.new_zeros(()) if bias is None else bias
        bias = bias.masked_fill(~mask, -torch.inf).masked_fill(~some, 0)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=1 / scale
    )


def _divide(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x / scale


def _over_heads(mix: nn.Module, scores: Tensor) -> Tensor:
    mixed: Tensor = mix(scores.permute(0, 2, 3, 1))
    return mixed.permute(0, 3, 1, 2)
