"""Loading by a Hub name, by the real client from a server on this machine."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from loopback import Repository, Server, connect, disconnect, environment, hub, hurry

import outplace
from outplace.cli import main

Files = dict[str, bytes]
BOT = "SFconvertbot"
TITLE = "Adding `safetensors` variant of this model"


def model(mark: float = 0.0) -> outplace.EsmForMaskedLM:
    """A tiny model that can be told from others by a mark."""
    made: outplace.EsmForMaskedLM = tiny.model("EsmForMaskedLM")
    made.lm_head.bias = torch.nn.Parameter(torch.full_like(made.lm_head.bias, mark))
    return made


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Gives the files of a checkpoint of a model."""

    def make(made: Any = None, folder: str = "", **options: Any) -> Files:
        place = tmp_path / f"files-{len(list(tmp_path.iterdir()))}"
        (made or model()).save_pretrained(place / folder, **options)
        return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}

    return make


def pickled(made: Any, shards: int = 1) -> Files:
    """The files of a checkpoint as they were before safetensors."""
    state = made.state_dict()
    names = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    weight_map = {key: names[i % shards] for i, key in enumerate(state)}
    found = {"config.json": made.config.to_json_string().encode()}
    for name in names:
        buffer = io.BytesIO()
        torch.save({key: state[key] for key in state if weight_map[key] == name}, buffer)
        found[name if shards > 1 else "pytorch_model.bin"] = buffer.getvalue()
    if shards > 1:
        found["pytorch_model.bin.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A Hub of its user "someone" without repositories, which this process's client asks."""
    with hub({}, {"secret": "someone", "other": "another"}) as served:
        connect(monkeypatch, served, tmp_path / "home")
        yield served


load = outplace.EsmForMaskedLM.from_pretrained


def mark_of(name: str, **options: Any) -> float:
    loaded = load(name, strict=True, **options)
    return loaded.lm_head.bias[0].item()


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


# Which files


def test_a_branch_a_tag_and_a_commit_are_revisions(server: Server, files: Any) -> None:
    repository = Repository(files(model(1)))
    server.repositories["someone/model"] = repository
    first = repository.head
    repository.tag("v1")
    repository.commit(files(model(2)), "trial", on=first)
    repository.commit(files(model(3)))
    assert mark_of("someone/model") == 3
    assert mark_of("someone/model", revision="trial") == 2
    assert mark_of("someone/model", revision="v1") == 1
    assert mark_of("someone/model", revision=first) == 1
    repository.commit(files(model(4)))
    assert mark_of("someone/model") == 4


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "shards"])
def test_a_subfolder_is_a_checkpoint_of_its_own(server: Server, files: Any, size: str) -> None:
    deep = files(model(2), "deep/er", max_shard_size=size)
    server.repositories["someone/model"] = Repository(files(model(1)) | deep)
    assert mark_of("someone/model") == 1
    assert mark_of("someone/model", subfolder="deep/er") == 2
    with pytest.raises(FileNotFoundError, match=r"someone/model holds no config\.json"):
        load("someone/model", subfolder="shallow")


def test_force_download_fetches_again(server: Server, files: Any) -> None:
    server.repositories["someone/model"] = Repository(files())
    for _ in range(2):
        load("someone/model")
    fetched = [line for line in server.requests if line.startswith("GET") and "safetensors" in line]
    assert len(fetched) == 1
    load("someone/model", force_download=True)
    fetched = [line for line in server.requests if line.startswith("GET") and "safetensors" in line]
    assert len(fetched) == 2


# Whose files


