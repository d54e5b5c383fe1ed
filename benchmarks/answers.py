"""What the results say to the questions that this project began with, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .conditions import EMBEDDED, LINEARS
from .fit import PLANNED
from .running import NOT_MEASURED, Row
from .tables import MIB, Groups, in_groups, over, table, taking_turns

COMPARED = ("transformers-historic", "transformers", "outplace-in-place", "outplace-eager", "outplace")
"""The release that wrote in place and today's; ours with its lines and without; ours."""


def activations(row: Row) -> int:
    """Bytes at the peak of forward and backward that are no parameter's, nor its optimiser's or gradient's.

    A peak in backward holds the gradients made so far: of such a plan the forward pass is taken.
    """
    phase = "forward" if row["mode"] in ("infer", "train") else "backward"
    fixed = row["parts"]["parameters"] + row["parts"]["optimizer state"] + row["parts"]["inputs"]
    return int(row["of phases"][phase] - fixed)


def in_place_tables(rows: list[Row]) -> list[str]:
    """Peaks, activations and times of the releases that wrote in place, of today's, and of ours both ways."""
    planned = [
        row
        for row in rows
        if row["what"] == "memory"
        and row["device"] == "plan"
        and row["impl"] in COMPARED
        and in_question(row)
    ]
    lines = []
    fields = ("model", "mode", "batch", "length")
    for (model, mode, batch, length), group in in_groups(planned, *fields):
        by_impl = {row["impl"]: row for row in group if "peak" in row}
        if "transformers" not in by_impl or len(by_impl) < 4:
            continue
        figures = [
            f"{by_impl[impl]['peak'] / MIB:,.1f} / {activations(by_impl[impl]) / MIB:,.1f}"
            if impl in by_impl
            else "-"
            for impl in COMPARED
        ]
        lines.append([model, mode, f"{batch} × {length:,}", *figures])
    parts = [
        "Memory, planned for CUDA in float32, MiB: the peak / activations alone (where layers are "
        "recomputed, with gradients).\n",
        table(["model", "mode", "size", *COMPARED], lines, 3),
    ]
    return parts + in_place_times(rows)


def in_question(row: Row) -> bool:
    """Whether a row is of the lengths and modes that are shown."""
    alone = row["batch"] == 1 and row["length"] in (128, 512, 4096) and row["mode"] in ("infer", "train")
    return alone or (row["batch"] == 4 and row["length"] == 512 and row["mode"] == "train-checkpoint")


def in_place_times(rows: list[Row]) -> list[str]:
    """Time of each over that of the out-of-place lines, round by round."""
    head = "Time on a CPU, over that of `outplace-eager` in the same round, median (range):\n"
    lines = []
    timed = [row for row in rows if row["what"] == "speed" and row["device"] == "cpu" and "repeats" in row]
    for (model, mode, batch, length), group in taking_turns(timed, "model", "mode", "batch", "length"):
        by_impl = {row["impl"]: row["repeats"] for row in group}
        base = by_impl.get("outplace-eager")
        if base is None:
            continue
        figures = []
        for impl in COMPARED:
            if impl in by_impl:
                middle, least, most = over(by_impl[impl], base)
                figures.append(f"{middle:.2f} ({least:.2f}–{most:.2f})")
            else:
                figures.append("-")
        lines.append([model, mode, f"{batch} × {length:,}", *figures])
    return [head, table(["model", "mode", "size", *COMPARED], lines, 3) if lines else f"{NOT_MEASURED}\n"]


def beside_upstream(rows: list[Row]) -> list[str]:
    """The ratios that a reader asks for first: planned peaks, and times on a CPU, of what "auto" takes."""
    size = ("model", "mode", "batch", "length")
    asked = [row for row in rows if row["dtype"] == "float32" and row["mode"] in ("infer", "train")]
    planned = [
        row
        for row in asked
        if (row["what"], row["device"], row["batch"]) == ("memory", "plan", 1)
        and row["length"] in (512, 4096)
    ]
    timed = [row for row in asked if (row["what"], row["device"]) == ("speed", "cpu")]
    memory, times = [], []
    for names, upstream, ours in upstream_and_ours(in_groups(planned, *size)):
        whole, alone = upstream["peak"] / ours["peak"], activations(upstream) / activations(ours)
        peaks = [f"{row['peak'] / MIB:,.0f}" for row in (upstream, ours)]
        memory.append([*names, *peaks, f"{whole:.2f}", f"{alone:.2f}"])
    for names, upstream, ours in upstream_and_ours(taking_turns(timed, *size)):
        times.append([*names, *(f"{x:.2f}" for x in over(upstream["repeats"], ours["repeats"]))])
    return [
        "Peak memory of a whole step (AdamW in training), planned for CUDA in float32, upstream's fastest "
        "attention beside what `auto` takes:\n",
        table(
            ["model", "mode", "size", "upstream, MiB", "ours, MiB", "upstream / ours", "activations alone"],
            memory,
            3,
        ),
        "Time on two CPU cores, upstream's over ours in rounds in which they took turns:\n",
        table(["model", "mode", "size", "median", "least", "most"], times, 3)
        if times
        else f"{NOT_MEASURED}\n",
    ]


