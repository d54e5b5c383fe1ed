"""Cells in processes of their own, and the file of results they end in."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from .cells import Cell, size_of
from .peers import PACKAGES, interpreter, packages_of

NOT_MEASURED = "not yet measured"
TOGETHER = 24
"""Planned cells in one process at most, which would otherwise take as long to start as to plan."""
FOLDERS = re.compile(r"""(?<![\w./:])/(?:[^\s/'"()]+/)+""")
"""The folders of an absolute path, which say nothing on another machine."""
Row = dict[str, Any]


class Results:
    """The file of results: what is in it is not measured again.

    Each row says by number in which of the file's `environments` it was measured.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"environments": [], "rows": []}
        if path.exists():
            self.found = json.loads(path.read_text())

    @cached_property
    def here(self) -> int:
        """The number of this environment, which is added where the file has none like it."""
        known, this = self.found["environments"], environment()
        if this not in known:
            known.append(this)
        return int(known.index(this))

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
        if "reason" in figures:
            figures = figures | {"reason": FOLDERS.sub("", figures["reason"])}
        row = {**asdict(cell), "environment": self.here, **figures}
        self.found["rows"] = sorted([*kept, row], key=lambda row: Cell.of(row).key)
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text(json.dumps(self.found, indent=1) + "\n")
        scratch.replace(self.path)


def environment() -> dict[str, Any]:
    """What the figures depend on, less the figures' own fields; and the day (UTC)."""
    import torch

    versions: dict[str, str | None] = {}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).date().isoformat(),
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


class NotReady(Exception):
    """A cell's process cannot be started; the message says why."""


class Child:
    """A process that measures cells and writes a row of each; a context, which ends it.

    Args:
        limit: seconds it may take for a row.
    """

    def __init__(self, command: Sequence[str], surroundings: dict[str, str], limit: float) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._limit = limit
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=surroundings,
        )
        self.ended = self._stopped = False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _stop(self) -> None:
        self._stopped = True
        self._process.kill()

    def row(self) -> Row:
        """The next row, or why the process ended before it."""
        assert self._process.stdout is not None
        timer = threading.Timer(self._limit, self._stop)
        timer.start()
        for line in self._process.stdout:
            if line.startswith("{"):
                timer.cancel()
                return dict(json.loads(line))
        timer.cancel()
        self.ended = True
        code = self._process.wait()
        if self._stopped:
            return {"reason": f"took more than {self._limit:.0f} s"}
        if code < 0:
            cause = "probably out of memory" if code == -9 else "it crashed"
            return {"reason": f"killed by signal {-code}: {cause}"}
        self._errors.seek(0)
        return {"reason": _last_line(self._errors.read())}

    def turn(self) -> Row:
        """Let it measure the time of a step: a row with its seconds, or why there is none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the row says why
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self.row()


class Runner:
    """Starts cells.

    Args:
        folder: where upstream's checkpoints and the outputs to compare with are.
        peers: where the environments of other implementations are, or are made.
        limit: seconds a process may take for a cell.
    """

    def __init__(
        self, folder: Path, peers: Path, limit: float = 600.0, snapshots: Path | None = None
    ) -> None:
        self.folder, self.peers, self.limit, self.snapshots = folder, peers, limit, snapshots

    def start(self, cells: Sequence[Cell]) -> Child:
        """A process for cells of one environment and device.

        Raises:
            NotReady: what it needs cannot be made.
        """
        first = cells[0]
        if first.impl in PACKAGES and first.device.startswith("plan"):
            raise NotReady("only outplace and transformers are planned")
        try:
            python = interpreter(first, self.peers)
            arguments = []
            if not first.device.startswith("plan"):
                arguments += ["--folder", str(self.checkpoint(first))]
        except subprocess.CalledProcessError as error:
            raise NotReady(f"could not be made ready: {_last_line(error.stderr)}") from None
        if self.snapshots is not None and first.device == "cuda" and first.what == "memory":
            name = "-".join(map(str, first.key)) + ".pickle"
            arguments += ["--snapshot", str(self.snapshots / name)]
        surroundings = _surroundings()
        if python != Path(sys.executable):
            surroundings.pop("PYTHONPATH", None)
        return Child(_command(python, cells, *arguments), surroundings, self.limit)

    def run(self, *cells: Cell) -> Iterator[Row]:
        """The figures of each cell, or the reason why it has none.

        One process takes all; one that dies is not the end of the cells after it.
        """
        left = list(cells)
        while left:
            try:
                child = self.start(left)
            except NotReady as error:
                yield from ({"reason": str(error)} for _ in left)
                return
            with child:
                while left and not child.ended:
                    yield child.row()
                    del left[0]

    def checkpoint(self, cell: Cell) -> Path:
        """Upstream's checkpoint of the cell's model, written where it is not there yet."""
        home = self.folder / cell.model
        if not (home / "reference.safetensors").exists():
            home.mkdir(parents=True, exist_ok=True)
            command = _command(Path(sys.executable), [cell], "--write-checkpoint", "--folder", str(home))
            subprocess.run(command, check=True, capture_output=True, text=True, env=_surroundings())
        return home


def _command(python: Path, cells: Sequence[Cell], *arguments: str) -> list[str]:
    given = json.dumps([asdict(cell) for cell in cells])
    return [str(python), "-m", f"{__package__}.measure", given, *arguments]


def _surroundings() -> dict[str, str]:
    # The folder it is started in is not searched: a checkout's outplace/ is less than the package.
    return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore"}


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else "no message"


def measure(cells: list[Cell], results: Results, runner: Runner, repeats: int) -> None:
    """Measure what the results lack. Planned cells run side by side, the others one at a time.

    Where time is measured, implementations of one size take turns, and since only turns of one run compare,
    all of them are measured again where one is lacking. Their rows have the time of that run's start.
    """
    lacking = {cell for cell in cells if results.lacks(cell)}
    sizes = {size_of(cell) for cell in lacking if cell.what == "speed"}
    cells = [cell for cell in cells if cell in lacking or size_of(cell) in sizes]
    if not cells:
        return
    progress = Progress(len(cells))
    one_at_a_time = threading.Lock()

    def record(cell: Cell, figures: Row) -> None:
        with one_at_a_time:
            results.add(cell, figures)
            progress.step(" ".join(map(str, cell.key)))

    def run(part: Sequence[Cell]) -> None:
        for cell, figures in zip(part, runner.run(*part), strict=True):
            record(cell, figures)

    with ThreadPoolExecutor(os.cpu_count()) as pool, ThreadPoolExecutor(1) as maker:
        # Environments are made meanwhile; where one cannot be, its cells say so.
        for cell in {packages_of(cell): cell for cell in cells}.values():
            maker.submit(interpreter, cell, runner.peers)
        for done in [pool.submit(run, part) for part in together(cells)]:
            done.result()
    for _, found in itertools.groupby((c for c in cells if not c.device.startswith("plan")), size_of):
        group = list(found)
        if group[0].what == "speed":
            run_of = {"run": datetime.now(UTC).isoformat(timespec="seconds")}
            for cell, figures in zip(group, turns(group, runner, repeats), strict=True):
                record(cell, run_of | figures)
        else:
            for cell in group:
                run([cell])


def together(cells: Iterable[Cell]) -> Iterator[list[Cell]]:
    """The planned cells of each environment, some in a process; first of this one, which is there."""
    planned = sorted((cell for cell in cells if cell.device.startswith("plan")), key=packages_of)
    for _, group in itertools.groupby(planned, packages_of):
        same = list(group)
        for start in range(0, len(same), TOGETHER):
            yield same[start : start + TOGETHER]


def turns(group: Sequence[Cell], runner: Runner, repeats: int) -> list[Row]:
    """Each cell's seconds of all rounds and their median; one that fails is not tried again.

    Each has a process, which waits while another has its turn.
    """
    rows: list[Row] = [{} for _ in group]
    seconds: list[list[float]] = [[] for _ in group]
    with ExitStack() as stack:
        children: dict[int, Child] = {}
        for index, cell in enumerate(group):
            try:
                children[index] = stack.enter_context(runner.start([cell]))
            except NotReady as error:
                rows[index] = {"reason": str(error)}
        # They get ready side by side, and none is timed before all are.
        for index, child in children.items():
            rows[index] = child.row()
        for _ in range(repeats):
            for index, child in children.items():
                if "reason" in rows[index]:
                    continue
                found = child.turn()
                rows[index] = found if "reason" in found else rows[index] | found
                seconds[index] += [found["seconds"]] if "seconds" in found else []
    for index, cell in enumerate(group):
        if "reason" not in rows[index]:
            rows[index] |= {"seconds": median(seconds[index]), "repeats": seconds[index]}
        elif "out of memory" in rows[index]["reason"] and len(group) > 1:
            # It may be the others' memory that it lacked.
            (rows[index],) = turns([cell], runner, repeats)
    return rows


@contextmanager
def scratch_folder(given: Path | None) -> Iterator[Path]:
    """The folder given, or one for the time being."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
