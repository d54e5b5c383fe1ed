"""Cells in processes of their own, and the file of results they end in."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from .cells import Cell, size_of
from .peers import PACKAGES, interpreter

NOT_MEASURED = "not yet measured"
TOGETHER = 6
"""Planned cells in one process, which would otherwise take as long to start as to plan."""
Row = dict[str, Any]


class Results:
    """The file of results: what is in it is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"rows": []}
        if path.exists():
            self.found = json.loads(path.read_text())
        self.found["environment"] = environment()

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.found["rows"]
        return rows

    def lacks(self, cell: Cell) -> bool:
        """Whether the cell is still to be measured."""
        known = (row for row in self.rows if Cell.of(row) == cell)
        return all(row.get("reason") == NOT_MEASURED for row in known)

    def add(self, cell: Cell, figures: Row) -> None:
        """Put a row in the place of an older one, and write the file whole."""
        kept = [row for row in self.rows if Cell.of(row) != cell]
        self.found["rows"] = [*kept, {**asdict(cell), **figures}]
        self.save()

    def save(self) -> None:
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text(json.dumps(self.found, indent=1) + "\n")
        scratch.replace(self.path)


def environment() -> dict[str, Any]:
    """What the figures depend on, less the figures' own fields."""
    import torch

    versions: dict[str, str | None] = {}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    gpu = torch.cuda.is_available()
    return {
        "versions": versions,
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if gpu
        else None,
    }


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Progress:
    """A line on standard error: how many of all, and how long the rest takes at this rate."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, time.monotonic()

    def step(self, label: str) -> None:
        self.done += 1
        left = (time.monotonic() - self.started) / self.done * (self.total - self.done)
        width = 24 * self.done // self.total
        bar = (
            f"[{'#' * width:<24}] {self.done}/{self.total}, {left // 60:.0f}:{left % 60:02.0f} left  {label}"
        )
        end = "\r" if sys.stderr.isatty() and self.done < self.total else "\n"
        print(f"{bar:<110.110}", end=end, file=sys.stderr, flush=True)


class Runner:
    """Starts cells.

    Args:
        folder: where upstream's checkpoints and the outputs to compare with are.
        peers: where the environments of other implementations are, or are made.
        limit: seconds a process may take.
    """

    def __init__(
        self, folder: Path, peers: Path, limit: float = 600.0, snapshots: Path | None = None
    ) -> None:
        self.folder, self.peers, self.limit, self.snapshots = folder, peers, limit, snapshots

    def run(self, *cells: Cell) -> list[Row]:
        """The figures of cells of one implementation and device, or the reasons why they have none.

        One process takes all; one that dies is not the end of the cells after it.
        """
        first = cells[0]
        if first.impl in PACKAGES and first.device.startswith("plan"):
            return [{"reason": "only outplace and transformers are planned"}] * len(cells)
        try:
            python = interpreter(first, self.peers)
            arguments = []
            if not first.device.startswith("plan"):
                arguments += ["--folder", str(self.checkpoint(first))]
            if self.snapshots is not None and first.device == "cuda" and first.what == "memory":
                name = "-".join(map(str, first.key)) + ".pickle"
                arguments += ["--snapshot", str(self.snapshots / name)]
        except subprocess.CalledProcessError as error:
            return [{"reason": f"could not be made ready: {_last_line(error.stderr)}"}] * len(cells)
        rows: list[Row] = []
        while len(rows) < len(cells):
            rows += self._children(python, cells[len(rows) :], *arguments)
        return rows

    def checkpoint(self, cell: Cell) -> Path:
        """Upstream's checkpoint of the cell's model, written where it is not there yet."""
        home = self.folder / cell.model
        if not (home / "reference.safetensors").exists():
            home.mkdir(parents=True, exist_ok=True)
            finished = self._process(
                Path(sys.executable), [cell], "--write-checkpoint", "--folder", str(home)
            )
            finished.check_returncode()
        return home

    def _process(
        self, python: Path, cells: Sequence[Cell], *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        given = json.dumps([asdict(cell) for cell in cells])
        command = [str(python), "-m", f"{__package__}.measure", given, *arguments]
        # The folder it is started in is not searched: a checkout's outplace/ is less than the package.
        surroundings = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore"}
        if python != Path(sys.executable):
            surroundings.pop("PYTHONPATH", None)
        limit = self.limit * len(cells)
        return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=surroundings)

    def _children(self, python: Path, cells: Sequence[Cell], *arguments: str) -> list[Row]:
        """Rows up to the first that ends its process, at least one."""
        try:
            finished = self._process(python, cells, *arguments)
            written = finished.stdout
        except subprocess.TimeoutExpired as error:
            finished = None
            written = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        rows: list[Row] = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
        if len(rows) == len(cells):
            return rows
        if finished is None:
            why = f"took more than {self.limit:.0f} s"
        elif finished.returncode < 0:
            cause = "probably out of memory" if finished.returncode == -9 else "it crashed"
            why = f"killed by signal {-finished.returncode}: {cause}"
        else:
            why = _last_line(finished.stderr)
        return [*rows, {"reason": why}]


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else "no message"


def measure(cells: list[Cell], results: Results, runner: Runner, repeats: int) -> None:
    """Measure what the results lack. Planned cells run side by side, the others one at a time; where
    time is measured, implementations of one size take turns."""
    cells = [cell for cell in cells if results.lacks(cell)]
    if not cells:
        return
    progress = Progress(len(cells))

    def record(cell: Cell, figures: Row) -> None:
        results.add(cell, figures)
        progress.step(" ".join(map(str, cell.key)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(together([cell for cell in cells if cell.device.startswith("plan")]))
        for part, rows in zip(parts, pool.map(lambda part: runner.run(*part), parts), strict=True):
            for cell, figures in zip(part, rows, strict=True):
                record(cell, figures)
    for _, found in itertools.groupby((c for c in cells if not c.device.startswith("plan")), size_of):
        group = list(found)
        if group[0].what == "memory":
            for cell in group:
                record(cell, *runner.run(cell))
            continue
        for cell, figures in zip(group, turns(group, lambda cell: runner.run(cell)[0], repeats), strict=True):
            record(cell, figures)


def together(cells: list[Cell]) -> Iterator[list[Cell]]:
    """The cells of each implementation of a model, few enough that little is lost when one is stopped."""

    def key(cell: Cell) -> tuple[str, str]:
        return cell.model, cell.impl

    for _, group in itertools.groupby(sorted(cells, key=key), key):
        same = list(group)
        for start in range(0, len(same), TOGETHER):
            yield same[start : start + TOGETHER]


def turns(group: list[Cell], run: Callable[[Cell], Row], repeats: int) -> list[Row]:
    """Each cell's seconds of all rounds and their median; one that fails is not tried again."""
    rows: list[Row] = [{} for _ in group]
    seconds: list[list[float]] = [[] for _ in group]
    for _ in range(repeats):
        for index, cell in enumerate(group):
            if "reason" in rows[index]:
                continue
            rows[index] = run(cell)
            if "seconds" in rows[index]:
                seconds[index].append(rows[index]["seconds"])
    return [
        row if "reason" in row else {**row, "seconds": median(times), "repeats": times}
        for row, times in zip(rows, seconds, strict=True)
    ]


@contextmanager
def scratch_folder(given: Path | None) -> Iterator[Path]:
    """The folder given, or one for the time being."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