def upstream_and_ours(groups: Groups) -> Iterator[tuple[list[str], Row, Row]]:
    """Of each model, mode, batch and length where both have figures."""
    for (model, mode, batch, length), group in groups:
        by_impl = {row["impl"]: row for row in group if "reason" not in row}
        upstream = by_impl.get("transformers-sdpa", by_impl.get("transformers"))
        ours = by_impl.get("outplace")
        if upstream is not None and ours is not None:
            yield [model, mode, f"{batch} × {length:,}"], upstream, ours


def exponents(rows: list[Row]) -> list[str]:
    """The powers with which planned activations grow with the length, the batch and the model."""
    planned = [
        row for row in rows if row["device"] == "plan" and "parts" in row and row["dtype"] == "float32"
    ]
    lines = []
    for (model, mode, impl), group in in_groups(planned, "model", "mode", "impl"):
        if mode not in ("infer", "train"):
            continue
        by_length = {row["length"]: activations(row) for row in group if row["batch"] == 1}
        by_batch = {row["batch"]: activations(row) for row in group if row["length"] == 512}
        if len(by_length) > 2:
            whole, top = slope(by_length), slope(dict(sorted(by_length.items())[-2:]))
            batch = f"{slope(by_batch):.2f}" if len(by_batch) > 1 else "-"
            ends = f"{min(by_length):,} to {max(by_length):,}"
            lines.append([model, mode, impl, ends, f"{whole:.2f}", f"{top:.2f}", batch])
    by_family = []
    for (impl, mode, batch), group in in_groups(planned, "impl", "mode", "batch"):
        at_512 = [row for row in group if row["length"] == 512 and mode in ("infer", "train")]
        for name in ("deberta-v", "esm2"):
            by_size = {row["parameters"]: activations(row) for row in at_512 if row["model"].startswith(name)}
            if len(by_size) > 2 and batch == PLANNED[0]:
                ends = f"{min(by_size) / 1e6:,.0f} to {max(by_size) / 1e6:,.0f} million"
                by_family.append([f"{name}…", mode, impl, ends, f"{slope(by_size):.2f}"])
    return [
        "Activations are what the forward pass has allocated at its peak beside parameters and the "
        "optimiser's state. The exponent is the slope of their logarithm: 1 is in proportion, 2 with the "
        "square.\n",
        table(
            ["model", "mode", "implementation", "tokens", "with length", "last doubling", "with batch"],
            lines,
            4,
        ),
        f"With the number of parameters, batch {PLANNED[0]}, 512 tokens:\n",
        table(["models", "mode", "implementation", "parameters", "exponent"], by_family, 4),
    ]


def slope(points: dict[int, int]) -> float:
    """The exponent of a power law through points, by least squares of the logarithms."""
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)


def conditions_tables(found: list[dict[str, Any]]) -> list[str]:
    """When a line that wrote in place raises, and when it silently gives wrong gradients."""
    rows = [row for file in found for row in file.get("conditions", {"rows": ()})["rows"]]
    if not rows:
        return []
    verdicts: dict[tuple[str, ...], dict[str, str]] = {
        (row["line"], row["family"], row["embeddings"], row["linears"]): row["verdicts"] for row in rows
    }
    columns = {
        "nothing else": ("words", "plain"),
        EMBEDDED["leaf"]: ("leaf", "plain"),
        EMBEDDED["given"]: ("given", "plain"),
        LINEARS["views"]: ("words", "views"),
        LINEARS["nf4"]: ("words", "nf4"),
    }
    lines = []
    for line, family in dict.fromkeys((row["line"], row["family"]) for row in rows):
        cells = (verdicts[(line, family, *column)] for column in columns.values())
        lines.append([f"`{line}`", family, *map(summary, cells)])
    as_parts = 0
    for (line, family, embedded, linears), here in verdicts.items():
        parts = verdicts[line, family, embedded, "plain"], verdicts[line, family, "words", linears]
        as_parts += all(
            (verdict == "fine") == all(part[variant] == "fine" for part in parts)
            for variant, verdict in here.items()
        )
    errors = dict.fromkeys(v for here in verdicts.values() for v in here.values() if v.startswith("raises"))
    return [
        "When a historic line fails, by itself in our models: gradients of two steps compared with those of "
        f"the same steps out-of-place, in {len(rows[0]['verdicts'])} variants each: eval, and training with "
        "dropout 0 and 0.1, without checkpointing and with both kinds. What names no variant holds in all.\n",
        table(["line", "family", *columns], lines, len(columns) + 2),
        f"Of {len(verdicts)} combinations of line, embeddings and linears, {as_parts} fail exactly where "
        "their embeddings or their linears do alone. The errors:\n",
        *(f"- `{error.removeprefix('raises: ')}`" for error in errors),
    ]


def summary(verdicts: dict[str, str]) -> str:
    """The verdict of all variants, or which have which."""
    kinds = {variant: verdict.partition(":")[0] for variant, verdict in verdicts.items()}
    failing = sorted(set(kinds.values()) - {"fine"})
    if len(set(kinds.values())) == 1:
        return kinds.popitem()[1]
    parts = []
    for kind in failing:
        variants = [variant for variant, found in kinds.items() if found == kind]
        undropped = [variant for variant in kinds if "dropout 0.1" not in variant]
        parts.append(f"{kind} {'without dropout' if variants == undropped else 'in ' + '; '.join(variants)}")
    return ", ".join(parts)
