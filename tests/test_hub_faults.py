"""What goes wrong between the Hub and a model ends in a model or one clear error, and a usable cache."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path

import faults
import pytest
import tiny
import torch
from faults import LOADS, NAME, Case, Scene
from loopback import connect, disconnect, hub, hurry

import outplace


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("EsmForMaskedLM").save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_loads(**options: object) -> None:
    model = outplace.EsmForMaskedLM.from_pretrained(NAME, strict=True, **options)
    expected = tiny.model("EsmForMaskedLM").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def outcome(options: dict[str, object]) -> str:
    try:
        assert_loads(**options)
    except FileNotFoundError as error:
        return f"FileNotFoundError: {error}"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return LOADS


def assert_whole(cache: Path) -> None:
    """Every file of the cache has the bytes that its name promises."""
    for path in cache.glob("*/blobs/*"):
        content = path.read_bytes()
        if len(path.name) == 64:
            assert hashlib.sha256(content).hexdigest() == path.name
        elif len(path.name) == 40:
            assert hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == path.name


@pytest.mark.parametrize("case", faults.CASES, ids=lambda case: case.name)
def test_each_fault_has_its_outcome_and_the_next_load_succeeds(
    case: Case, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub({NAME: files}) as server:
        connect(monkeypatch, server, tmp_path)
        hurry(monkeypatch)
        if case.cached:
            assert_loads()
        with ExitStack() as stack:
            case.play(Scene(server, tmp_path, files, stack))
            found = outcome(case.options)
        assert case.fits(found), found
        assert "\n" not in found

        repository = server.repositories[NAME]
        repository.private = repository.gated = False
        server.faults.clear()
        held = repository.commits[repository.head].files
        if {name: file.content for name, file in held.items()} != files:
            repository.commit(files, remove=held.keys() - files.keys(), title="repaired")
        assert_loads(**case.then)
    disconnect(monkeypatch)
    assert_loads()
    assert_whole(tmp_path / "hub")


def test_the_page_has_the_table() -> None:
    assert faults.page() == faults.PAGE.read_text(encoding="utf-8"), "run `make faults`"
