"""Programs that know nothing of this project, plainly and under `install()`: the same numbers.

Those that need an environment of their own are rows of `make compat`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("captum", reason="runs other people's tools: pip install 'outplace[compat]'")

from outplace.benchmarks import compat, programs

HERE = [
    (name, family)
    for name, (families, _) in programs.PROGRAMS.items()
    for family in families
    if not compat.TOOLS.get(name, ("", "", ()))[2]
]
FAILS_UPSTREAM = {("device_map", "Deberta"), ("device_map", "DebertaV2")}


@pytest.mark.parametrize(("name", "family"), HERE)
@pytest.mark.filterwarnings("ignore")
def test_a_program_gives_the_same_numbers(name: str, family: str) -> None:
    """A name in `FAILS_UPSTREAM` has numbers only under `install()`, which the program itself checks."""
    found = programs.compared(name, family)
    assert found.startswith("runs under install()" if (name, family) in FAILS_UPSTREAM else "equal to")
