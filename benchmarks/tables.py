"""Rows of results in groups, and as tables in Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cells import IMPLEMENTATIONS
from .running import Row

MIB = 2**20
END = "<!-- until here -->"
Groups = list[tuple[tuple[Any, ...], list[Row]]]


def table(head: Iterable[str], rows: Iterable[Iterable[str]], text_columns: int = 1) -> str:
    head = list(head)
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows)) + "\n"


def order(impl: str) -> int:
    return IMPLEMENTATIONS.index(impl)


def in_groups(rows: Iterable[Row], *fields: str) -> Groups:
    """Rows that agree in fields, the implementations of each in their order."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[field] for field in fields)

    ordered = sorted(rows, key=lambda row: (*key(row), order(row["impl"])))
    return [(name, list(group)) for name, group in itertools.groupby(ordered, key)]


def taking_turns(rows: Iterable[Row], *fields: str) -> Groups:
    """`in_groups`, each of one run: only times that were taken in turns compare."""
    return [(name[:-1], group) for name, group in in_groups(rows, *fields, "run")]


def over(theirs: Iterable[float], ours: Iterable[float]) -> tuple[float, float, float]:
    """Their times over ours, round by round: the median, the least and the most."""
    found = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    return found[len(found) // 2], found[0], found[-1]


def put_block(page: Path, text: str, maker: str = "outplace bench report") -> None:
    """Put the text between the marks of a document that name what writes it.

    Raises:
        ValueError: it has no such marks.
    """
    mark = f"<!-- written by `{maker}` -->"
    before, begin, rest = page.read_text().partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no {mark} with {END} after it")
    page.write_text(f"{before}{mark}\n\n{text.strip()}\n\n{END}{after}")
