"""Find a checkpoint's files, in a folder or on the Hub."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from .errors import CheckpointError

HUB_OPTIONS = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download")
"""Keywords that go to `huggingface_hub.hf_hub_download` as they are."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

PAUSES = (1.0, 3.0)
"""Seconds before a download that the Hub failed to serve is tried again."""

Weights = tuple[list[Path], dict[str, str] | None]
"""Paths of a checkpoint's files, and where there are several, the name of the one each key is in."""


def fetch(name_or_path: str | Path, filename: str, **hub: Any) -> Path | None:
    """One file of a folder or of a Hub repository, or None where it has no such file.

    Args:
        hub: `HUB_OPTIONS`.

    Raises:
        FileNotFoundError: no such folder or repository, or the Hub cannot be reached and the file is
            not in the cache; the message says which.
        CheckpointError: what came is not what the Hub holds, by its checksum.
        OSError: the cache cannot be written to.
    """
    folder = local_folder(name_or_path)
    if folder is not None:
        path = folder / (hub.get("subfolder") or "") / filename
        return path if path.is_file() else None
    return _download(str(name_or_path), filename, hub)


def local_folder(name_or_path: str | Path) -> Path | None:
    """The folder of that name, or None where the name can only be a repository's.

    Raises:
        FileNotFoundError: it is a file, or a path that is not there.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{name_or_path} is a file; give the folder that holds it")
    if folder.is_absolute() or str(name_or_path).startswith((".", "~")):
        raise FileNotFoundError(f"there is no folder {name_or_path}")
    return None


class NotCached(FileNotFoundError):
    """The Hub was not asked or did not answer, and the cache does not hold the file."""


def _download(repo_id: str, filename: str, hub: dict[str, Any]) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled

    what = f"{filename} of {repo_id}"
    known = _cached(repo_id, filename, hub)
    if known is False and not _has_appeared(repo_id, filename, hub):
        return None
    for pause in (*PAUSES, None):
        with explained(f"fetch {what}", hub.get("revision")):
            try:
                path = Path(hf_hub_download(repo_id, filename, **hub))
            except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
                raise NotCached(
                    f"{what} is not in the cache and cannot be fetched: {_reason(error.__cause__ or error)}"
                ) from error
            except EntryNotFoundError:
                return None
            except Exception as error:
                if pause is not None and _is_passing(error):
                    time.sleep(pause)
                    continue
                _tell(error, what)
        if (path == known and not hub.get("force_download")) or _is_whole(path):
            return path
        _forget(path)
        if pause is None:
            break
    raise CheckpointError(
        f"{what} came with a wrong checksum {len(PAUSES) + 1} times, and was deleted; "
        "try again later, or over another network"
    )


def _has_appeared(repo_id: str, filename: str, hub: dict[str, Any]) -> bool:
    """Whether the Hub now holds a file that, by the cache, it did not hold: not so where it cannot be asked.

    A download would find out as well, but the client lets it wait half a minute for a Hub out of reach.
    """
    try:
        return exists(repo_id, filename, hub)
    except FileNotFoundError:
        return False


def _tell(error: Exception, what: str) -> NoReturn:
    """Raise the client's error of downloading `what` as one that says so, where its own does not."""
    if type(error) is ValueError and error.__cause__ is not None:
        raise error.__cause__ from None  # why a forced download failed
    if _is_short(error):
        raise FileNotFoundError(f"cannot fetch {what}: {_first_line(error)}; try again") from error
    if isinstance(error, OSError) and error.errno is not None:
        raise OSError(
            f"cannot write {what} to the cache: {error.strerror}; make room there, or give another folder "
            "by cache_dir=… or HF_HOME"
        ) from error
    raise error


@contextmanager
def explained(doing: str, revision: str | None = None) -> Iterator[None]:
    """Turn the client's errors into one line that says what to do.

    Args:
        doing: what "cannot" goes before.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # The first base of the client's own error is its HTTP library's; its Xet library raises Python's.
    transport_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        yield
    except HFValidationError as error:
        raise FileNotFoundError(
            f"cannot {doing}: that is neither a folder here nor the name of a Hub repository: "
            f"{_first_line(error)}"
        ) from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"cannot {doing}: the repository is gated; ask for access on its page, then log in with "
            "`hf auth login` or pass token=…"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"cannot {doing}: there is no such repository, or it is private and needs a login "
            "(`hf auth login`) or token=…"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"cannot {doing}: there is no revision {revision!r}; give a branch, a tag or a commit"
        ) from error
    except (transport_error, ConnectionError) as error:
        raise FileNotFoundError(f"cannot {doing}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    status = _status(error)
    if status == 401:
        return "the Hub refuses the login (401); log in with `hf auth login` or pass a valid token=…"
    if status == 403:
        return "the Hub forbids it (403); pass a token=… with the permission"
    if status == 429:
        return "the Hub asks to slow down (429); try again later, or log in for a higher limit"
    if status >= 500:
        return f"the Hub fails ({status}); try again later"
    if not isinstance(error, OSError):  # one of the HTTP library alone
        return f"the way to the Hub fails ({_first_line(error)}); try again"
    return _first_line(error)


def _status(error: BaseException) -> int:
    response = getattr(error, "response", None)
    return 0 if response is None else int(response.status_code)


def _is_passing(error: Exception) -> bool:
    """Whether the Hub, or the way to it, failed in a way that may be over in a moment."""
    # The client's HTTP library has had several names, its base of broken connections one.
    broken = any(cls.__name__ == "NetworkError" for cls in type(error).__mro__)
    return _status(error) >= 500 or broken or _is_short(error)


def _is_short(error: Exception) -> bool:
    """Whether it is the client's of a file that ended early: an `OSError` which is not the system's."""
    return type(error) is OSError and error.errno is None


def _cached(repo_id: str, filename: str, hub: dict[str, Any]) -> Path | bool | None:
    """The file's path in the cache; False where that knows of no such file, None where it does not know."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    path = f"{hub['subfolder']}/{filename}" if hub.get("subfolder") else filename
    try:
        known = try_to_load_from_cache(
            repo_id, path, cache_dir=hub.get("cache_dir"), revision=hub.get("revision")
        )
    except HFValidationError:
        return None
    return False if known is _CACHED_NO_EXIST else Path(known) if isinstance(known, str) else None


