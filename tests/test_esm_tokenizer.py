"""Proteins to token numbers: equal to upstream's, with offsets that it has not."""

from __future__ import annotations

import copy
import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from outplace.models.esm.tokenizer import VOCABULARY

import outplace

ALPHABET = [
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-" * 3,
    *"Jj*lagvs1é\u4e2d🙂",
    " ",
    "\t",
    "\n",
    *VOCABULARY[:4],
    "<mask>",
    "<null_1>",
    "<MASK>",
    "<",
    ">",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    outplace.EsmTokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def upstream(folder: Path) -> Any:
    return transformers.EsmTokenizer.from_pretrained(folder)


@pytest.mark.filterwarnings("ignore:lower-case")
def test_ids_equal_upstreams_on_20000_random_strings(upstream: Any) -> None:
    chooser, tokenizer = random.Random(0), outplace.EsmTokenizer()
    texts = ["".join(chooser.choices(ALPHABET, k=chooser.randint(0, 30))) for _ in range(20_000)]
    found = tokenizer(texts)["input_ids"]
    assert found == [upstream(text)["input_ids"] for text in texts]
    assert tokenizer.batch_decode(found[:200]) == [upstream.decode(ids) for ids in found[:200]]


@pytest.mark.filterwarnings("ignore:lower-case")
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("MKTVRQG", [0, 20, 15, 11, 7, 10, 16, 6, 2]),
        ("KALTA<mask>ISQP", [0, 15, 5, 4, 11, 5, 32, 12, 8, 16, 14, 2]),
        ("K A <mask> I S Q", [0, 15, 5, 32, 12, 8, 16, 2]),
        ("LAGVS", [0, 4, 5, 6, 7, 8, 2]),
        ("WCB", [0, 22, 23, 25, 2]),
        ("lagvs", [0, 3, 2]),
        ("LJJA", [0, 4, 3, 5, 2]),
        ("L*", [0, 4, 3, 2]),
        ("M-A.C", [0, 20, 30, 5, 29, 23, 2]),
        ("<MASK>", [0, 3, 20, 5, 8, 15, 3, 2]),
        ("", [0, 2]),
    ],
)
def test_published_and_known_ids(text: str, ids: list[int]) -> None:
    assert outplace.EsmTokenizer()(text)["input_ids"] == ids


@pytest.mark.filterwarnings("ignore:lower-case")
@given(st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join))
def test_offsets_rise_without_overlap_and_show_each_token(text: str) -> None:
    encoded = outplace.EsmTokenizer()(text, return_offsets_mapping=True)
    end = 0
    for token, (start, stop) in list(zip(encoded.tokens(), encoded["offset_mapping"], strict=True))[1:-1]:
        assert end <= start < stop
        assert token in ("<unk>", text[start:stop])
        end = stop


def test_lower_case_is_warned_of_once_a_text() -> None:
    tokenizer = outplace.EsmTokenizer()
    with pytest.warns(UserWarning, match="upper-case the sequence") as caught:
        tokenizer("MKlag")
    assert len(caught) == 1


def test_each_side_loads_what_the_other_saves(folder: Path, upstream: Any, tmp_path: Path) -> None:
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(auto, transformers.EsmTokenizer)
    assert auto.mask_token_id == upstream.mask_token_id == 32
    upstream.save_pretrained(tmp_path)
    ours = outplace.EsmTokenizer.from_pretrained(tmp_path)
    assert ours.get_vocab() == outplace.EsmTokenizer().get_vocab()
    assert ours.special == outplace.EsmTokenizer().special


def test_a_checkpoints_own_vocabulary_and_special_tokens_are_used(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[C]\n[P]\n[U]\n[M]\nA\nG\n")
    names = {
        "cls_token": "[C]",
        "pad_token": "[P]",
        "unk_token": "[U]",
        "mask_token": "[M]",
        "eos_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(names | {"model_max_length": 5, "padding_side": "left"})
    )
    tokenizer = outplace.EsmTokenizer.from_pretrained(tmp_path)
    assert tokenizer(["AG[M]", "A"], padding=True)["input_ids"] == [[0, 4, 5, 3], [1, 1, 0, 4]]
    assert tokenizer("AGAGAGAG", truncation=True)["input_ids"] == [0, 4, 5, 4, 5]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == (None, None, 6)
    with pytest.raises(ValueError, match="needs an eos_token"):
        tokenizer("A", "G")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "options",
    [
        {"padding": True},
        {"padding": "max_length", "max_length": 9},
        {"padding": True, "pad_to_multiple_of": 8},
    ],
)
def test_padding_equals_upstreams(side: str, options: dict[str, Any], upstream: Any) -> None:
    ours, theirs = outplace.EsmTokenizer(padding_side=side), copy.deepcopy(upstream)
    theirs.padding_side = side
    texts = ["LAG", "LAGVSE", ""]
    found, expected = (
        ours(texts, return_tensors="pt", **options),
        theirs(texts, return_tensors="pt", **options),
    )
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(found[key], expected[key])


