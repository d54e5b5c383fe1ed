"""The report: tables in Markdown and plots from files of results."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

from .answers import beside_upstream, conditions_tables, exponents, in_place_tables
from .bench import cuda_set
from .cells import Cell
from .fit import GB, GPUS, PLANNED, largest_batch
from .memory import KINDS
from .running import NOT_MEASURED, Row
from .shapes import MODELS
from .tables import MIB, in_groups, order, over, put_block, table, taking_turns

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Told apart by the colour-blind too (Okabe and Ito); lines differ in marks and dashes, bars in hatching."""
MARKS, DASHES, HATCHES = "os^Dvx*", ("-", "--", "-.", ":"), ("", "//", "--", "xx", "\\\\", "||")
WAYS = {
    "plan": "planned for CUDA",
    "plan-cpu": "planned for a CPU",
    "cpu": "run on a CPU",
    "cuda": "run on CUDA",
}

INTRODUCTION = """\
# Memory and time beside other implementations

Written by `make bench-report` from [bench.json](../results/bench.json). `make bench` makes anew what takes
minutes, and compares; `bench-peers`, `bench-scaling` and `bench-fit` are the rest. "Planned" figures are of
whole steps on tensors without numbers: exact and repeatable, but without an allocator's gaps and CUDA's own
memory. Models have the published shapes and random weights. A peak holds everything: parameters, optimiser,
gradients and activations. Training is a step of AdamW in the dtype of the table; LoRA has rank 8 on queries
and values; QLoRA is LoRA over 4-bit weights with every layer recomputed, planned by a stand-in with the
layout of bitsandbytes. `outplace` takes the attention that its "auto" takes on that device. The floor is the
least that the mathematics needs.

Other projects are measured where they install beside this torch. Two do not: Microsoft's DeBERTa 0.1.12,
which needs the package `sklearn`, and esm-efficient, whose build needs flash-attn.

What it costs not to write in place is told in [docs/out-of-place.md](../../docs/out-of-place.md).
"""

GPU_SCRIPT = """\
On a machine with a GPU

```
for i in 1 2 3 4 5 6 7 8; do outplace bench all --device cuda --shard $i/8 --out cuda.json; done
```

measures them, and `outplace bench report benchmarks/results/bench.json cuda.json -o benchmarks/report` adds
them here.
"""


