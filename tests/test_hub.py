"""Loading by a Hub name, by the real client from a server on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from loopback import COMMIT, hub


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, Path]:
    tiny.model("EsmForMaskedLM").save_pretrained(tmp_path / "one")
    tiny.model("EsmForMaskedLM").save_pretrained(tmp_path / "many", max_shard_size="20KB")
    tiny.model("EsmForMaskedLM").save_pretrained(tmp_path / "nested/deep")
    return {
        "someone/one": tmp_path / "one",
        "someone/many": tmp_path / "many",
        "someone/nested": tmp_path / "nested",
    }


def load(endpoint: str, home: Path, call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Load in a process of its own (the client reads its environment once), which prints the weights' sum."""
    code = f"""
import outplace
try:
    model = outplace.EsmForMaskedLM.from_pretrained({call})
    print(sum(p.double().abs().sum().item() for p in model.parameters()))
except FileNotFoundError as error:
    print("not found:", error)
"""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def expected() -> str:
    return str(sum(p.double().abs().sum().item() for p in tiny.model("EsmForMaskedLM").parameters()))


def test_a_repository_loads_once_from_the_hub_then_from_the_cache(
    repositories: dict[str, Path], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with hub(repositories) as (endpoint, requests):
        for call in ('"someone/one"', '"someone/many"', '"someone/nested", subfolder="deep"'):
            assert load(endpoint, home, call).stdout.strip() == expected(), call
        fetched = [line for line in requests if line.startswith("GET")]
        assert sum(line.endswith("/model.safetensors") for line in fetched) == 2
        pinned = load(endpoint, home, f'"someone/one", revision="{COMMIT}"')
        assert pinned.stdout.strip() == expected()
    offline = load(endpoint, home, '"someone/one"', HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == expected()
    local = load(endpoint, home, '"someone/many", local_files_only=True')
    assert local.stdout.strip() == expected()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('"someone/absent"', "cannot fetch config.json of someone/absent"),
        ('"someone/one", revision="absent"', "cannot fetch config.json of someone/one"),
        ('"someone/one", local_files_only=True', "config.json of someone/one is not in the cache"),
        ('"someone/one", subfolder="absent"', "someone/one holds no config.json"),
    ],
)
def test_what_is_not_there_is_one_clear_error(
    repositories: dict[str, Path], tmp_path: Path, call: str, message: str
) -> None:
    with hub(repositories) as (endpoint, _):
        assert message in load(endpoint, tmp_path / "home", call).stdout