def _is_whole(path: Path) -> bool:
    """Whether a downloaded file has the checksum that the Hub named it by.

    Large files have their SHA-256 as their name in the cache; the client does not compare it.
    """
    named = path.resolve().name
    if len(named) != 64 or set(named) - set("0123456789abcdef"):
        return True
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest() == named


def _forget(path: Path) -> None:
    blob = path.resolve()
    path.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def fetch_config(name_or_path: str | Path, **hub: Any) -> Path:
    """The checkpoint's `config.json`. Raises `FileNotFoundError` where it has none."""
    path = fetch(name_or_path, "config.json", **hub)
    if path is None:
        raise FileNotFoundError(f"{name_or_path} holds no config.json")
    return path


def fetch_weights(name_or_path: str | Path, *, allow_pickle: bool = False, **hub: Any) -> Weights:
    """The checkpoint's weights as safetensors files.

    Searched in this order: `model.safetensors`; its index, for several files; of a repository that holds
    only pickles, the safetensors conversion that waits in a pull request (`conversions.find`); and, where
    it is allowed, the pickles, read by torch's restricted unpickler and written once as safetensors
    beside the cached repository.

    Raises:
        FileNotFoundError: there are no weights, or only pickles, which are not allowed.
        CheckpointError: an index is malformed, names a file outside the folder or one that is missing;
            a pickle is damaged or holds more than tensors.
    """
    from .conversions import converted, find

    try:
        found = _safetensors(name_or_path, hub)
        missed = None
    except NotCached as error:
        found, missed = None, error
    if found is None and local_folder(name_or_path) is None:
        commit = find(str(name_or_path), hub)
        found = None if commit is None else _safetensors(name_or_path, {**hub, "revision": commit})
    if found is not None:
        return found
    if allow_pickle:
        pickles = fetch_pickles(name_or_path, hub)
        if pickles is not None:
            return [converted(pickles)], None
    elif exists(name_or_path, PICKLE, hub) or exists(name_or_path, PICKLE_INDEX, hub):
        raise FileNotFoundError(
            f"{name_or_path} holds no {WEIGHTS}, only a pickled {PICKLE}: pass allow_pickle=True to read it "
            f"restricted to tensors, or convert it once with `outplace convert {name_or_path} -o FOLDER`"
        )
    raise missed or FileNotFoundError(f"{name_or_path} holds no weights: no {WEIGHTS}, {INDEX} or {PICKLE}")


def _safetensors(name_or_path: str | Path, hub: dict[str, Any]) -> Weights | None:
    try:
        single = fetch(name_or_path, WEIGHTS, **hub)
    except NotCached:
        # Another program may have filled the cache, which asked for the shards alone.
        shards = _shards(name_or_path, INDEX, hub)
        if shards is None:
            raise
        return shards
    return ([single], None) if single is not None else _shards(name_or_path, INDEX, hub)


def fetch_pickles(name_or_path: str | Path, hub: dict[str, Any]) -> Weights | None:
    """The checkpoint's pickles, None where it has none; as `fetch_weights`."""
    single = fetch(name_or_path, PICKLE, **hub)
    return ([single], None) if single is not None else _shards(name_or_path, PICKLE_INDEX, hub)


def _shards(name_or_path: str | Path, index_name: str, hub: dict[str, Any]) -> Weights | None:
    index = fetch(name_or_path, index_name, **hub)
    if index is None:
        return None
    weight_map = read_index(index)
    paths = []
    for name in sorted(set(weight_map.values())):
        path = fetch(name_or_path, name, **hub)
        if path is None:
            raise CheckpointError(f"{index} names {name}, which {name_or_path} does not hold")
        paths.append(path)
    return paths, weight_map


def exists(name_or_path: str | Path, filename: str, hub: dict[str, Any]) -> bool:
    """Whether a folder or repository holds a file, which is not fetched. Offline, whether the cache does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import EntryNotFoundError

    if local_folder(name_or_path) is not None:
        return fetch(name_or_path, filename, **hub) is not None
    repo_id = str(name_or_path)
    if HF_HUB_OFFLINE or hub.get("local_files_only"):
        return isinstance(_cached(repo_id, filename, hub), Path)
    url = hf_hub_url(repo_id, filename, subfolder=hub.get("subfolder"), revision=hub.get("revision"))
    with explained(f"look for {filename} of {repo_id}", hub.get("revision")):
        try:
            get_hf_file_metadata(url, token=hub.get("token"))
        except EntryNotFoundError:
            return False
    return True


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
