"""Replace parts of a text, and know where each character comes from."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

Edit = tuple[int, int, int, int]
"""Where a piece of the new text begins and ends, and the piece of the old one that it replaces."""


@dataclass(frozen=True)
class Rewritten:
    """A text after a rewriting, and where each of its characters comes from.

    Args:
        edits: from left to right.
        before: the rewriting that made the old text, if one did.
    """

    text: str
    edits: tuple[Edit, ...] = ()
    before: Rewritten | None = None

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where the original's characters are that became those from `start` to `end`."""
        first, last = self._source(start), self._source(max(start, end - 1))
        old = (first[0], first[0] if start == end else last[1])
        return old if self.before is None else self.before.span(*old)

    def _source(self, at: int) -> tuple[int, int]:
        # Of several edits that begin here the last one counts: those before it left nothing.
        number = bisect_right(self.edits, (at, sys.maxsize)) - 1
        if number < 0:
            return at, at + 1
        _, end, old_start, old_end = self.edits[number]
        if at < end:
            return old_start, old_end
        return old_end + at - end, old_end + at - end + 1


def rewrite(
    old: str | Rewritten,
    pattern: re.Pattern[str],
    replace: Callable[[str, int, int], tuple[int, int, str] | None],
) -> Rewritten:
    """Replace parts of a text, from left to right.

    Args:
        pattern: finds where a part may be.
        replace: of the text, such a place, and where the part before it ended: where this part begins and
            ends and what it becomes, or None where there is none.
    """
    if isinstance(old, str):
        old = Rewritten(old)
    text = old.text
    parts: list[str] = []
    edits: list[Edit] = []
    copied = length = free = 0
    found = pattern.search(text)
    while found:
        after = found.start() + 1
        made = replace(text, found.start(), free)
        if made is not None:
            begin, after, new = made
            free = after
            if new != text[begin:after]:
                length += begin - copied
                parts += [text[copied:begin], new]
                edits.append((length, length + len(new), begin, after))
                length += len(new)
                copied = after
        found = pattern.search(text, after)
    return Rewritten("".join([*parts, text[copied:]]), tuple(edits), old) if edits else old