def write(
    found: list[dict[str, Any]], folder: Path, page: Path | None = None, front: Path | None = None
) -> None:
    """`README.md` and plots in the folder, which is made.

    Args:
        found: the contents of files of results; later rows take the place of earlier ones.
        page: a document with a block for what it costs not to write in place, which is written anew.
        front: one with a block for what a reader asks first.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("agg")
    # Text as text keeps the files small, and a fixed salt keeps what has not changed.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "outplace", "hatch.linewidth": 0.5})
    folder.mkdir(parents=True, exist_ok=True)
    rows = list({Cell.of(row): row for file in found for row in file["rows"]}.values())
    parts = [
        INTRODUCTION,
        environments(found),
        "## Peak memory\n",
        *memory_tables(rows),
        "## Memory against length\n",
        *length_plots(rows, folder, "memory", "peak", 1 / MIB, "peak memory, MiB"),
        "## How activations grow\n",
        *exponents(rows),
        "## What the peak is made of\n",
        *peak_parts(rows, folder),
        "## The largest batch\n",
        *fit_tables(rows, folder),
        "## Time\n",
        *speed_tables(rows),
        *length_plots(rows, folder, "speed", "seconds", 1.0, "seconds a step"),
        "## On a GPU\n",
        cuda_table(rows),
        *other_tables(found),
    ]
    (folder / "README.md").write_text("\n".join(parts).rstrip() + "\n")
    if page is not None:
        put_block(page, "\n".join(in_place_tables(rows) + conditions_tables(found)))
    if front is not None:
        put_block(front, "\n".join(beside_upstream(rows)))


def environments(found: list[dict[str, Any]]) -> str:
    """Where and when the rows were measured."""
    lines = []
    for file in found:
        rows = Counter(row["environment"] for row in file["rows"])
        for number, values in enumerate(file["environments"]):
            versions = ", ".join(f"{name} {value}" for name, value in values["versions"].items() if value)
            device = values["device"] or f"{values['cores']} cores, {values['threads']} threads, no GPU"
            commit = f"commit `{(values['commit'] or 'unknown')[:12]}`"
            if rows[number]:
                lines.append(f"- {rows[number]} cells: {values['date']}, {commit}, {versions}; {device}.")
    return "\n".join(["Measured:\n", *lines, ""])


def of_fits(row: Row) -> bool:
    """Whether a row is there for the largest batch."""
    return (
        row["device"] == "plan"
        and row["batch"] in PLANNED
        and row["model"] in MODELS
        and row["length"] == 512
    )


def memory_tables(rows: list[Row]) -> list[str]:
    """One table for each size and way, a line for each model and mode."""
    chosen = [row for row in rows if row["what"] == "memory" and row["device"] != "cuda"]
    kept = [row for row in chosen if row["batch"] not in PLANNED]
    parts = []
    for (device, dtype, batch, length), group in in_groups(kept, "device", "dtype", "batch", "length"):
        impls = sorted({row["impl"] for row in group}, key=order)
        lines = []
        for (model, mode), cells in in_groups(group, "model", "mode"):
            by_impl = {row["impl"]: row for row in cells}
            base = by_impl.get("transformers", {}).get("peak")
            floor = next((row["floor"] for row in cells if "floor" in row), None)
            figures = [_peak(by_impl.get(impl), base) for impl in impls]
            lines.append([model, mode, *figures, "" if floor is None else f"{floor / MIB:,.0f}"])
        parts.append(f"{WAYS[device]}, {dtype}, batch {batch}, {length:,} tokens; MiB (upstream's / this):\n")
        parts.append(table(["model", "mode", *impls, "floor"], lines, 2))
    reasons = sorted({(row["impl"], row["mode"], row["reason"]) for row in kept if "reason" in row})
    if reasons:
        parts.append("Why cells are empty:\n")
        parts += [f"- {impl}, {mode}: {reason}" for impl, mode, reason in reasons]
        parts.append("")
    return parts


def _peak(row: Row | None, base: int | None) -> str:
    if row is None or "peak" not in row:
        return "-"
    ratio = "" if base is None or row["impl"] == "transformers" else f" ({base / row['peak']:.2f})"
    return f"{row['peak'] / MIB:,.0f}{ratio}"


def length_plots(rows: list[Row], folder: Path, what: str, field: str, scale: float, label: str) -> list[str]:
    """Log-log, a line for each implementation, a plot for each model, way and mode with lengths to show."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    links = []
    chosen = [row for row in rows if row["what"] == what and field in row]
    for (model, mode, device, dtype, batch), group in in_groups(
        chosen, "model", "mode", "device", "dtype", "batch"
    ):
        if len({row["length"] for row in group}) < 3:
            continue
        figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
        for number, (impl, line) in enumerate(in_groups(group, "impl")):
            line = sorted(line, key=lambda row: row["length"])
            axes.plot(
                [row["length"] for row in line],
                [row[field] * scale for row in line],
                color=COLOURS[number % len(COLOURS)],
                marker=MARKS[number % len(MARKS)],
                linestyle=DASHES[number % len(DASHES)],
                label=impl[0],
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="tokens",
            ylabel=label,
            title=f"{model}, {mode}, batch {batch}, {dtype}",
        )
        lengths = sorted({row["length"] for row in group})
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
        links.append(
            _save(
                figure, folder, f"{what}-{model}-{mode}-{device}-{dtype}-{batch}", f"{label}, {WAYS[device]}"
            )
        )
    return links


def _save(figure: Any, folder: Path, name: str, caption: str) -> str:
    import matplotlib.pyplot as plt

    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    return f"![{caption}]({name}.svg)\n"