def test_a_private_repository_wants_a_token(
    server: Server, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repositories["someone/model"] = Repository(files(model(1)), private=True)
    for options in ({}, {"token": "other"}):
        with pytest.raises(FileNotFoundError, match=r"it is private and needs a login \(`hf auth login`\)"):
            load("someone/model", **options)
    assert mark_of("someone/model", token="secret") == 1
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", "secret")
        assert mark_of("someone/model", force_download=True) == 1
        with pytest.raises(FileNotFoundError, match="private"):
            load("someone/model", token=False, force_download=True)


def test_a_gated_repository_opens_to_its_readers(server: Server, files: Any) -> None:
    server.repositories["someone/model"] = Repository(files(model(1)), gated=True, readers={"another"})
    with pytest.raises(FileNotFoundError, match="gated; ask for access on its page"):
        load("someone/model")
    assert mark_of("someone/model", token="other") == 1


# The environment and the cache


def fetch_elsewhere(server: Server, home: Path, **more: str) -> tuple[Path, str]:
    """Fetch the weights in a process of its own, since the client reads its environment once.

    Returns where they are, and what a terminal shows.
    """
    code = """if True:
        from outplace.weights.hub import fetch_config, fetch_weights
        fetch_config("someone/model")
        (path,), _ = fetch_weights("someone/model")
        print(path, end="")
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(server, home, **more),
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=True,
        )
        os.write(theirs, b"done")  # or there might be nothing to read
        return Path(done.stdout), os.read(ours, 1 << 16).decode().removesuffix("done")
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_environment_says_where_from_and_where_to_and_what_is_shown(files: Any, tmp_path: Path) -> None:
    with hub({"someone/model": files()}) as server:
        commit = server.repositories["someone/model"].head
        place = f"models--someone--model/snapshots/{commit}/model.safetensors"
        path, shown = fetch_elsewhere(server, tmp_path / "home")
        assert path == tmp_path / "home/hub" / place
        assert "model.safetensors: 100%" in shown
        elsewhere = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        assert fetch_elsewhere(server, tmp_path / "home", **elsewhere) == (tmp_path / "cache" / place, "")
        asked = len(server.requests)
        assert fetch_elsewhere(server, tmp_path / "home", HF_HUB_OFFLINE="1") == (path, "")
        assert len(server.requests) == asked


def test_what_is_cached_loads_without_the_hub(
    server: Server, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repositories["someone/model"] = Repository(files(model(1)))
    missing = r"config\.json of someone/model is not in the cache and cannot be fetched: "
    with pytest.raises(FileNotFoundError, match=missing + ".*local_files_only"):
        load("someone/model", local_files_only=True)
    assert server.requests == []
    load("someone/model")
    load("someone/model", cache_dir=tmp_path / "elsewhere")
    asked = len(server.requests)
    assert mark_of("someone/model", local_files_only=True) == 1
    disconnect(monkeypatch)
    assert mark_of("someone/model") == 1
    assert mark_of("someone/model", cache_dir=tmp_path / "elsewhere") == 1
    with pytest.raises(FileNotFoundError, match=missing + ".*HF_HUB_OFFLINE"):
        load("someone/model", cache_dir=tmp_path / "empty")
    assert len(server.requests) == asked


def test_what_is_cached_loads_without_waiting_for_a_hub_out_of_reach(
    server: Server, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outplace.EsmTokenizer().save_pretrained(tmp_path / "tokenizer")
    vocabulary = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    server.repositories["someone/model"] = Repository(files(max_shard_size="20KB") | vocabulary)
    outplace.load("someone/model")
    waits = hurry(monkeypatch)
    connect(monkeypatch, Server({}, {}, endpoint="http://127.0.0.1:1"), tmp_path / "home")
    outplace.load("someone/model")
    assert waits == []


def test_a_file_that_a_repository_did_not_hold_is_found_once_it_does(server: Server, files: Any) -> None:
    repository = Repository(files(model(1), max_shard_size="20KB"))
    server.repositories["someone/model"] = repository
    assert mark_of("someone/model") == 1
    repository.commit(files(model(2)))
    assert mark_of("someone/model", config=model().config) == 2


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("first", ["ours", "upstream"])
def test_the_cache_is_shared_with_upstream(
    server: Server, files: Any, monkeypatch: pytest.MonkeyPatch, first: str, size: str
) -> None:
    server.repositories["someone/model"] = Repository(files(model(1), max_shard_size=size))
    theirs = transformers.EsmForMaskedLM.from_pretrained
    (load if first == "ours" else theirs)("someone/model")
    asked = len(server.requests)
    disconnect(monkeypatch)
    other = (theirs if first == "ours" else load)("someone/model")
    assert_same(model(1), other)
    assert len(server.requests) == asked


def test_a_run_from_an_empty_cache_to_a_prediction_and_again_offline(
    server: Server, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    outplace.EsmTokenizer().save_pretrained(tmp_path / "tokenizer")
    vocabulary = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    server.repositories["someone/model"] = Repository(files() | vocabulary)
    call = ["fill", "MKTAYIAKQR<mask>ISF", "--model", "someone/model", "--device", "cpu"]
    assert main(call) == 0
    found = capsys.readouterr().out
    assert "11" in found  # the place of the mask

    base = "GET /someone/model"
    repository = server.repositories["someone/model"]
    weights = repository.commits[repository.head].files["model.safetensors"].id
    assert sorted(line for line in server.requests if line.startswith(base)) == [
        f"{base}/{weights}/model.safetensors",
        f"{base}/resolve/main/config.json",
        f"{base}/resolve/main/tokenizer_config.json",
        f"{base}/resolve/main/vocab.txt",
    ]
    asked = len(server.requests)
    disconnect(monkeypatch)
    assert main(call) == 0
    assert capsys.readouterr().out == found
    assert len(server.requests) == asked


# Repositories that hold only pickles


def old(server: Server, mark: float = 1, shards: int = 1) -> Repository:
    repository = Repository(pickled(model(mark), shards))
    server.repositories["someone/old"] = repository
    return repository


def converted(files: Any) -> Files:
    """What the bot adds: weights that can be told from the pickle's."""
    return {"model.safetensors": files(model(2))["model.safetensors"]}


def test_the_bots_pull_request_is_taken_for_pickles_and_remembered(
    server: Server, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = old(server)
    repository.propose({"README.md": b"hello"}, title="A card")
    repository.propose(converted(files), title=TITLE, author=BOT)
    assert mark_of("someone/old") == 2
    assert mark_of("someone/old", allow_pickle=True) == 2
    fetched = [line for line in server.requests if line.startswith("GET") and line.endswith(".bin")]
    assert fetched == []
    asked = [line for line in server.requests if "/discussions" in line]
    assert len(asked) == 1
    disconnect(monkeypatch)
    assert mark_of("someone/old") == 2


def by_another_author(repository: Repository, added: Files) -> None:
    repository.propose(added, title=TITLE, author="SFconvertbot2")


def closed(repository: Repository, added: Files) -> None:
    repository.propose(added, title=TITLE, author=BOT, status="closed")


def of_another_title(repository: Repository, added: Files) -> None:
    repository.propose(added, title="Adding safetensors", author=BOT)


def on_what_main_was(repository: Repository, added: Files) -> None:
    repository.propose(added, title=TITLE, author=BOT)
    repository.commit({"README.md": b"new"})


def with_a_second_commit(repository: Repository, added: Files) -> None:
    request = repository.propose({}, title=TITLE, author=BOT)
    repository.commit(added, request.ref, author="someone else")


def none(repository: Repository, added: Files) -> None:
    pass


@pytest.mark.parametrize(
    "propose",
    [none, by_another_author, closed, of_another_title, on_what_main_was, with_a_second_commit],
)
def test_other_pull_requests_are_not_and_the_error_names_both_ways_out(
    server: Server, files: Any, propose: Any
) -> None:
    propose(old(server), converted(files))
    with pytest.raises(FileNotFoundError) as caught:
        load("someone/old")
    message = str(caught.value)
    assert "\n" not in message
    assert "allow_pickle=True" in message
    assert "outplace convert someone/old -o FOLDER" in message
    assert not any(
        line.startswith("GET") and line.endswith((".bin", ".safetensors")) for line in server.requests
    )
    assert mark_of("someone/old", allow_pickle=True) == 1


def test_a_conversion_of_main_is_none_of_another_branch(server: Server, files: Any) -> None:
    repository = old(server)
    repository.commit({"README.md": b"trial"}, "trial", on=repository.head)
    repository.propose(converted(files), title=TITLE, author=BOT)
    with pytest.raises(FileNotFoundError, match="allow_pickle=True"):
        load("someone/old", revision="trial")


def test_a_hub_that_lists_no_pull_requests_is_a_warning(
    server: Server, files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    repository = old(server)
    repository.propose(converted(files), title=TITLE, author=BOT)
    fault = server.play("failing", "someone/old", "")  # what is no file of it
    with caplog.at_level(logging.WARNING, "outplace.weights"):
        assert mark_of("someone/old", allow_pickle=True) == 1
    assert "cannot list the pull requests of someone/old: the Hub fails (500)" in caplog.text
    server.faults.remove(fault)
    assert mark_of("someone/old") == 2


@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_are_converted_in_the_cache_where_they_are_allowed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    commit = old(server, 1, shards).head
    assert_same(load("someone/old", allow_pickle=True), model(1))
    repository = tmp_path / "home/hub/models--someone--old"
    (written,) = (repository / "outplace").rglob("*.safetensors")
    assert written == repository / "outplace/converted" / commit / "model.safetensors"
    disconnect(monkeypatch)
    assert_same(load("someone/old", allow_pickle=True), model(1))
    with pytest.raises(FileNotFoundError, match="allow_pickle=True"):
        load("someone/old")


# The command line


@pytest.mark.parametrize("size", ["5GB", "400KB"], ids=["one file", "shards"])
def test_inspect_fetches_headers_only(
    server: Server, files: Any, tmp_path: Path, capsys: Any, size: str
) -> None:
    large = tiny.model("EsmForMaskedLM", hidden_size=128, intermediate_size=512)
    held = files(large, max_shard_size=size)
    server.repositories["someone/model"] = Repository(held)
    assert main(["inspect", "someone/model", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    weights = [name for name in held if name.endswith(".safetensors")]
    rest = sum(len(content) for name, content in held.items() if name not in weights)
    assert server.sent < rest + len(weights) * 100_001 + 1000
    assert server.sent < sum(map(len, held.values())) / 2
    assert sum(line.startswith("GET") and "safetensors" in line for line in server.requests) >= len(weights)
    assert list((tmp_path / "home").rglob("*.safetensors")) == []

    large.save_pretrained(tmp_path / "local", max_shard_size=size)
    assert main(["inspect", str(tmp_path / "local"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize("header", ["[]", '{"one": 1}', '{"one": {"dtype": 1}}', "{", "[" * 100_000])
def test_inspect_of_a_damaged_header_is_one_clear_error(
    server: Server, files: Any, capsys: Any, header: str
) -> None:
    content = len(header).to_bytes(8, "little") + header.encode()
    server.repositories["someone/model"] = Repository(files() | {"model.safetensors": content})
    assert main(["inspect", "someone/model"]) == 1
    error = capsys.readouterr().err
    assert "model.safetensors of someone/model is not a whole safetensors file" in error
    assert error.count("\n") == 1


def test_inspect_sees_a_private_repository_by_the_token_of_the_environment_and_the_cache_offline(
    server: Server, files: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    server.repositories["someone/model"] = Repository(files(), private=True)
    assert main(["inspect", "someone/model"]) == 1
    assert "it is private" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert main(["inspect", "someone/model"]) == 0
    found = capsys.readouterr().out
    load("someone/model")
    disconnect(monkeypatch)
    assert main(["inspect", "someone/model"]) == 0
    assert capsys.readouterr().out == found


def test_inspect_reads_the_bots_conversion(server: Server, files: Any, capsys: Any) -> None:
    repository = old(server)
    assert main(["inspect", "someone/old"]) == 1
    assert "allow_pickle" in capsys.readouterr().err
    repository.propose(converted(files), title=TITLE, author=BOT)
    assert main(["inspect", "someone/old"]) == 0
    assert "EsmForMaskedLM: complete" in capsys.readouterr().out


def test_convert_writes_what_a_repository_holds_in_pickles(
    server: Server, tmp_path: Path, capsys: Any
) -> None:
    old(server, 3, shards=2)
    assert main(["convert", "someone/old", "-o", str(tmp_path / "new")]) == 0
    assert "read back and equal" in capsys.readouterr().out
    assert_same(load(tmp_path / "new", strict=True), model(3))
