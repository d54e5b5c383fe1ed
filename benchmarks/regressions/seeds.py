"""The two reports this project began with: each fails in the release it was made about, and not here.

    python -m benchmarks.regressions.seeds [--envs FOLDER] [--json FILE]

Each report is a script that is run twice: with the classes of `transformers` in an environment of
the versions of the time, and with ours in this one (which needs `peft` and `bitsandbytes`). The exit
status is 1 unless the former fails as it was reported to and the latter does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ..environments import ROOT, environment, first_line

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Seed:
    script: str
    family: str
    packages: tuple[str, ...]
    error: str


LORA = ("transformers==4.46.3", "peft==0.13.2")
FOUR_BIT = ("transformers==4.33.3", "bitsandbytes==0.50.2")
LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
VIEW = "is a view and is being modified inplace"
SEEDS = (
    Seed("adapters_on_frozen_embeddings.py", "Deberta", LORA, LEAF),
    Seed("adapters_on_frozen_embeddings.py", "DebertaV2", LORA, LEAF),
    Seed("four_bit_linears.py", "Esm", FOUR_BIT, VIEW),
)


@dataclass(frozen=True)
class Result:
    seed: Seed
    upstream: str
    ours: str
    reproduced: bool
    fixed: bool


def run(python: Path, package: str, seed: Seed) -> tuple[bool, str]:
    """Whether the script went through, and what it wrote last."""
    command = [python, HERE / seed.script, package, seed.family]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        return False, first_line(finished.stderr)
    return True, finished.stdout.strip().splitlines()[-1]


def check(seed: Seed, folder: Path) -> Result:
    home = folder / "-".join(package.replace("==", "-") for package in seed.packages)
    passed, upstream = run(environment(home, seed.packages), "transformers", seed)
    fixed, ours = run(Path(sys.executable), "outplace", seed)
    return Result(seed, upstream, ours, reproduced=not passed and seed.error in upstream, fixed=fixed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "regressions")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    results = [check(seed, options.envs) for seed in SEEDS]
    print("| report | with | upstream | ours |")
    print("| --- | --- | --- | --- |")
    for result in results:
        name = result.seed.script.removesuffix(".py").replace("_", " ")
        packages = ", ".join(result.seed.packages).replace("==", " ")
        print(f"| {result.seed.family}: {name} | {packages} | {result.upstream} | {result.ours} |")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0 if all(result.reproduced and result.fixed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
