"""`push_to_hub`, by the real client to a server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from loopback import Repository, Server, connect, disconnect, hub, hurry

import outplace

NAME = "someone/new"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with hub({}, {"secret": "someone", "other": "another"}) as served:
        connect(monkeypatch, served, tmp_path / "home")
        yield served


def held(server: Server, revision: str = "main") -> dict[str, bytes]:
    commit = server.repositories[NAME].find(revision)
    assert commit is not None
    return {name: file.content for name, file in commit.files.items()}


@pytest.mark.parametrize(
    "name", ["DebertaForMaskedLM", "DebertaV2ForSequenceClassification", "EsmForMaskedLM"]
)
def test_what_is_pushed_loads_here_and_in_upstream(server: Server, name: str) -> None:
    model, inputs = tiny.model(name), tiny.inputs(name)
    address = model.push_to_hub(NAME, token="secret")
    assert address == f"{server.endpoint}/{NAME}/commit/{server.repositories[NAME].head}"
    ours = getattr(outplace, name).from_pretrained(NAME, strict=True)
    theirs = getattr(transformers, name).from_pretrained(NAME)
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(ours(**inputs).logits, expected)
        torch.testing.assert_close(theirs(**inputs).logits, expected)


def test_the_card_names_version_task_and_parity_and_an_edited_one_stays(server: Server) -> None:
    model = tiny.model("EsmForMaskedLM")
    model.push_to_hub(NAME, token="secret")
    card = held(server)["README.md"].decode()
    assert "pipeline_tag: fill-mask" in card
    assert "library_name: outplace" in card
    assert f"written by outplace {outplace.__version__} with torch {torch.__version__}" in card
    assert "within 1e-6, relative to the output's largest value, of those of transformers 5.24.0" in card
    assert f'outplace.load("{NAME}")' in card
    server.repositories[NAME].commit({"README.md": b"mine"})
    model.push_to_hub(NAME, token="secret")
    assert held(server)["README.md"] == b"mine"


def test_a_tokenizer_is_pushed_with_its_model(server: Server) -> None:
    tiny.model("EsmForMaskedLM").push_to_hub(NAME, token="secret", tokenizer=outplace.EsmTokenizer())
    model, tokenizer = outplace.load(NAME)
    assert type(model) is outplace.EsmForMaskedLM
    assert tokenizer("MKT")["input_ids"] == outplace.EsmTokenizer()("MKT")["input_ids"]


def test_weights_of_the_older_commit_are_deleted_and_other_files_stay(server: Server) -> None:
    model = tiny.model("EsmForMaskedLM")
    model.push_to_hub(NAME, token="secret", max_shard_size="20KB")
    server.repositories[NAME].commit({"notes.txt": b"mine", "training.safetensors": b"mine"})
    assert "model.safetensors.index.json" in held(server)
    model.push_to_hub(NAME, token="secret")
    stays = {"README.md", "config.json", "notes.txt", "training.safetensors"}
    assert held(server).keys() == {"model.safetensors"} | stays
    model.push_to_hub(NAME, token="secret", max_shard_size="20KB")
    assert "model.safetensors" not in held(server)
    loaded = outplace.EsmForMaskedLM.from_pretrained(NAME, strict=True)
    assert torch.equal(loaded.lm_head.dense.weight, model.lm_head.dense.weight)


def test_a_pull_request_leaves_main_alone(server: Server) -> None:
    server.repositories[NAME] = Repository({"README.md": b"mine"})
    address = tiny.model("EsmForMaskedLM").push_to_hub(
        NAME, token="other", create_pr=True, commit_message="Better weights"
    )
    assert address == f"{server.endpoint}/{NAME}/discussions/1"
    (request,) = server.repositories[NAME].pull_requests
    assert (request.title, request.author) == ("Better weights", "another")
    assert held(server) == {"README.md": b"mine"}
    outplace.EsmForMaskedLM.from_pretrained(NAME, revision="refs/pr/1", strict=True)


def test_a_branch_is_made_and_main_left_alone(server: Server) -> None:
    model = tiny.model("EsmForMaskedLM")
    for _ in range(2):
        model.push_to_hub(NAME, token="secret", revision="trial")
    assert held(server) == {}
    outplace.EsmForMaskedLM.from_pretrained(NAME, revision="trial", strict=True)


def test_a_private_repository_is_seen_by_its_owner_alone(server: Server) -> None:
    tiny.model("EsmForMaskedLM").push_to_hub(NAME, token="secret", private=True)
    outplace.EsmForMaskedLM.from_pretrained(NAME, token="secret")
    with pytest.raises(FileNotFoundError, match="it is private"):
        outplace.EsmForMaskedLM.from_pretrained(NAME, token="other", force_download=True)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("expired", r"the Hub refuses the login \(401\); log in with `hf auth login`"),
        ("other", r"the Hub forbids it \(403\); pass a token=… with the permission"),
    ],
)
def test_a_refusal_is_one_clear_error_and_nothing_is_made(server: Server, token: str, message: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"^cannot upload to {NAME}: {message}"):
        tiny.model("EsmForMaskedLM").push_to_hub(NAME, token=token)
    assert server.repositories == {}


def test_a_failing_hub_is_one_clear_error_and_main_is_as_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model("EsmForMaskedLM")
    model.push_to_hub(NAME, token="secret")
    before = server.repositories[NAME].head
    hurry(monkeypatch)
    server.play("failing", NAME, method="POST")
    with pytest.raises(FileNotFoundError, match=f"^cannot upload to {NAME}: the Hub fails"):
        model.half().push_to_hub(NAME, token="secret")
    assert server.repositories[NAME].head == before


def test_offline_is_one_clear_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    disconnect(monkeypatch)
    with pytest.raises(FileNotFoundError, match=f"^cannot upload to {NAME}: .*offline mode is enabled"):
        tiny.model("EsmForMaskedLM").push_to_hub(NAME, token="secret")
    assert server.requests == []
