"""Sequences end to end in one row, without padding between them: how tokens lie, and the way there and back.

B sequences of at most L tokens, `total` tokens in all, E hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor, nn

from .attention import runs_plainly

FULL = 0.9
"""A padded batch of which this share is tokens is left as it is, unless packing is asked for."""
PADDING = 256
"""So is one with fewer cells of padding."""


@dataclass(frozen=True)
class Sequences:
    """Which tokens of a row [1, total] belong together.

    Args:
        cu_seqlens: where sequences begin, and `total`: [B + 1], from 0 on.
        total: how many tokens there are.
        lengths: of each sequence; None where values are not read (`runs_plainly`).
    """

    cu_seqlens: Tensor
    total: int
    lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, cu_seqlens: Tensor, batch: int, total: int) -> Sequences:
        """The sequences of an input [batch, total].

        Raises:
            ValueError: the input is no single row, or `cu_seqlens` is not [B + 1], of integers, 0 first,
                ascending, `total` last. Values are not looked at where nothing may read them.
        """
        if batch != 1:
            raise ValueError(f"with cu_seqlens the input must be one row, [1, total]; it has {batch} rows")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be [B + 1]")
        if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ValueError(f"cu_seqlens is of {cu_seqlens.dtype}; it must be of integers")
        if not runs_plainly(cu_seqlens.device):
            return cls(cu_seqlens, total, None)
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0:
            raise ValueError(f"cu_seqlens begins with {bounds[0]}; it must begin with 0")
        lengths = tuple(end - start for start, end in pairwise(bounds))
        if min(lengths) < 0:
            where = next(i for i, length in enumerate(lengths) if length < 0)
            raise ValueError(
                f"cu_seqlens decreases from {bounds[where]} to {bounds[where + 1]}, at index {where + 1}"
            )
        if bounds[-1] != total:
            raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but the input has {total} tokens")
        return cls(cu_seqlens, total, lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; of all where lengths are not known."""
        return self.total if self.lengths is None else max(self.lengths)

    def runs(self) -> list[tuple[int, int]]:
        """How many sequences of which length stand side by side; without empty ones."""
        assert self.lengths is not None
        return [(len(list(alike)), length) for length, alike in groupby(self.lengths) if length > 0]

    def indices(self) -> Tensor:
        """Which sequence each token is of, [total]."""
        position = torch.arange(self.total, device=self.cu_seqlens.device)
        return (position[:, None] >= self.cu_seqlens[1:]).sum(-1)

    def positions(self) -> Tensor:
        """Each token's number in its sequence, [1, total]."""
        position = torch.arange(self.total, device=self.cu_seqlens.device)
        return (position - self.cu_seqlens[self.indices()]).unsqueeze(0)

    def pairs(self, mask: Tensor | None) -> Tensor:
        """Which key each query attends to, [1, total, total]: the real ones of its own sequence."""
        index = self.indices()
        same = (index[:, None] == index[None, :]).unsqueeze(0)
        return same if mask is None else same & mask[:, None, :]

    def sums(self, x: Tensor) -> Tensor:
        """Sums over the tokens of each sequence: [1, total] to [B]."""
        zeros = torch.zeros(self.cu_seqlens.shape[0] - 1, dtype=x.dtype, device=x.device)
        return zeros.index_add(0, self.indices(), x[0])

    def apart(self, x: Tensor, gap: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`function` of the row x [1, total, E], with `gap` zeros between sequences while it runs."""
        place = torch.arange(self.total, device=x.device) + self.indices() * gap
        room = x.new_zeros(1, self.total + (self.cu_seqlens.shape[0] - 1) * gap, x.shape[-1])
        return function(room.index_copy(1, place, x)).index_select(1, place)


def split_runs(x: Tensor, runs: list[tuple[int, int]]) -> list[Tensor]:
    """A row, [1, H, total, D] or [1, total], as the batches of its runs, [B, H, L, D] or [B, L]."""
    axis = x.ndim // 2
    pieces = x[0].split([count * length for count, length in runs], axis - 1)
    return [
        piece.unflatten(axis - 1, run).transpose(0, axis - 1) for piece, run in zip(pieces, runs, strict=True)
    ]


@dataclass(frozen=True)
class Layout:
    """How the tokens of a forward pass lie: as the caller gave them, or, of a padded batch, in a row.

    Args:
        batch, length: of the caller's input.
        mask: boolean [B, L] or [B, L, L], of a row [1, total]; None where all is real.
        position_ids: [1 or B, L], of a row [1, total]; None for the default.
        sequences: those of a row; None of a padded batch.
        cells: which cell of the padded batch, counted through its rows, each token of the row is, [total];
            None where the caller gave the row, or nothing is packed.
        starts: where in the row each sequence begins, [B]; None of a padded batch.
    """

    batch: int
    length: int
    mask: Tensor | None
    position_ids: Tensor | None
    sequences: Sequences | None = None
    cells: Tensor | None = None
    starts: Tensor | None = None

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.sequences is None else self.sequences.cu_seqlens

    @property
    def attention_mask(self) -> Tensor | None:
        """The mask for the base model, which may not tell padding by the ids of a row known to have none."""
        if self.cells is None or self.mask is not None:
            return self.mask
        return torch.ones(1, self.cells.shape[0], dtype=torch.bool, device=self.cells.device)

    def row(self, x: Tensor | None) -> Tensor | None:
        """What the caller gave for each token, [B, L, ...], as tokens lie."""
        if x is None or self.cells is None:
            return x
        x = x.expand(self.batch, *x.shape[1:])
        return x.flatten(0, 1).index_select(0, self.cells).unsqueeze(0)

    def padded(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """What was computed for each token, as the caller's input lies: `fill` where there is padding."""
        if self.cells is None:
            return x
        if self.mask is not None:
            x = x.masked_fill(~self.mask.view(1, -1, *(1,) * (x.ndim - 2)), fill)
        cells = x.new_full((self.batch * self.length, *x.shape[2:]), fill)
        return cells.index_copy(0, self.cells, x[0]).view(self.batch, self.length, *x.shape[2:])

    def all_padded(self, states: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        return None if states is None else tuple(map(self.padded, states))

    def labels(self, labels: Tensor) -> Tensor:
        """One label for each token, [B, L] or of any shape with as many, as tokens lie."""
        return labels if self.cells is None else labels.reshape(-1).index_select(0, self.cells)

    def first(self, x: Tensor) -> Tensor:
        """States [B, L, E], or of a row [B, 1, E], of which the first token of each sequence stands first.

        Raises:
            ValueError: a sequence of the row is empty.
        """
        if self.starts is None or self.sequences is None:
            return x
        if self.sequences.lengths is not None and 0 in self.sequences.lengths:
            raise ValueError(
                "cu_seqlens has an empty sequence, of which there is no first token to classify by"
            )
        return x[0].index_select(0, self.starts).unsqueeze(1)


@dataclass(frozen=True)
class Needs:
    """What of a padded batch a model reads that packing would take away.

    Args:
        labels: one for each cell, [B, L]; those that are not `losses.IGNORE` count on padding too.
        first: whether it reads the first cell of each row.
        all: why it reads every cell, if it does.
    """

    labels: Tensor | None = None
    first: bool = False
    all: str | None = None


@dataclass(frozen=True)
class Row:
    """Where the tokens of a padded batch go.

    Args:
        cells: which cell of the batch each token of the row is, [total].
        cu_seqlens: sequences of one length stand side by side, [B + 1].
        starts: where in the row each sequence of the batch begins, [B].
        holes: whether there is padding between the tokens of a sequence, which stays.
    """

    cells: Tensor
    cu_seqlens: Tensor
    starts: Tensor
    holes: bool


def find_row(mask: Tensor, first: bool, counted: Sequence[Tensor], asked: bool) -> Row | str | None:
    """The row that a padded batch becomes; or what stands against it; or None where it is not worth it.

    A sequence is what lies between the first real token and the last one, so that all distances stay.
    This reads the mask's values.

    Args:
        mask: boolean [B, L].
        first: whether the first cell of each row must be real.
        counted: cells that must be real, boolean, [B, L] or of any shape with as many.
        asked: whether any padding is worth it.
    """
    (batch, length), device = mask.shape, mask.device
    start = mask.int().argmax(-1)
    end = torch.where(mask.any(-1), length - mask.flip(-1).int().argmax(-1), start)
    spans = list(zip(start.tolist(), end.tolist(), strict=True))
    lengths = [stop - begin for begin, stop in spans]
    total, size = sum(lengths), batch * length
    if total == size or not (asked or (size - total >= PADDING and total <= FULL * size)):
        return None
    if total == 0:
        return "there is no token at all"
    if first and not mask[:, 0].all():
        return "the first token of a row, which is classified by, is padding"
    if any((x & ~mask.reshape(x.shape)).any() for x in counted):
        return "there are labels, or mask tokens, on padding, and they count"
    order = sorted(range(batch), key=lengths.__getitem__)
    bounds = [0, *accumulate(lengths[b] for b in order)]
    begins = [begin for _, begin in sorted(zip(order, bounds, strict=False))]
    cells = [torch.arange(b * length + spans[b][0], b * length + spans[b][1]) for b in order]
    return Row(
        torch.cat(cells).to(device),
        torch.tensor(bounds, dtype=torch.int32, device=device),
        torch.tensor(begins, device=device),
        holes=total != int(mask.sum()),
    )


def has_hooks(model: nn.Module, but: Callable[..., object]) -> bool:
    """Whether tools watch a module of the model, which then are to see whole batches; other than by `but`."""
    return any(
        hook is not but
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        for hook in hooks.values()
    )
