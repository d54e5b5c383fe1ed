"""Which row of the relative position table each distance between a query and a key reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 64
"""Keys in a tile: position is looked up, or found to be alike, by whole tiles."""


@dataclass(frozen=True)
class SlotTable:
    """The slot of each distance that a sequence has: 2L - 1 numbers, where a matrix of pairs has L².

    Args:
        by_distance: [2L - 1] integers, the slots of the distances 1 - L to L - 1 in ascending order,
            counted from `first`.
        first, rows: which rows of the position table are in use: `rows` of them, from `first` on.
        low, high: the distances before `low`, and those from `high` on, counted as `by_distance` is,
            have each one slot for all.
    """

    by_distance: Tensor
    first: int
    rows: int
    low: int
    high: int

    @classmethod
    def of(cls, by_distance: Tensor, table_rows: int, narrow: bool = True) -> SlotTable:
        """The table of slots that are given for each distance, ascending, of a position table's `table_rows`.

        Args:
            narrow: whether rows that no distance reads are left out. That looks at the values, so it
                cannot be traced.
        """
        if not narrow:
            return cls(by_distance, 0, table_rows, 0, by_distance.shape[0])
        slots: list[int] = by_distance.tolist()
        first, last = slots[0], slots[-1]
        return cls(
            by_distance - first,
            first,
            last - first + 1,
            bisect_right(slots, first),
            bisect_left(slots, last),
        )

    @classmethod
    def of_one(cls, length: int, device: torch.device) -> SlotTable:
        """A table in which all distances have one slot: attention without positions."""
        distances = 2 * length - 1
        return cls(torch.zeros(distances, dtype=torch.long, device=device), 0, 1, distances, distances)

    def whole(self, table_rows: int) -> SlotTable:
        """The same, of all rows of the position table."""
        return SlotTable(self.by_distance + self.first, 0, table_rows, 0, self.by_distance.shape[0])

    def shorter(self, length: int) -> SlotTable:
        """The same of a shorter sequence, a view of this one; its `first` row counts from this one's."""
        cut = self.length - length
        return SlotTable.of(self.by_distance[cut : self.by_distance.shape[0] - cut], self.rows)

    @property
    def length(self) -> int:
        """L."""
        return (self.by_distance.shape[0] + 1) // 2

    def pairs(self) -> Tensor:
        """The slot of query i and key j, [L, L]."""
        position = torch.arange(self.length, device=self.by_distance.device)
        return self.by_distance[position[:, None] - position[None, :] + self.length - 1]

    @cached_property
    def padded(self) -> Tensor:
        """`by_distance` with room for a last tile that goes beyond the first key."""
        return torch.cat((self.by_distance, self.by_distance[-1:].expand(TILE - 1)))

    def block(self, first_query: int, queries: int, first_key: int, keys: int) -> Tensor:
        """The slots of a block of pairs, [queries, keys], keys counted from the last one backwards.

        Going back one key adds as much to the distance as going on one query: the block is a view of
        the table in which rows overlap, and takes no memory.
        """
        return self.padded.as_strided((queries, keys), (1, 1), first_query + first_key)

    def windows(self, first_query: int, queries: int, first_key: int, tiles: int) -> Tensor:
        """The slots of all distances between the queries and each tile of keys, [tiles, queries + TILE - 1].

        The pair of query i and key j of a tile has number i + j of its window. A view, like `block`.
        """
        return self.padded.as_strided((tiles, queries + TILE - 1), (TILE, 1), first_query + first_key)

    def alike(self, first_query: int, queries: int) -> tuple[int, int]:
        """Which keys have one slot with all of these queries, keys counted backwards.

        Returns:
            a and b: the keys before a read the first slot, those from b on the last one. Both are at the
            edge of a tile, or b at the end.
        """
        length = self.length
        a = min(max(self.low - (first_query + queries - 1), 0), length) // TILE * TILE
        b = -(-max(self.high - first_query, a) // TILE) * TILE
        return a, min(b, length)
