"""Environments of other versions than this one's, kept between runs."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pinned(package: str) -> str:
    """The project's own version of a package, which old releases are run with too."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def environment(home: Path, packages: tuple[str, ...], *, with_project: bool = False) -> Path:
    """The interpreter of an environment that holds the packages, made where it is not there yet.

    torch and numpy are the project's own versions, unless the packages name others.
    """
    python, done = home / "bin" / "python", home / "complete"
    if not done.exists():
        venv.create(home, with_pip=True, clear=True)
        # Few modules are imported, in few processes; those are compiled then.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        named = {package.partition("==")[0] for package in packages}
        ours = [pinned(package) for package in ("torch", "numpy") if package not in named]
        subprocess.run([*pip, *ours, *packages], check=True)
        if with_project:
            # What the project needs comes with every transformers, in other versions with an old one.
            subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
        done.touch()
    return python


def first_line(error: str) -> str:
    """The line of a traceback that names the exception, shortened for a table."""
    lines = [line for line in error.splitlines() if "Error: " in line and not line.startswith(" ")]
    sentence = (lines or error.strip().splitlines() or ["no message"])[-1].partition(". ")[0]
    return sentence if len(sentence) <= 140 else f"{sentence[:139]}…"