def peak_parts(rows: list[Row], folder: Path) -> list[str]:
    """Stacked bars of a training step's peak, and the modules that hold most of it."""
    import matplotlib.pyplot as plt

    parts = []
    chosen = [row for row in rows if row["what"] == "memory" and "parts" in row and row["mode"] == "train"]
    sizes = in_groups(chosen, "model", "device", "dtype", "batch", "length")
    # Of each model the largest step says most.
    largest = {
        (model, device): rest for (model, device, *rest), _ in sorted(sizes, key=lambda x: x[0][3] * x[0][4])
    }
    for (model, device, *rest), group in sizes:
        if largest[model, device] != rest or len(group) < 2 or device == "plan-cpu":
            continue
        figure, axes = plt.subplots(figsize=(6.4, 0.5 * len(group) + 1.6), layout="constrained")
        names = [row["impl"] for row in group]
        left = [0.0] * len(group)
        for number, kind in enumerate(KINDS):
            widths = [row["parts"].get(kind, 0) / MIB for row in group]
            style: dict[str, Any] = {
                "color": COLOURS[1:][number],
                "hatch": HATCHES[number],
                "edgecolor": "black",
            }
            axes.barh(names, widths, left=left, label=kind, **style)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        dtype, batch, length = rest
        axes.invert_yaxis()
        axes.set_xlabel("MiB at the peak")
        axes.set_title(f"{model}, train, {dtype}, batch {batch}, {length} tokens", fontsize="medium")
        axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.3))
        parts.append(_save(figure, folder, f"parts-{model}-{device}", f"Parts of the peak, {WAYS[device]}"))
        for row in group:
            top = ", ".join(f"`{name}` {size / MIB:,.0f}" for name, size in list(row["modules"].items())[:4])
            tensor = row["largest"][0]
            shape = " × ".join(map(str, tensor["shape"]))
            parts.append(
                f"- {row['impl']}: the peak is in {row['phase']}; most by module, MiB: {top}; "
                f"largest tensor: {tensor['kind']}, [{shape}] {tensor['dtype']} by `{tensor['operator']}`"
            )
        parts.append("")
    return parts


def fit_tables(rows: list[Row], folder: Path) -> list[str]:
    """The largest batch for each model and card, as tables, and as a heat map of ours over upstream's."""
    planned = [row for row in rows if of_fits(row) and "of phases" in row]
    parts = [
        f"Planned at batches {PLANNED[0]} and {PLANNED[1]}, forward and backward linear in the batch; "
        "a card of N GB is taken to have N · 10⁹ bytes for tensors. 0: not one fits.\n"
    ]
    for (mode, impl), group in in_groups(planned, "mode", "impl"):
        sizes = {name: {row["batch"]: row for row in cells} for (name,), cells in in_groups(group, "model")}
        batches = {
            name: [largest_batch(two, gpu * GB) for gpu in GPUS]
            for name in MODELS
            if len(two := sizes.get(name, {})) == len(PLANNED)
        }
        # Less than half of the published models would be what other plans happen to have left.
        if 2 * len(batches) < len(MODELS) and impl != "transformers-sdpa":
            continue
        parts.append(f"{impl}, {mode}, float32, 512 tokens:\n")
        head = ["model", *(f"{gpu} GB" for gpu in GPUS)]
        parts.append(table(head, ([name, *map(str, found)] for name, found in batches.items())))
        if impl == "outplace":
            parts.append(_heat_map(batches, folder, mode))
    return parts


def _heat_map(batches: dict[str, list[int]], folder: Path, mode: str) -> str:
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    figure, axes = plt.subplots(figsize=(6.4, 0.34 * len(batches) + 1.2), layout="constrained")
    values = [[max(batch, 0.5) for batch in found] for found in batches.values()]
    image = axes.imshow(values, cmap="cividis", norm=LogNorm(), aspect="auto")
    middle = max(map(max, values)) ** 0.5
    for (y, found), x in itertools.product(enumerate(batches.values()), range(len(GPUS))):
        colour = "black" if found[x] > middle else "white"
        axes.text(x, y, str(found[x]), ha="center", va="center", color=colour)
    axes.set_xticks(range(len(GPUS)), [f"{gpu} GB" for gpu in GPUS])
    axes.set_yticks(range(len(batches)), list(batches))
    axes.set(xlabel="memory of the GPU", title=f"largest batch, {mode}, 512 tokens, float32")
    figure.colorbar(image, label="sequences")
    return _save(figure, folder, f"fit-{mode}", f"Largest batch, {mode}")


