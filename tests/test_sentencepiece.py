"""SentencePiece's file, read without it: what it says, and what its character map does."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outplace.models.deberta_v2.sentencepiece import BYTE, CONTROL, CharacterMap, read_model
from pieces import KINDS, hard_texts, train

MAPS = {"nmt_nfkc": "nmt_nfkc", "nmt_nfkc_cf": "case folding", "identity": "identity"}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_scores_types_and_settings_are_what_sentencepiece_reads(kind: str) -> None:
    trained = train(kind)
    model, processor = read_model(trained.content), trained.processor
    numbers = range(processor.get_piece_size())
    assert [piece for piece, _, _ in model.pieces] == [processor.id_to_piece(i) for i in numbers]
    assert [score for _, score, _ in model.pieces] == [processor.get_score(i) for i in numbers]
    kinds = [kind for _, _, kind in model.pieces]
    assert [kind == CONTROL for kind in kinds] == [processor.is_control(i) for i in numbers]
    assert [kind == BYTE for kind in kinds] == [processor.is_byte(i) for i in numbers]
    assert model.byte_fallback == (kind == "byte fallback")
    assert model.add_dummy_prefix == (kind != "no space in front")
    assert bool(model.character_map) == (kind != "identity")


@pytest.mark.parametrize("rule", MAPS)
def test_the_character_map_does_what_sentencepiece_does(rule: str) -> None:
    trained = train(MAPS[rule])
    characters = CharacterMap(read_model(trained.content).character_map)
    for text in hard_texts(3000, seed=len(rule)):
        assert characters(text).text == trained.normalizer.normalize(text), ascii(text)


def test_the_longest_key_is_replaced_and_what_is_protected_stays() -> None:
    content = read_model(train("nmt_nfkc").content).character_map
    decomposed = "e\u0302\u0301 \u1112\u1161\u11ab ﬁ\u0301"
    assert CharacterMap(content)(decomposed).text == "ế 한 fi\u0301"
    assert CharacterMap(content, ["ﬁ"])("ﬁ ﬀ").text == "ﬁ ff"


@given(st.text(st.sampled_from("aeﬁ…½\u0301\u0302\x01\u3000Ａ한\u1161"), max_size=12))
def test_each_character_comes_from_where_it_was(text: str) -> None:
    characters = CharacterMap(read_model(train("nmt_nfkc").content).character_map)
    made = characters(text)
    spans = [made.span(i, i + 1) for i in range(len(made.text))]
    assert spans == sorted(spans)
    for i, span in enumerate(spans):
        first, last = spans.index(span), len(spans) - spans[::-1].index(span)
        assert characters(text[slice(*span)]).text == made.text[first:last], (text, i)


@pytest.mark.parametrize("kind", ["nmt_nfkc", "byte fallback"])
def test_a_damaged_file_is_read_or_refused_by_one_kind_of_error(kind: str) -> None:
    whole = train(kind).content
    rng = random.Random(0)
    begins = (0, len(whole) - 300, len(read_model(whole).character_map) // 2)
    refused = 0
    for trial in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at = rng.choice(begins) + rng.randrange(300)
            damaged[at] = rng.randrange(256)
        content = bytes(damaged[: rng.randrange(len(damaged))] if trial % 4 == 0 else damaged)
        try:
            CharacterMap(read_model(content).character_map)("ﬁ e\u0302\u0301 Ａ\u3000")
        except ValueError:
            refused += 1
    assert 0 < refused < 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no pieces"),
        (b"\x0a\xff", "inside a number"),
        (b"\x0a" + b"\xff" * 11, "longer than ten bytes"),
        (b"\x0a\x7f\x00", "reaches past the end"),
        (b"\x0b", "wire type 3"),
        (b"\x08\x01", "wire type 0, not 2"),
    ],
)
def test_what_is_no_model_file_is_refused_with_the_reason(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model(content)


@pytest.mark.parametrize(
    "content",
    [b"\x01", struct.pack("<I", 400) + b"\0" * 8, struct.pack("<I", 3) + b"\0" * 8, struct.pack("<I", 0)],
)
def test_a_character_map_of_the_wrong_size_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="character map"):
        CharacterMap(content)


def test_a_map_that_leads_nowhere_or_in_circles_does_no_harm() -> None:
    nothing = 0x80000000
    far = [1 << 10, *[nothing] * 95, 0xFFFFFC00 | ord("a")]
    circle = [0, *[nothing] * 96, ord("a") << 10 | ord("a")]
    for units in (far, circle):
        content = struct.pack(f"<{len(units) + 1}I", 4 * len(units), *units)
        assert CharacterMap(content)("aaaa").text == "aaaa"
