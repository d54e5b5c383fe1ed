"""The embedded checkpoint: an ESM-2 of 477,000 parameters, a working example."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The checkpoint's folder, for any `from_pretrained`."""
    return Path(__file__).parent
