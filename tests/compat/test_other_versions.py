"""What needs an environment of other versions than this one's; built once, under build/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("bitsandbytes", reason="one of the reports: pip install 'outplace[compat]'")
pytest.importorskip("peft", reason="one of the reports: pip install 'outplace[compat]'")
ROOT = Path(__file__).parents[2]


def command(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_the_first_reports_fail_upstream_and_not_here(tmp_path: Path) -> None:
    finished = command("benchmarks.regressions.seeds", "--json", tmp_path / "seeds.json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((tmp_path / "seeds.json").read_text())
    assert [(x["reproduced"], x["fixed"]) for x in results] == [(True, True)] * 3


RELEASES = ("4.57.6", "5.16.1")
"""Of transformers, beside the one that all tests run with."""
TESTED_WITH = ("accelerate", "bitsandbytes", "hypothesis", "peft", "pytest", "pytest-xdist")


@pytest.mark.parametrize("release", RELEASES)
def test_our_blocks_run_in_another_release_of_transformers(release: str) -> None:
    from outplace.benchmarks.environments import environment, pinned

    packages = (f"transformers=={release}", *map(pinned, TESTED_WITH))
    python = environment(ROOT / "build" / "regressions" / packages[0], packages, with_project=True)
    tests = ["tests/test_under_transformers.py", "-n", "auto", "-p", "no:cacheprovider"]
    finished = subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_the_adapters_library_takes_our_models(tmp_path: Path) -> None:
    pytest.importorskip("captum", reason="the probes state all tools' versions")
    finished = command("benchmarks.compat", "--only", "adapters", "--json", tmp_path / "found.json")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {(x["name"], x["ours"]) for x in found} == {
        (f"adapters_{method}", "works") for method in ("seq_bn", "lora", "loreft", "seq_bn_inv")
    }
