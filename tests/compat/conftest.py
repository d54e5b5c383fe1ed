"""Tests against other people's tools: heavy to install, so they run only where asked for by path."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args]
    if any(path == HERE or HERE in path.parents for path in asked):
        return None
    return True if HERE in collection_path.parents else None
