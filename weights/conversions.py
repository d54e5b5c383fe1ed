"""Safetensors in the place of pickles: the Hub's own conversions, and ours, kept in the cache.

The Hub's conversion bot offers its work as a pull request, whose commits can be fetched like any other.
Anybody can open a pull request, so only the bot's counts, and only one that is a single commit on what
main holds now.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from .hub import PICKLE, PICKLE_INDEX, WEIGHTS, Weights, exists, explained, fetch
from .pickled import read_pickles
from .writer import new_file, write_tensors

logger = logging.getLogger(__name__)

BOT = "SFconvertbot"
TITLE = "Adding `safetensors` variant of this model"
OURS = "outplace"
"""Folder in a cached repository for what is this package's own; it goes when the repository is deleted."""


def find(repo_id: str, hub: dict[str, Any]) -> str | None:
    """The commit of the Hub's conversion of a repository's pickles, None where there is none to be trusted.

    It is remembered in the cache, so that a second load asks nothing and works offline.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    config = fetch(repo_id, "config.json", **hub)
    snapshot = None if config is None else _snapshot(config)
    if snapshot is None:
        return None
    record = snapshot.parent.parent / OURS / "conversions" / snapshot.name
    if record.is_file():
        return record.read_text().strip()
    if HF_HUB_OFFLINE or hub.get("local_files_only"):
        return None
    if not (exists(repo_id, PICKLE, hub) or exists(repo_id, PICKLE_INDEX, hub)):
        return None
    try:
        with explained(f"list the pull requests of {repo_id}"):
            commit = _ask(repo_id, snapshot.name, hub.get("token"))
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        logger.warning("cannot look for a safetensors conversion of %s: %s", repo_id, error)
        return None
    if commit is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        with new_file(record) as file:
            file.write(commit.encode())
    return commit


def _ask(repo_id: str, wanted: str, token: str | bool | None) -> str | None:
    """The commit of the bot's pull request on `wanted`, which must be what main holds now."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    head = api.model_info(repo_id).sha
    if head != wanted:
        return None
    for request in api.get_repo_discussions(repo_id):
        its = (request.title, request.author, request.status, request.is_pull_request)
        if its != (TITLE, BOT, "open", True):
            continue
        newest, *older = api.list_repo_commits(repo_id, revision=request.git_reference)
        if older and older[0].commit_id == head:
            return newest.commit_id
    return None


def converted(pickles: Weights) -> Path:
    """A safetensors file of what pickles hold, written once and found again.

    Raises:
        CheckpointError: as `read_pickles`.
        OSError: the cache cannot be written to.
    """
    paths, _ = pickles
    target = _place(paths)
    if not target.is_file():
        tensors = read_pickles(pickles)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(target, tensors)
        for stale in target.parent.glob("*.safetensors"):
            if stale != target:
                stale.unlink(missing_ok=True)
    return target


def _place(paths: list[Path]) -> Path:
    """Where the conversion of these files is kept."""
    from huggingface_hub.constants import HF_HOME

    snapshot = _snapshot(paths[0])
    if snapshot is not None:
        inside = paths[0].parent.relative_to(snapshot)
        return snapshot.parent.parent / OURS / "converted" / snapshot.name / inside / WEIGHTS
    folder = paths[0].parent.resolve()
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return Path(HF_HOME) / OURS / "converted" / _digest(folder) / f"{_digest(stats)}.safetensors"


def _snapshot(path: Path) -> Path | None:
    """The folder of a file's commit in the Hub's cache, None for a file elsewhere."""
    return next(
        (parent for parent in path.parents if parent.parent.name == "snapshots"),
        None,
    )


def _digest(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:32]
