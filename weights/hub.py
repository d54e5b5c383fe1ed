"""Find a checkpoint's files, in a folder or on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import CheckpointError

HUB_OPTIONS = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download")
"""Keywords that go to `huggingface_hub.hf_hub_download` as they are."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def fetch(name_or_path: str | Path, filename: str, **hub: Any) -> Path | None:
    """One file of a folder or of a Hub repository, or None where it has no such file.

    Args:
        hub: `HUB_OPTIONS`.

    Raises:
        FileNotFoundError: no such folder or repository, or the Hub cannot be reached and the file is
            not in the cache; the message says which.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        path = folder / (hub.get("subfolder") or "") / filename
        return path if path.is_file() else None
    if folder.exists():
        raise FileNotFoundError(f"{name_or_path} is a file; give the folder that holds it")
    if folder.is_absolute() or str(name_or_path).startswith((".", "~")):
        raise FileNotFoundError(f"there is no folder {name_or_path}")
    return _download(str(name_or_path), filename, hub)


def _download(repo_id: str, filename: str, hub: dict[str, Any]) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(hf_hub_download(repo_id, filename, **hub))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if _known_absent(repo_id, filename, hub):
            return None
        raise FileNotFoundError(
            f"{filename} of {repo_id} is not in the cache, and the Hub was not asked or did not answer: "
            f"{_first_line(error)}"
        ) from error
    except EntryNotFoundError:
        return None
    except HFValidationError as error:
        raise FileNotFoundError(
            f"{repo_id!r} is neither a folder here nor the name of a Hub repository: {_first_line(error)}"
        ) from error
    except HfHubHTTPError as error:
        raise FileNotFoundError(f"cannot fetch {filename} of {repo_id}: {_first_line(error)}") from error


def _known_absent(repo_id: str, filename: str, hub: dict[str, Any]) -> bool:
    """Whether the cache remembers that the repository has no such file."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    path = f"{hub['subfolder']}/{filename}" if hub.get("subfolder") else filename
    known = try_to_load_from_cache(
        repo_id, path, cache_dir=hub.get("cache_dir"), revision=hub.get("revision")
    )
    return known is _CACHED_NO_EXIST


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def fetch_config(name_or_path: str | Path, **hub: Any) -> Path:
    """The checkpoint's `config.json`. Raises `FileNotFoundError` where it has none."""
    path = fetch(name_or_path, "config.json", **hub)
    if path is None:
        raise FileNotFoundError(f"{name_or_path} holds no config.json")
    return path


def fetch_weights(name_or_path: str | Path, **hub: Any) -> tuple[list[Path], dict[str, str] | None]:
    """The checkpoint's safetensors files, and where there are several, which key is in which.

    Returns:
        Paths, and the index's map of keys to the paths' names, or None.

    Raises:
        FileNotFoundError: it holds no safetensors weights.
        CheckpointError: the index is malformed, names a file outside the folder or one that is missing.
    """
    single = fetch(name_or_path, WEIGHTS, **hub)
    if single is not None:
        return [single], None
    index = fetch(name_or_path, INDEX, **hub)
    if index is None:
        pickled = fetch(name_or_path, "pytorch_model.bin", **hub) is not None
        raise FileNotFoundError(
            f"{name_or_path} holds no {WEIGHTS}"
            + (
                " but a pickled pytorch_model.bin, which is not read here; save it as safetensors"
                if pickled
                else ""
            )
        )
    weight_map = read_index(index)
    paths = []
    for name in sorted(set(weight_map.values())):
        path = fetch(name_or_path, name, **hub)
        if path is None:
            raise CheckpointError(f"{index} names {name}, which {name_or_path} does not hold")
        paths.append(path)
    return paths, weight_map


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index, each file name checked to be a plain one.

    Raises:
        CheckpointError: it is malformed, or a name leads out of its folder.
    """
    from ..models.config import read_json_object

    try:
        weight_map = read_json_object(path).get("weight_map")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map of keys to file names")
    for name in weight_map.values():
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{path} names {name!r}, which is no file beside it")
    return weight_map
