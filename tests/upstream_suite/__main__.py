"""Run upstream's own common model tests on its classes, as they are and on our blocks.

    python tests/upstream_suite

The tests are those of the installed release: its source archive is fetched from the package registry into
build/, and `testers.py` is laid among them. The exit status is 1 where a test passes as they are and not on
our blocks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[2]
VERSION = transformers.__version__
HOME = ROOT / "build" / f"upstream-suite-{VERSION}"
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "distributed_testing_utils.py": (
        "def run_distributed(*args, **kwargs): raise NotImplementedError\n"
        "def __getattr__(name): return None\n"
    ),
}
"""What the common tests import and the archive lacks; none of it is about these models."""


def fetch() -> None:
    """Lay out the release's tests under `HOME`."""
    if (HOME / "tests").exists():
        return
    HOME.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    source = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(HOME), f"transformers=={VERSION}"]
    subprocess.run([*pip, *source], check=True)
    (archive,) = HOME.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(HOME, filter="data")
    folder = archive.name.removesuffix(".tar.gz")
    tests = HOME / folder / "tests"
    for name, text in STUBS.items():
        (tests / name).parent.mkdir(exist_ok=True)
        for package in (tests, (tests / name).parent):
            (package / "__init__.py").touch()
        (tests / name).write_text(text)
    tests.rename(HOME / "tests")
    shutil.rmtree(HOME / folder)


def outcomes(side: str) -> dict[str, str]:
    """Run the tests; return each one's outcome by its name."""
    shutil.copy(Path(__file__).parent / "testers.py", HOME / "tests" / "test_testers.py")
    # The project's own settings are not for these tests.
    (HOME / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-rA", "--tb=line", "--timeout=90", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_testers.py", "--rootdir", str(HOME), *options],
        cwd=HOME,
        env=os.environ | {"SIDE": side, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    (HOME / f"{side}.log").write_text(done.stdout + done.stderr)
    lines = (line.split(" ", 2) for line in done.stdout.splitlines())
    found = {line[1]: line[0] for line in lines if line[0] in ("PASSED", "FAILED", "ERROR") and len(line) > 1}
    if not found:
        raise RuntimeError(f"no test ran; {HOME / f'{side}.log'} says why")
    return found


def main() -> int:
    fetch()
    plain, under = outcomes("transformers"), outcomes("under")
    passed = [{name for name, outcome in side.items() if outcome == "PASSED"} for side in (plain, under)]
    lost, won = sorted(passed[0] - passed[1]), sorted(passed[1] - passed[0])
    print(f"transformers {VERSION}: {len(passed[0])} pass as they are, {len(passed[1])} on our blocks")
    for title, names in (("pass on our blocks alone", won), ("do not pass on our blocks", lost)):
        for name in names:
            print(f"  {title}: {name.rpartition('::')[0].rpartition('::')[2]}.{name.rpartition('::')[2]}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