def speed_tables(rows: list[Row]) -> list[str]:
    """Ratios to upstream of rounds in which the implementations took turns: the median, and the spread."""
    chosen = [row for row in rows if row["what"] == "speed" and row["device"] != "cuda"]
    if not chosen:
        return [f"{NOT_MEASURED}\n"]
    lines = []
    reasons = []
    fields = ("model", "mode", "device", "dtype", "batch", "length")
    for (model, mode, _, _, batch, length), group in taking_turns(chosen, *fields):
        base = next(
            (row["repeats"] for row in group if row["impl"] == "transformers" and "repeats" in row), None
        )
        for row in group:
            if "reason" in row:
                reasons.append(f"- {row['impl']}, {model}, {mode}: {row['reason']}")
            elif base is not None:
                middle, least, most = over(base, row["repeats"])
                floor = f"{row['seconds'] / row['floor']:.1f}"
                size = f"{batch} × {length}"
                lines.append(
                    [
                        model,
                        mode,
                        size,
                        row["impl"],
                        row["path"],
                        f"{middle:.2f}",
                        f"{least:.2f} to {most:.2f}",
                        floor,
                    ]
                )
    head = [
        "model",
        "mode",
        "size",
        "implementation",
        "attention",
        "upstream's time / this",
        "spread",
        "this / floor",
    ]
    text = (
        "On a CPU whose cores other work shared, so only ratios are given: of each round upstream's time "
        "over this one's, their median and their range. The floor is the multiply-adds of the matrix "
        "products at the rate of a large product, measured beside.\n"
    )
    return [text, table(head, lines, 5), *reasons, ""]


def cuda_table(rows: list[Row]) -> str:
    """What has been measured on a GPU, and what has not."""
    measured = [row for row in rows if row["device"] == "cuda" and row.get("reason") != NOT_MEASURED]
    done = {Cell.of(row) for row in measured}
    left = sum(cell not in done for cell in cuda_set())
    text = f"{left} of the {len(cuda_set())} cells for a GPU: {NOT_MEASURED}. {GPU_SCRIPT}"
    if not measured:
        return text
    lines = (
        [
            *(str(row[field]) for field in ("model", "mode", "impl", "dtype")),
            f"{row['batch']} × {row['length']}",
            f"{row['peak'] / MIB:,.0f} MiB" if "peak" in row else "",
            f"{1000 * row['seconds']:.1f} ms" if "seconds" in row else "",
            row.get("reason", ""),
        ]
        for row in sorted(measured, key=lambda row: (row["model"], row["mode"], row["dtype"], row["length"]))
    )
    head = ["model", "mode", "implementation", "dtype", "size", "peak allocated", "a step", "why not"]
    return text + "\n" + table(head, lines, 5)


def other_tables(found: list[dict[str, Any]]) -> list[str]:
    """Loading and tokenizing, where the results have them."""
    parts = []
    for file in found:
        for name, key, fields in (
            ("Loading", "load", ("files", "dtype", "library")),
            ("Tokenizing", "tokenizer", ("tokenizer", "texts")),
        ):
            if key not in file:
                continue
            figure = "peak / model" if key == "load" else "ours / upstream"
            lines = [
                [
                    *(row[field] for field in fields),
                    f"{row['peak'] / row['model'] if key == 'load' else row[figure]:.2f}",
                ]
                for row in file[key]["rows"]
            ]
            parts += [f"## {name}\n", table([*fields, figure], lines, len(fields))]
    return parts