@pytest.mark.parametrize("truncation", [True, "only_first", "only_second", "longest_first"])
@pytest.mark.parametrize("pair", [None, "VSER"])
def test_truncation_keeps_max_length_and_the_order(truncation: Any, pair: str | None, upstream: Any) -> None:
    if truncation == "only_second" and pair is None:
        with pytest.raises(ValueError, match="cannot cut"):
            outplace.EsmTokenizer()("LAGVSERTID", None, truncation=truncation, max_length=5)
        return
    limit = 13 if truncation == "only_second" else 11
    options = {"truncation": truncation, "max_length": limit}
    ids = outplace.EsmTokenizer()("LAGVSERT", pair, **options)["input_ids"]
    assert ids == upstream("LAGVSERT", pair, **options)["input_ids"]
    assert len(ids) <= limit


def test_what_is_cut_off_becomes_rows_that_share_a_stride() -> None:
    found = outplace.EsmTokenizer()(
        ["LAGVSERTID", "MK"], truncation=True, max_length=6, stride=1, return_overflowing_tokens=True
    )
    assert [row[1:-1] for row in found["input_ids"]] == [
        [4, 5, 6, 7],
        [7, 8, 9, 10],
        [10, 11, 12, 13],
        [20, 15],
    ]
    assert found["overflow_to_sample_mapping"] == [0, 0, 0, 1]


def test_words_pairs_and_masks_of_special_tokens() -> None:
    tokenizer = outplace.EsmTokenizer()
    words = tokenizer(
        ["LA", "G"], is_split_into_words=True, return_special_tokens_mask=True, return_length=True
    )
    assert words.word_ids() == [None, 0, 0, 1, None]
    assert words["special_tokens_mask"] == [1, 0, 0, 0, 1]
    assert words["length"] == 5
    pair = tokenizer("LA", "G", return_token_type_ids=True)
    assert pair["input_ids"] == [0, 4, 5, 2, 6, 2]
    assert pair.sequence_ids() == [None, 0, 0, None, 1, None]
    assert pair.char_to_token(0, 0, 1) == 4


def test_it_serves_a_data_collator() -> None:
    tokenizer = outplace.EsmTokenizer()
    rows = [tokenizer("LAG") | {"labels": 1}, tokenizer("LAGVS") | {"labels": 0}]
    batch = transformers.DataCollatorWithPadding(tokenizer)([dict(row) for row in rows])
    assert batch["input_ids"].tolist() == [[0, 4, 5, 6, 2, 1, 1], [0, 4, 5, 6, 7, 8, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert batch["labels"].tolist() == [1, 0]


def test_threads_with_other_options_do_not_meet() -> None:
    tokenizer = outplace.EsmTokenizer()
    jobs = [("LAGVSERTID" * (1 + i % 7), {"truncation": True, "max_length": 3 + i % 20}) for i in range(400)]
    expected = [tokenizer(text, **options)["input_ids"] for text, options in jobs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: tokenizer(job[0], **job[1])["input_ids"], jobs))
    assert found == expected


def test_added_tokens_are_found_whole_and_copies_are_equal() -> None:
    tokenizer = outplace.EsmTokenizer()
    assert tokenizer.add_tokens(["[PHOS]"]) == 1
    assert tokenizer.add_special_tokens({"sep_token": "<sep>"}) == 1
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.sep_token_id) == (35, 33, 34)
    for other in (tokenizer, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other("LA[PHOS]G<sep>")["input_ids"] == [0, 4, 5, 33, 6, 34, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t("L", padding="longer"), "padding is 'longer'"),
        (lambda t: t("L", truncation="both"), "truncation is 'both'"),
        (lambda t: t("L", padding="max_length"), "needs a max_length"),
        (lambda t: t(5), "of type int"),
        (lambda t: t(b"LA"), "of type bytes"),
        (lambda t: t(["L", 5]), "of type int"),
        (lambda t: t(["L", "A"], ["G"]), "2 texts and 1"),
        (lambda t: t(["L", "LA"], return_tensors="pt"), "different lengths"),
        (lambda t: t("L", return_tensors="np"), "return_tensors is 'np'"),
        (lambda t: t.add_special_tokens({"end": "x"}), "'end' is no special token"),
        (lambda t: type(t)(mask_token="<m>"), "mask_token is '<m>'"),
        (lambda t: type(t)(padding_side="up"), "padding_side is 'up'"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(outplace.EsmTokenizer())


def test_a_vocabulary_file_that_is_none_is_named(tmp_path: Path) -> None:
    for content, message in (("", "holds no tokens"), ("A\nG\nA\n", "'A' more than once")):
        (tmp_path / "vocab.txt").write_text(content)
        with pytest.raises(ValueError, match=message):
            outplace.EsmTokenizer(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no vocab\.txt"):
        outplace.EsmTokenizer.from_pretrained(tmp_path)
