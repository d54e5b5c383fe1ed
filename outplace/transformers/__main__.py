"""Run a program on our blocks: `python -m outplace.transformers program.py args…`, or `-m module args…`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from . import install

USAGE = "usage: python -m outplace.transformers (program.py | -m module) [argument ...]"


def main(arguments: list[str]) -> int:
    """Install, then run the program as Python would; a program that is not there is Python's own error."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(USAGE, file=sys.stderr)
        return 0 if arguments and arguments[0] != "-m" else 2
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
