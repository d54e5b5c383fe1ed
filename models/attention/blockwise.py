"""Disentangled attention by blocks of queries: exact, and never a matrix of all pairs.

The function is `disentangled.eager_attention`. Scores are formed for some heads and some queries at a
time, and formed again in backward, so memory grows with the length and not with its square. Keys and
values go backwards: softmax does not care, and the slots of a block become a view (`SlotTable.block`).
Where all distances of a block share a slot, as beyond the last bucket, position adds one number to each
row and one to each column, and nothing is gathered.

B batch, L tokens, H heads, D head width, R rows of the position tables; in a block h heads and m queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import Noise, draw_seed
from .slots import TILE, SlotTable

QUERIES = 512
"""Queries in a block, at most."""
BLOCK = 1 << 18
"""Scores in a block, up to which heads are put together."""


@dataclass(frozen=True)
class Call:
    """What the blocks of one call have in common; the arguments of `blockwise_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    slots: SlotTable
    mask: Tensor | None
    scale: float
    dropout: float
    seed: int

    def heads(self) -> Iterator[slice]:
        """Heads that are computed together."""
        _, heads, length, _ = self.query.shape
        together = max(BLOCK // (min(QUERIES, length) * length), 1)
        return (slice(h, h + together) for h in range(0, heads, together))

    def noise(self) -> Noise | None:
        return Noise(self.dropout, self.seed) if self.dropout > 0 else None


Parts = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of keys that have one slot, of those whose slots differ, and of those that have the last one."""


class Keys:
    """The keys of some heads of one sequence, last one first, and what queries find there."""

    def __init__(self, call: Call, batch: int, heads: slice) -> None:
        self.slots = call.slots
        self.key = call.key[batch, heads].flip(-2)  # [h, L, D]
        self.value = call.value[batch, heads].flip(-2)  # [h, L, D]
        self.pos_key = None if call.pos_key is None else call.pos_key[heads]  # [h, R, D]
        self.pos_query = None if call.pos_query is None else call.pos_query[heads] / call.scale
        self.mask = None if call.mask is None else call.mask[batch]  # [L] or [L, L], keys in order
        self.tiles = None if self.pos_query is None else self._tiles(self.pos_query)

    def _tiles(self, pos_query: Tensor) -> Tensor:
        """Position to content by slot, for the keys of each tile: [h, T, R, TILE]."""
        key = F.pad(self.key, (0, 0, 0, -self.key.shape[1] % TILE)).unflatten(1, (-1, TILE))
        tiles: Tensor = pos_query.unsqueeze(1) @ key.transpose(-1, -2)
        return tiles

    def attended(self, query: Tensor, start: int) -> Tensor:
        """The context of the queries [h, m, D], scaled, from number `start` on: [h, m, D]."""
        if query.device.type != "cpu" or query.dtype == torch.float16 or torch.is_grad_enabled():
            return self.weights(query, start) @ self.value
        # One kernel for the products and softmax. In float16 it would not hide all keys alike.
        bias, hidden = self.position(query, start), self.hidden(start, query.shape[1])
        if hidden is not None:
            bias = query.new_zeros(hidden.shape).unsqueeze(0) if bias is None else bias
            bias = bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
        query, key, value = (x.unsqueeze(0) for x in (query, self.key, self.value))
        bias = None if bias is None else bias.unsqueeze(0)
        return F.scaled_dot_product_attention(query, key, value, bias, scale=1.0).squeeze(0)

    def weights(self, query: Tensor, start: int) -> Tensor:
        """Attention weights of the queries [h, m, D], scaled, from number `start` on: [h, m, L]."""
        scores = query @ self.key.transpose(-1, -2)
        position, hidden = self.position(query, start), self.hidden(start, query.shape[1])
        if position is not None:
            scores = scores + position
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, -1)

    def position(self, query: Tensor, start: int) -> Tensor | None:
        """What position adds to the scores of the queries [h, m, D], from number `start` on: [h, m, L]."""
        parts = list(self._added(query, start))
        if len(parts) > 1:
            return torch.cat(parts, -1)
        return parts[0] if parts else None

    def _added(self, query: Tensor, start: int) -> Iterator[Tensor]:
        """The same of the keys before the tiles whose distances differ, of those, and of the keys after."""
        (heads, queries, _), length = query.shape, self.key.shape[1]
        a, b = self.slots.alike(start, queries)
        terms = self._c2p(query, start, a, b), self._p2c(start, queries, a, b)
        for c2p, p2c, keys in zip(*terms, (a, b - a, length - b), strict=True):
            added = _plus(c2p, p2c)
            if added is not None and keys > 0:
                yield added.flatten(2)[..., :keys].expand(heads, queries, keys)

    def _c2p(self, query: Tensor, start: int, a: int, b: int) -> Parts:
        """Content to position: [h, m, 1], of the T tiles from `a` to `b` [h, m, T, TILE], and [h, m, 1]."""
        if self.pos_key is None:
            return None, None, None
        tiles = -(-(b - a) // TILE)
        by_slot = query @ self.pos_key.transpose(-1, -2)  # [h, m, R]
        middle = by_slot.gather(-1, self.index(query, start, slice(a, a + tiles * TILE)))
        # Copies: a view would hold all of it.
        low, high = by_slot[..., :1].clone(), by_slot[..., -1:].clone()
        return low, middle.unflatten(-1, (tiles, TILE)), high

    def _p2c(self, start: int, queries: int, a: int, b: int) -> Parts:
        """Position to content: [h, 1, a], of the T tiles from `a` to `b` [h, m, T, TILE], and [h, 1, L - b].

        Whole rows are copied, by distance; then the pair of query i and key j of a tile is at [i + j, j].
        A gather would look at another row for each pair.
        """
        if self.tiles is None:
            return None, None, None
        heads, all_tiles, rows, _ = self.tiles.shape
        first, tiles = a // TILE, -(-(b - a) // TILE)
        windows = self.slots.windows(start, queries, a, tiles)
        tables = torch.arange(heads * all_tiles, device=windows.device).view(heads, all_tiles, 1) * rows
        index = (tables[:, first : first + tiles] + windows).flatten()
        by_distance = self.tiles.flatten(0, 2).index_select(0, index)
        window = windows.shape[1] * TILE
        middle = by_distance.as_strided(
            (heads, queries, tiles, TILE), (tiles * window, TILE, window, TILE + 1)
        )
        low, high = self.tiles[:, :first, 0], self.tiles[:, first + tiles :, -1]
        return low.flatten(1).unsqueeze(1), middle, high.flatten(1).unsqueeze(1)

    def index(self, query: Tensor, start: int, part: slice) -> Tensor:
        """Slots of a part of the keys, [h, m, keys]."""
        heads, queries, _ = query.shape
        slots = self.slots.block(start, queries, part.start, part.stop - part.start)
        return slots.expand(heads, -1, -1)

    def sum_by_slot(self, d_scores: Tensor, start: int) -> Tensor:
        """Sums over keys of a block [h, m, L], for each query and slot: [h, m, R]."""
        (heads, queries, length), others = d_scores.shape, self.slots.rows - 1
        a, b = self.slots.alike(start, queries)
        ends = d_scores.new_zeros(heads, queries, self.slots.rows)
        if b - a < length:
            low, high = (part.sum(-1, keepdim=True) for part in (d_scores[..., :a], d_scores[..., b:]))
            ends = F.pad(low, (0, others)) + F.pad(high, (others, 0))
        return torch.scatter_add(ends, -1, self.index(d_scores, start, slice(a, b)), d_scores[..., a:b])

    def hidden(self, start: int, queries: int) -> Tensor | None:
        """Which scores are hidden, [m, L]: those of padding keys, and all of a padding query."""
        if self.mask is None:
            return None
        rows = self.mask[start : start + queries]
        pairs = rows[:, None] & self.mask if self.mask.ndim == 1 else rows
        return ~pairs.flip(-1)


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    slots: SlotTable,
    mask: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Disentangled attention, by blocks.

    Args:
        query, key, value: [B, H, L, D].
        pos_key, pos_query: projected position tables [H, R, D], or None where the term is off.
        slots: which row of them each distance reads.
        mask: boolean [B, L] (padding keys are hidden, and a padding query attends uniformly) or
            [B, L, L] (which key each query attends to), or None.
        scale: what the scores are divided by. Factors are divided before their product, which so stays
            in range where the score does.
        dropout: probability of dropping an attention weight.

    Returns:
        context [B, L, H, D].
    """
    seed = draw_seed() if dropout > 0 else 0
    context: Tensor = Blockwise.apply(
        query, key, value, pos_key, pos_query, slots, mask, scale, dropout, seed
    )
    return context


class Blockwise(torch.autograd.Function):
    """`blockwise_attention` that keeps its arguments and nothing else."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return attend(Call(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.slots, mask, ctx.scale, ctx.dropout, ctx.seed = inputs
        ctx.save_for_backward(*tensors, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, mask = ctx.saved_tensors
        arguments = (*tensors, ctx.slots, mask, ctx.scale, ctx.dropout, ctx.seed)
        call = Call(*arguments)
        nothing = (None,) * (len(arguments) - len(tensors))
        if not torch.is_grad_enabled():
            return (*gradients(call, grad), *nothing)
        # The gradient is to be differentiated itself: then autograd derives it from the forward pass.
        wanted = [x for x in tensors if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(attend(call), wanted, grad, create_graph=True))
        return (*(next(found) if x is not None and x.requires_grad else None for x in tensors), *nothing)


def attend(call: Call) -> Tensor:
    """The context [B, L, H, D]."""
    batches, noise = range(call.query.shape[0]), call.noise()
    of_heads = [torch.stack([_attend(call, b, heads, noise) for b in batches]) for heads in call.heads()]
    return torch.cat(of_heads, 2)


def _attend(call: Call, batch: int, heads: slice, noise: Noise | None) -> Tensor:
    """The context of some heads of one sequence, [L, h, D]."""
    keys = Keys(call, batch, heads)
    of_rows = []
    for start in range(0, call.query.shape[2], QUERIES):
        query = call.query[batch, heads, start : start + QUERIES] / call.scale
        if noise is None:
            of_rows.append(keys.attended(query, start))
        else:
            weights = keys.weights(query, start)
            of_rows.append((weights * noise.keep_mask(weights) @ keys.value) / noise.share)
    return torch.cat(of_rows, -2).transpose(0, 1)


def gradients(call: Call, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, pos_key and pos_query, from that of the context, [B, L, H, D]."""
    noise = call.noise()
    of_heads = []
    for heads in call.heads():
        of_batch = []
        of_tables: tuple[Tensor | None, Tensor | None] = (None, None)
        for b in range(call.query.shape[0]):
            content, tables = _gradients(call, Keys(call, b, heads), b, heads, grad[b, :, heads], noise)
            of_batch.append(content)
            of_tables = (_plus(of_tables[0], tables[0]), _plus(of_tables[1], tables[1]))
        of_heads.append((*(torch.stack(x) for x in zip(*of_batch, strict=True)), *of_tables))
    query, key, value, pos_key, pos_query = zip(*of_heads, strict=True)
    return (
        *(torch.cat(x, 2).transpose(1, 2) for x in (query, key, value)),
        *(None if x[0] is None else torch.cat(x) for x in (pos_key, pos_query)),
    )


def _gradients(
    call: Call, keys: Keys, batch: int, heads: slice, grad: Tensor, noise: Noise | None
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
    """Gradients of some heads of one sequence: query, key and value [L, h, D], and both tables [h, R, D]."""
    length = keys.key.shape[1]
    of_rows = []
    d_key, d_value = torch.zeros_like(keys.key), torch.zeros_like(keys.value)
    d_pos_key = None if keys.pos_key is None else torch.zeros_like(keys.pos_key)
    by_slot = None
    if keys.pos_query is not None:
        by_slot = BySlot(grad.new_zeros((*keys.pos_query.shape[:2], length)))
    for start in range(0, length, QUERIES):
        query = call.query[batch, heads, start : start + QUERIES] / call.scale
        d_context = grad[start : start + QUERIES].transpose(0, 1)  # [h, m, D]
        weights = kept = keys.weights(query, start)
        mask = None
        if noise is not None:
            mask = noise.keep_mask(weights)
            kept, d_context = weights * mask, d_context / noise.share
        d_value = torch.baddbmm(d_value, kept.transpose(-1, -2), d_context)
        hidden = keys.hidden(start, query.shape[1])
        if hidden is not None:
            # A query without any key has uniform weights, whatever its scores.
            d_context = d_context.masked_fill(hidden.all(-1, keepdim=True), 0)
        d_weights = d_context @ keys.value.transpose(-1, -2)
        if mask is not None:
            d_weights = d_weights * mask
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        d_query = d_scores @ keys.key
        d_key = torch.baddbmm(d_key, d_scores.transpose(-1, -2), query)
        if keys.pos_key is not None and d_pos_key is not None:
            of_slots = keys.sum_by_slot(d_scores, start)
            d_query = torch.baddbmm(d_query, of_slots, keys.pos_key)
            d_pos_key = torch.baddbmm(d_pos_key, of_slots.transpose(-1, -2), query)
        if by_slot is not None:
            by_slot = by_slot.plus(keys, d_scores, start)
        of_rows.append(d_query / call.scale)
    d_pos_query = None
    if by_slot is not None and keys.pos_query is not None:
        d_key = d_key + by_slot.times(keys.pos_query)
        d_pos_query = by_slot.of_slots(keys.key) / call.scale
    d_query, d_key, d_value = torch.cat(of_rows, -2), d_key.flip(-2), d_value.flip(-2)
    return (d_query.transpose(0, 1), d_key.transpose(0, 1), d_value.transpose(0, 1)), (d_pos_key, d_pos_query)


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return total if more is None else more
    return total + more


@dataclass(frozen=True)
class BySlot:
    """Sums over queries of the scores' gradient, for each slot and key.

    Args:
        band: of the blocks' parts whose distances differ, [h, R, L].
        low, high: of the parts where all have the first, or the last slot, [h, 1, L]; None where there
            have been none.
    """

    band: Tensor
    low: Tensor | None = None
    high: Tensor | None = None

    def plus(self, keys: Keys, d_scores: Tensor, start: int) -> BySlot:
        """With a block [h, m, L] added whose queries begin at `start`."""
        length, (a, b) = d_scores.shape[-1], keys.slots.alike(start, d_scores.shape[1])
        index = keys.index(d_scores, start, slice(a, b))
        middle = torch.scatter_add(self.band[..., a:b], -2, index, d_scores[..., a:b])
        if b - a < length:
            middle = torch.cat((self.band[..., :a], middle, self.band[..., b:]), -1)
        low = F.pad(d_scores[..., :a].sum(-2, keepdim=True), (0, length - a)) if a > 0 else None
        high = F.pad(d_scores[..., b:].sum(-2, keepdim=True), (b, 0)) if b < length else None
        return BySlot(middle, _plus(self.low, low), _plus(self.high, high))

    def times(self, table: Tensor) -> Tensor:
        """The sums times the position table [h, R, D], for each key: [h, L, D]."""
        total = self.band.transpose(-1, -2) @ table
        for edge, row in ((self.low, table[:, :1]), (self.high, table[:, -1:])):
            total = total if edge is None else torch.baddbmm(total, edge.transpose(-1, -2), row)
        return total

    def of_slots(self, key: Tensor) -> Tensor:
        """The sums times the keys [h, L, D], for each slot: [h, R, D]."""
        total, others = self.band @ key, self.band.shape[1] - 1
        for edge, rows in ((self.low, (0, others)), (self.high, (others, 0))):
            total = total if edge is None else total + F.pad(edge @ key, (0, 0, *rows))
        return total
