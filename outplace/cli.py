"""The command `outplace`. A subcommand is a module with `add_parser`, listed in `COMMANDS`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

from . import __version__

COMMANDS = (
    "embed",
    "fill",
    "inspection",
    "convert",
    "verify",
    "audit_command",
    "benchmarks.bench",
    "benchmarks.fit",
)
"""Modules of this package; they import torch only in `run`, so that `--help` is quick."""

INTERRUPTED, BROKEN_PIPE = 130, 141
"""What a shell makes of SIGINT and SIGPIPE: 128 and their numbers."""

EPILOG = """\
exit status: 0 done, 1 failed with one line on standard error, 2 wrong usage; for audit 1 also means
that the model writes in place

`outplace COMMAND --help` says more of each, with an example."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outplace",
        description="Protein embeddings and masked residues with ESM, and an auditor of in-place writes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"outplace {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f".{name}", __package__).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; wrong usage exits with 2 at once."""
    try:
        try:
            args = build_parser().parse_args(argv)
            with _terminated_cleanly(), warnings.catch_warnings():
                # NumPy is none of the requirements, which torch remarks on.
                warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
                return int(args.run(args))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (OSError, ValueError, ImportError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _out_of_memory(error):
            raise
        print(f"outplace: error: {_in_one_line(error)}", file=sys.stderr)
        return 1


def _out_of_memory(error: RuntimeError) -> bool:
    """Whether it is torch's; the CPU's has no class of its own."""
    return "out of memory" in str(error) or "allocate memory" in str(error)


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
