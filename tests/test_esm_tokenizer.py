"""Proteins to token numbers: equal to upstream's, with offsets that it has not."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from outplace.models.esm.tokenizer import VOCABULARY
from outplace.models.tokenization import Tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

import outplace

ALPHABET = [
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-" * 3,
    *"Jj*lagvs1é\u4e2d🙂",
    " ",
    "\t",
    "\n",
    "\x1c",
    "\u3000",
    *VOCABULARY[:4],
    "<mask>",
    "<null_1>",
    "<MASK>",
    "<",
    ">",
]
NAMES = {
    "unk_token": "<unk>",
    "cls_token": "<cls>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}


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
def test_pairs_words_and_decoding_equal_upstreams_on_random_strings(upstream: Any) -> None:
    chooser, tokenizer = random.Random(1), outplace.EsmTokenizer()
    extras = {"return_token_type_ids": True, "return_special_tokens_mask": True}
    for _ in range(500):
        words = ["".join(chooser.choices(ALPHABET, k=chooser.randint(0, 8))) for _ in range(4)]
        pair = tokenizer(words[0], words[1], **extras)
        assert pair.data == dict(upstream(words[0], words[1], **extras))
        split = tokenizer(words, is_split_into_words=True)["input_ids"]
        assert split == upstream(words, is_split_into_words=True)["input_ids"]
        for skip in (False, True):
            assert tokenizer.decode(split, skip) == upstream.decode(split, skip_special_tokens=skip)


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


def test_lower_case_is_warned_of_once_a_call() -> None:
    tokenizer = outplace.EsmTokenizer()
    for texts in ("MKlag", ["MKlag", "<mask>a", "L"], ["<foo>"]):
        with pytest.warns(UserWarning, match="upper-case the sequence") as caught:
            tokenizer(texts)
        assert len(caught) == 1
        assert caught[0].filename == __file__


def test_nothing_is_warned_of_where_no_lower_case_letter_is_unknown() -> None:
    tokenizer = outplace.EsmTokenizer()
    tokenizer.add_tokens("[phos]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer(["L<mask>J*", "L[phos]J", "<null_1>"])


def test_each_side_loads_what_the_other_saves(folder: Path, upstream: Any, tmp_path: Path) -> None:
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(auto, transformers.EsmTokenizer)
    assert auto.mask_token_id == upstream.mask_token_id == 32
    upstream.save_pretrained(tmp_path)
    ours = outplace.EsmTokenizer.from_pretrained(tmp_path)
    assert ours.get_vocab() == outplace.EsmTokenizer().get_vocab()
    assert ours.special == outplace.EsmTokenizer().special


@pytest.mark.parametrize("saved_by", ["ours", "upstream"])
def test_added_tokens_survive_saving_on_both_sides(saved_by: str, upstream: Any, tmp_path: Path) -> None:
    source = outplace.EsmTokenizer() if saved_by == "ours" else copy.deepcopy(upstream)
    source.add_tokens(["[PHOS]", AddedToken("[X]", lstrip=True)])
    source.add_tokens(["<extra>"], special_tokens=True)
    source.add_special_tokens({"sep_token": "<sep>"})
    source.save_pretrained(tmp_path)
    ours = outplace.EsmTokenizer.from_pretrained(tmp_path)
    theirs = transformers.EsmTokenizer.from_pretrained(tmp_path)
    for tokenizer in (ours, theirs):
        assert (len(tokenizer), tokenizer.vocab_size, tokenizer.sep_token_id) == (37, 33, 36)
        ids = tokenizer("L[PHOS]A<sep> [X]<extra>", add_special_tokens=False)["input_ids"]
        assert ids == [4, 33, 5, 36, 34, 35]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "L [PHOS] A [X]"


def test_the_absence_of_an_end_token_survives_saving_on_both_sides(tmp_path: Path) -> None:
    outplace.EsmTokenizer(eos_token=None).save_pretrained(tmp_path)
    for loaded in (outplace.EsmTokenizer, transformers.EsmTokenizer):
        tokenizer = loaded.from_pretrained(tmp_path)
        assert (tokenizer.eos_token, tokenizer("LA")["input_ids"]) == (None, [0, 4, 5])


def test_special_tokens_can_be_set_to_others_of_the_vocabulary() -> None:
    tokenizer = outplace.EsmTokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    tokenizer.eos_token = None
    assert tokenizer("LA")["input_ids"] == [0, 4, 5]
    tokenizer.eos_token, tokenizer.unk_token = "<null_1>", "X"
    assert tokenizer("LJ")["input_ids"] == [0, 4, 24, 31]
    with pytest.raises(ValueError, match="cls_token is '<s>', which is not in the vocabulary"):
        tokenizer.cls_token = "<s>"
    assert tokenizer.cls_token == "<cls>"
    with pytest.raises(AttributeError, match="set that"):
        tokenizer.pad_token_id = 5


def test_a_blank_line_of_a_vocabulary_counts_but_is_never_found(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n\n")
    ours = outplace.EsmTokenizer.from_pretrained(tmp_path)
    theirs = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    assert len(ours) == len(theirs) == 34
    assert ours("LAG JJ")["input_ids"] == theirs("LAG JJ")["input_ids"] == [0, 4, 5, 6, 3, 2]


def test_an_unknown_option_of_loading_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="revison"):
        outplace.EsmTokenizer.from_pretrained(folder, revison="main")  # type: ignore[call-arg]


def test_a_config_whose_added_token_is_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text((folder / "vocab.txt").read_text())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": {"40": {"content": "[P]"}}}))
    with pytest.raises(ValueError, match=r"'\[P\]' has the number 40"):
        outplace.EsmTokenizer.from_pretrained(tmp_path)
    config.write_text(json.dumps({"mask_token": {"lstrip": True}}))
    with pytest.raises(ValueError, match=re.escape(str(config))):
        outplace.EsmTokenizer.from_pretrained(tmp_path)


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


def test_pairs_of_any_lengths_are_cut_as_upstreams(upstream: Any) -> None:
    tokenizer = outplace.EsmTokenizer()
    for first in range(1, 7):
        for second in range(1, 7):
            for limit in range(4, first + second + 3):
                options = {"truncation": True, "max_length": limit}
                found = tokenizer("L" * first, "A" * second, **options)["input_ids"]
                assert found == upstream("L" * first, "A" * second, **options)["input_ids"]


def fast_call(chooser: random.Random) -> tuple[Any, Any, dict[str, Any]]:
    """Texts, pairs and options that a `tokenizers`-based tokenizer of upstream accepts."""

    def text() -> str:
        return "".join(chooser.choices("LAGVJ <>a", k=chooser.randint(1, 14)))

    words, paired = chooser.random() < 0.3, chooser.random() < 0.5
    texts, pairs = ([[text(), text()] if words else text() for _ in range(3)] for _ in range(2))
    options: dict[str, Any] = {
        "is_split_into_words": words,
        "add_special_tokens": chooser.random() < 0.7,
        "padding": chooser.choice([False, True, "max_length"]),
        "truncation": chooser.choice([False, True, "only_first", "only_second"] if paired else [False, True]),
        "max_length": chooser.randint(5, 8) * 2,
        "pad_to_multiple_of": chooser.choice([None, 2]),
        "return_overflowing_tokens": chooser.random() < 0.5,
        "return_token_type_ids": True,
        "return_special_tokens_mask": True,
        "return_offsets_mapping": True,
    }
    options["stride"] = chooser.randint(0, 2) if options["truncation"] is True else 0
    return texts, pairs if paired else None, options


@pytest.mark.filterwarnings("ignore:.*max_length. is ignored")
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_base_equals_upstreams_fast_tokenizer_under_any_options(side: str) -> None:
    source = outplace.EsmTokenizer().backend.to_str()
    ours = Tokenizer(FastTokenizer.from_str(source), NAMES, padding_side=side)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer.from_str(source), padding_side=side, **NAMES
    )
    chooser, compared = random.Random(2), 0
    for _ in range(300):
        texts, pairs, options = fast_call(chooser)
        try:
            expected = theirs(texts, pairs, **options)
        except Exception:  # one text alone cannot give all the tokens
            continue
        found, compared = ours(texts, pairs, **options), compared + 1
        assert found.data == dict(expected)
        for row in range(len(found["input_ids"])):
            for name in ("tokens", "word_ids", "sequence_ids"):
                assert getattr(found, name)(row) == getattr(expected, name)(row)
            for token in range(len(found.tokens(row))):
                assert found.token_to_chars(row, token) == expected.token_to_chars(row, token)
            for text in range(1 if pairs is None else 2):
                for char in range(14):
                    assert found.char_to_token(row, char, text) == expected.char_to_token(row, char, text)
    assert compared > 200


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
    assert (pair.char_to_token(1), pair.token_to_chars(2), pair.token_to_chars(0)) == (2, (1, 2), None)


def test_padding_leaves_an_unwanted_attention_mask_out() -> None:
    found = outplace.EsmTokenizer()(
        ["LA", "L"], padding=True, return_attention_mask=False, return_length=True
    )
    assert found == {"input_ids": [[0, 4, 5, 2], [0, 4, 2, 1]], "length": [4, 3]}


def test_it_serves_a_data_collator() -> None:
    tokenizer = outplace.EsmTokenizer()
    rows = [tokenizer("LAG") | {"labels": 1}, tokenizer("LAGVS") | {"labels": 0}]
    batch = transformers.DataCollatorWithPadding(tokenizer)([dict(row) for row in rows])
    assert batch["input_ids"].tolist() == [[0, 4, 5, 6, 2, 1, 1], [0, 4, 5, 6, 7, 8, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert batch["labels"].tolist() == [1, 0]


def test_it_serves_collators_that_mask_and_that_pad_labels() -> None:
    tokenizer = outplace.EsmTokenizer()
    torch.manual_seed(0)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    batch = collate([dict(tokenizer("LAGVSERT")), dict(tokenizer("LAG"))])
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    assert batch["labels"][1, 4:].tolist() == [-100] * 6
    assert (batch["labels"] != -100).any()
    rows = [dict(tokenizer(text)) | {"labels": [7] * (len(text) + 2)} for text in ("LAG", "L")]
    batch = transformers.DataCollatorForTokenClassification(tokenizer)(rows)
    assert batch["labels"].tolist() == [[7] * 5, [7, 7, 7, -100, -100]]


def test_pad_takes_one_row_tensors_and_a_side() -> None:
    tokenizer = outplace.EsmTokenizer()
    one = tokenizer.pad(tokenizer("L"), padding="max_length", max_length=5)
    assert one == {"input_ids": [0, 4, 2, 1, 1], "attention_mask": [1, 1, 1, 0, 0]}
    rows = [{"input_ids": torch.tensor([0, 4, 2])}, {"input_ids": torch.tensor([0, 2])}]
    left = tokenizer.pad(rows, padding_side="left", return_attention_mask=False, return_tensors="pt")
    assert list(left) == ["input_ids"]
    assert left["input_ids"].tolist() == [[0, 4, 2], [1, 0, 2]]


def test_the_mask_of_special_tokens_equals_upstreams(upstream: Any) -> None:
    ids = [0, 4, 32, 3, 31, 2, 1]
    expected = upstream.get_special_tokens_mask(ids, already_has_special_tokens=True)
    assert outplace.EsmTokenizer().get_special_tokens_mask(ids, already_has_special_tokens=True) == expected


def test_threads_with_other_options_do_not_meet() -> None:
    tokenizer = outplace.EsmTokenizer()
    jobs: list[tuple[list[str], dict[str, Any]]] = [
        (
            ["LAGVSERTID" * (1 + i % 7), "MK"],
            {
                "truncation": i % 3 > 0,
                "max_length": 3 + i % 20,
                "padding": (False, True, "max_length")[i % 5 % 3],
                "return_overflowing_tokens": i % 2 > 0,
            },
        )
        for i in range(400)
    ]
    expected = [tokenizer(texts, **options) for texts, options in jobs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: tokenizer(job[0], **job[1]), jobs))
    assert found == expected


def test_added_tokens_are_found_whole_and_copies_are_equal() -> None:
    tokenizer = outplace.EsmTokenizer()
    assert tokenizer.add_tokens(["[PHOS]"]) == 1
    assert tokenizer.add_special_tokens({"sep_token": "<sep>"}) == 1
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.sep_token_id) == (35, 33, 34)
    for other in (tokenizer, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other("LA[PHOS]G<sep>")["input_ids"] == [0, 4, 5, 33, 6, 34, 2]
    encoded = pickle.loads(pickle.dumps(tokenizer(["L", "LA"])))
    assert (encoded.input_ids[1], encoded.word_ids(1)) == ([0, 4, 5, 2], [None, 0, 1, None])


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
        (lambda t: t(["L", "A"], "GV"), "text_pair is one alone"),
        (lambda t: t(["L", 5], is_split_into_words=True), "a word is of type int"),
        (lambda t: t("L", is_split_into_words=True), "must be a list of words"),
        (lambda t: t("LAGV", truncation=True, max_length=4, stride=2), "stride is 2"),
        (
            lambda t: t("L", truncation=True, max_length=6, padding=True, pad_to_multiple_of=4),
            "multiple of 4",
        ),
        (lambda t: t.pad({"labels": [1]}), "no input_ids to pad, but labels"),
        (lambda t: t.pad(t("L"), padding_side="up"), "padding_side is 'up'"),
        (lambda t: t.get_special_tokens_mask([4], already_has_special_tokens=False), "already"),
        (lambda t: t(["L", "LA"], return_tensors="pt"), "input_ids makes no tensor: .* different lengths"),
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
