"""What other people's tools do with upstream's classes, ours, and upstream's on our blocks, as a table.

    python -m benchmarks.compat [--only NAME ...] [--markdown FILE] [--json FILE] [--envs FOLDER | --no-envs]

Each probe of `probes.py` runs in a process of its own, once for each family and package, and each program of
`programs.py`. The exit status is 1 where one of ours fails that is not known to, or where upstream's class
works and does not on our blocks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from .environments import ROOT, environment, first_line
from .probes import DEBERTAS, FAMILIES, PROBES, UNDER
from .programs import PROGRAMS
from .tables import put_block

LIMIT = 180
"""Seconds that a probe may take."""
NAMES = {"Deberta": "DeBERTa", "DebertaV2": "DeBERTa-V2", "Esm": "ESM-2"}
ADAPTERS = ("adapters==1.3.0",)
TOOLS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sentence_transformer": ("Sentence Transformers", "sentence-transformers", ()),
    "cross_encoder": ("Sentence Transformers", "sentence-transformers", ()),
    "torchao": ("torchao", "torchao", ()),
    "gliner": ("GLiNER", "gliner", ("gliner==0.2.29", "transformers==5.16.1")),
    "setfit": ("SetFit", "setfit", ("setfit==1.2.0", "transformers==5.24.0")),
    "adapters": ("Adapters", "adapters", ADAPTERS),
}
"""By program: its tool, distribution and, where it needs an environment of its own, what that holds."""
OWN = {tool: packages for tool, _, packages in TOOLS.values() if packages}
METHODS = {
    "seq_bn": "bottleneck adapters",
    "lora": "LoRA",
    "loreft": "LoReFT",
    "seq_bn_inv": "invertible adapters",
}
KNOWN = {"private_training": DEBERTAS}
"""Probes that the tool itself rules out for models like ours; docs/compatibility.md says why."""


@dataclass(frozen=True)
class Case:
    """One row's worth of work: `run(package)` says "works", "-" or the first line of the error."""

    tool: str
    version: str
    name: str
    what: str
    family: str
    run: Callable[[str], str]


@dataclass(frozen=True)
class Outcome:
    tool: str
    version: str
    name: str
    what: str
    family: str
    upstream: str
    ours: str
    under: str


def _in_child(index: int, package: str, family: str, answer: Connection) -> None:
    # Errors are reported by the parent; what tools print on the way is of no use here.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import torch

    torch.set_num_threads(1)
    try:
        PROBES[index].run(package, family)
        answer.send("works")
    except BaseException:
        answer.send(first_line(traceback.format_exc()))


