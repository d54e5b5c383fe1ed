"""Text to byte-level BPE tokens, as transformers 4 had them."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import TEXTS, hard_texts
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

import outplace


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vocab.json` and `merges.txt` of a BPE trained on texts of many languages."""
    path = tmp_path_factory.mktemp("bpe")
    backend = FastTokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    trainer = BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
    backend.train_from_iterator(TEXTS, trainer)
    backend.model.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> outplace.DebertaTokenizer:
    return outplace.DebertaTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def upstream(folder: Path) -> Any:
    return transformers.DebertaTokenizer.from_pretrained(folder)


def test_single_texts_are_encoded_as_upstream_encodes_them(
    tokenizer: outplace.DebertaTokenizer, upstream: Any
) -> None:
    texts = [*TEXTS, "", " ", *hard_texts(3000, seed=1)]
    ours, theirs = (x(texts, return_offsets_mapping=True) for x in (tokenizer, upstream))
    for key in ("input_ids", "token_type_ids", "attention_mask", "offset_mapping"):
        assert ours[key] == theirs[key]


def test_spans_are_in_order_and_their_bytes_are_the_tokens(tokenizer: outplace.DebertaTokenizer) -> None:
    back = {character: number for number, character in _byte_alphabet().items()}
    for text in [*TEXTS, *hard_texts(1000, seed=2)]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        assert spans == sorted(spans)
        whole = b""
        for token, (begin, end) in zip(encoded.tokens(), spans, strict=True):
            written = bytes(back[character] for character in token)
            assert written in text[begin:end].encode()
            whole += written
        assert whole == text.encode()


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's: a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def test_a_pair_is_that_of_transformers_4(tokenizer: outplace.DebertaTokenizer, upstream: Any) -> None:
    ours = tokenizer("born free", "in rights")
    a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("born free", "in rights"))
    assert ours["input_ids"] == [1, *a, 2, *b, 2]
    assert ours["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    # transformers 5 doubles the separator and knows one type.
    assert upstream("born free", "in rights")["input_ids"] == [1, *a, 2, 2, *b, 2]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    padding=st.sampled_from([False, True, "max_length"]),
    truncation=st.sampled_from([False, True, "only_first"]),
    max_length=st.integers(5, 60).map(lambda number: 2 * number),
    stride=st.integers(0, 2),
    multiple=st.sampled_from([None, 2]),
    overflow=st.booleans(),
    side=st.sampled_from(["left", "right"]),
)
def test_the_call_gives_what_upstream_gives(
    folder: Path, tokenizer: outplace.DebertaTokenizer, upstream: Any, texts: list[str], **drawn: Any
) -> None:
    options = {
        "padding": drawn["padding"],
        "truncation": drawn["truncation"],
        "max_length": drawn["max_length"],
        "stride": drawn["stride"],
        "pad_to_multiple_of": drawn["multiple"],
        "return_special_tokens_mask": True,
        "return_overflowing_tokens": drawn["overflow"] and drawn["truncation"] is not False,
    }
    ours, theirs = copy.copy(tokenizer), upstream
    for x in (ours, theirs):
        x.padding_side = x.truncation_side = drawn["side"]
    expected = theirs(texts, **options)
    given = ours(texts, **options)
    for key, value in expected.items():
        assert given[key] == value, key


@pytest.mark.parametrize("kept", [["vocab.json", "merges.txt"], ["tokenizer.json"]])
def test_what_we_save_loads_as_it_was_here_and_upstream(
    kept: list[str], tokenizer: outplace.DebertaTokenizer, tmp_path: Path
) -> None:
    before = copy.deepcopy(tokenizer)
    before.add_tokens(["<name>", AddedToken("[GENE]", special=True)])
    before.save_pretrained(tmp_path)
    for path in tmp_path.iterdir():
        if path.name not in (*kept, "tokenizer_config.json"):
            path.unlink()
    texts = [*TEXTS, *hard_texts(200, seed=3), "a <name> and [GENE] [MASK] "]
    wanted = before(texts)["input_ids"]
    after = outplace.DebertaTokenizer.from_pretrained(tmp_path)
    assert after(texts)["input_ids"] == wanted
    assert (len(after), after.vocab_size) == (len(before), before.vocab_size)
    assert transformers.DebertaTokenizer.from_pretrained(tmp_path)(texts)["input_ids"] == wanted


def test_the_mask_takes_the_space_before_it(tokenizer: outplace.DebertaTokenizer) -> None:
    encoded = tokenizer("low [MASK] er", return_offsets_mapping=True)
    at = encoded["input_ids"].index(tokenizer.mask_token_id)
    assert encoded["offset_mapping"][at] == (3, 10)
    assert encoded["offset_mapping"][at - 1][1] == 3


def test_words_one_by_one_need_a_space_in_front(folder: Path, tokenizer: outplace.DebertaTokenizer) -> None:
    words = ["born", "free"]
    with pytest.raises(ValueError, match="add_prefix_space=True"):
        tokenizer(words, is_split_into_words=True)
    spaced = outplace.DebertaTokenizer.from_pretrained(folder, add_prefix_space=True)
    encoded = spaced(words, is_split_into_words=True)
    assert encoded["input_ids"] == tokenizer(" born free")["input_ids"]
    assert {word for word in encoded.word_ids() if word is not None} == {0, 1}


def test_any_text_comes_back_from_its_tokens(tokenizer: outplace.DebertaTokenizer) -> None:
    for text in [*TEXTS, *hard_texts(300, seed=4)]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.batch_decode(tokenizer(TEXTS)["input_ids"], skip_special_tokens=True) == TEXTS


def test_copies_and_pickles_are_the_same(tokenizer: outplace.DebertaTokenizer) -> None:
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert other(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("merges.txt", b"a b c\n", "two tokens a line"),
        ("merges.txt", b"zzz qqq\n", "do not fit"),
        ("vocab.json", b'{"a": "b"}', "do not fit"),
        ("vocab.json", b"[1]", r"vocab\.json"),
        ("tokenizer.json", b'{"model": {"type": "Unigram"}}', "type 'Unigram'"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": 3}}', "malformed"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(
    folder: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        outplace.DebertaTokenizer.from_pretrained(tmp_path)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json, and not both"):
        outplace.DebertaTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="give a vocab_file and a merges_file"):
        outplace.DebertaTokenizer(folder / "vocab.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta"}))
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert isinstance(outplace.load_tokenizer(tmp_path), outplace.DebertaTokenizer)
