"""Whether figures made anew are those of another file of results."""

from __future__ import annotations

from typing import Any

from .cells import Cell
from .running import Row
from .tables import over, table, taking_turns

SIZE = ("model", "mode", "device", "dtype", "batch", "length")
ANYWHERE = {"environment": None}


def compare(new: dict[str, Any], old: dict[str, Any]) -> tuple[str, bool]:
    """What two files of results say of the same cells, and whether all plans are the same.

    A plan does not depend on the machine, so it is to be the same to the byte. Of time the ratio to upstream
    is compared: the median of the new rounds with the range of the old ones.
    """
    before = {Cell.of(row): row for row in old["rows"]}
    pairs = [(row, before[Cell.of(row)]) for row in new["rows"] if Cell.of(row) in before]
    planned = [(row, known) for row, known in pairs if row["device"].startswith("plan")]
    differ = [row for row, known in planned if row | ANYWHERE != known | ANYWHERE]
    lines = [f"{len(planned) - len(differ)} of {len(planned)} plans are the same.\n"]
    lines += [f"- not the same: {' '.join(map(str, Cell.of(row).key))}" for row in differ]
    live = [
        row["peak"] / known["peak"]
        for row, known in pairs
        if row["device"] == "cpu" and "peak" in row and "peak" in known
    ]
    if live:
        apart = max(abs(ratio - 1) for ratio in live)
        lines.append(f"Peaks of {len(live)} runs on a CPU are within {apart:.1%} of the others.\n")
    rows = _ratios([row for row, _ in pairs], [known for _, known in pairs])
    if rows:
        lines.append("Upstream's time over each one's, the median here beside that and the range there:\n")
        lines.append(table(["model", "mode", "size", "implementation", "here", "there", "range"], rows, 4))
    return "\n".join(lines), not differ


def _ratios(new: list[Row], old: list[Row]) -> list[list[str]]:
    there = {(*size, impl): found for size, impl, found in _over_upstream(old)}
    lines = []
    for size, impl, (here, _, _) in _over_upstream(new):
        if (*size, impl) in there:
            model, mode, _, _, batch, length = size
            middle, least, most = there[(*size, impl)]
            figures = [f"{here:.2f}", f"{middle:.2f}", f"{least:.2f} to {most:.2f}"]
            lines.append([model, mode, f"{batch} × {length:,}", impl, *figures])
    return lines


def _over_upstream(rows: list[Row]) -> list[tuple[tuple[Any, ...], str, tuple[float, float, float]]]:
    timed = [row for row in rows if "repeats" in row]
    found = []
    for size, group in taking_turns(timed, *SIZE):
        by_impl = {row["impl"]: row["repeats"] for row in group}
        base = by_impl.pop("transformers", None)
        if base is not None:
            found += [(size, impl, over(base, times)) for impl, times in by_impl.items()]
    return found