def probed(index: int, package: str, family: str) -> str:
    """The outcome of a probe in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "benchmarks.probes"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(index, package, family, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LIMIT) else f"still running after {LIMIT} s"
    except EOFError:
        process.join()
        return f"the process ended with status {process.exitcode}"
    finally:
        process.join(10)  # a probe that has answered ends by itself
        process.terminate()
        process.join()


def with_adapters(home: Path, package: str, family: str, method: str) -> str:
    """The outcome of a method of the Adapters library, in an environment that it allows."""
    python = environment(home, ADAPTERS, with_project=True)
    script = Path(__file__).parent / "regressions" / "adapters_library.py"
    finished = subprocess.run([python, script, package, family, method], capture_output=True, text=True)
    return first_line(finished.stderr) if finished.returncode else "works"


def programmed(home: Path | None, name: str, family: str, package: str) -> str:
    """Run a program of `programs.py` plainly, or under `install()` too with the same numbers."""
    if package == "outplace":
        return "-"
    python = Path(sys.executable) if home is None else environment(home, TOOLS[name][2], with_project=True)
    options = [] if package == UNDER else ["--plain"]
    command = [python, "-m", "outplace.benchmarks.programs", name, family, *options]
    finished = subprocess.run(command, capture_output=True, text=True)
    return first_line(finished.stderr) if finished.returncode else "works"


def cases(envs: Path) -> list[Case]:
    found = []
    for index, probe in enumerate(PROBES):
        version = importlib.metadata.version(probe.distribution).partition("+")[0]
        for family in probe.families:

            def run(package: str, index: int = index, family: str = family) -> str:
                return probed(index, package, family)

            found.append(Case(probe.tool, version, probe.name, probe.what, family, run))
    home = envs / ADAPTERS[0].replace("==", "-")
    for method, title in METHODS.items():
        for family in FAMILIES:

            def run_adapters(package: str, family: str = family, method: str = method) -> str:
                return with_adapters(home, package, family, method)

            what = f"{title} by the plug-in interface, with checkpointing (transformers 4.57)"
            version = ADAPTERS[0].partition("==")[2]
            found.append(Case("Adapters", version, f"adapters_{method}", what, family, run_adapters))
    for name, (families, program) in PROGRAMS.items():
        tool, distribution, packages = TOOLS.get(name, ("transformers", "transformers", ()))
        pinned = packages[0].partition("==")[2] if packages else ""
        version = pinned or importlib.metadata.version(distribution).partition("+")[0]
        what = f"program: {' '.join((program.__doc__ or name).split()).rstrip('.')}"
        own = envs / packages[0].replace("==", "-") if packages else None
        for family in families:

            def run_program(
                package: str, family: str = family, name: str = name, own: Path | None = own
            ) -> str:
                return programmed(own, name, family, package)

            found.append(Case(tool, version, f"program_{name}", what, family, run_program))
    return found


def outcome(case: Case) -> Outcome:
    start = time.perf_counter()
    outcomes = [case.run(package) for package in ("transformers", "outplace", UNDER)]
    seconds = time.perf_counter() - start
    print(f"{seconds:6.1f} s  {case.name} {case.family}: {' | '.join(outcomes)}", file=sys.stderr, flush=True)
    return Outcome(case.tool, case.version, case.name, case.what, case.family, *outcomes)


def table(outcomes: list[Outcome]) -> str:
    """A Markdown table; families of the same outcome share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for x in outcomes:
        cells = (x.tool, x.version, x.what, cell(x.upstream), cell(x.ours), cell(x.under))
        rows.setdefault(cells, []).append(NAMES[x.family])
    lines = [
        "| tool | version | what | family | upstream | our classes | upstream's on our blocks |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (tool, version, what, *outcomes), names in rows.items():
        family = "all" if len(names) == len(FAMILIES) else ", ".join(names)
        lines.append(f"| {' | '.join((tool, version, what, family, *outcomes))} |")
    return "\n".join(lines) + "\n"


def cell(outcome: str) -> str:
    return (
        outcome
        if outcome in ("works", "-")
        else "fails: `" + outcome.replace("|", "\\|").replace("`", "'") + "`"
    )


def fails(outcome: str) -> bool:
    return outcome not in ("works", "-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="beginnings of probes' names")
    parser.add_argument("--markdown", type=Path, help="put the table between the lines there that ask for it")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "regressions")
    parser.add_argument("--no-envs", action="store_true", help="without what needs an environment of its own")
    options = parser.parse_args()
    chosen = [c for c in cases(options.envs) if not options.only or c.name.startswith(tuple(options.only))]
    if options.no_envs:
        chosen = [case for case in chosen if case.tool not in OWN]
    for packages in {OWN[case.tool] for case in chosen if case.tool in OWN}:
        environment(options.envs / packages[0].replace("==", "-"), packages, with_project=True)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(outcome, chosen))
    found = table(outcomes)
    print(found)
    if options.json:
        options.json.write_text(json.dumps([vars(x) for x in outcomes], indent=2) + "\n")
    if options.markdown:
        put_block(options.markdown, found, "make compat")
    bad = [x for x in outcomes if fails(x.ours) and x.family not in KNOWN.get(x.name, ())]
    worse = [x for x in outcomes if fails(x.under) and not fails(x.upstream)]
    return 1 if bad or worse else 0


if __name__ == "__main__":
    sys.exit(main())
