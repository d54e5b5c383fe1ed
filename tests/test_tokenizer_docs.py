"""The table of `docs/tokenizers.md`, row by row, and the numbers that upstream's own tests expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from pieces import train

import outplace

DOCS = Path(__file__).parents[1] / "docs" / "tokenizers.md"
UNKNOWN = 3

# By the first cell: the text, what SentencePiece is said to make of it, whether upstream does not know it.
ROWS = {
    "`born free`": ("born free", "born free", False),
    "`ﬁ` ligature": ("ﬁ", "fi", True),
    "`Ａ` full width": ("Ａ", "A", True),
    "`…`": ("…", "...", True),
    "`born` no-break space `free`": ("born\u00a0free", "born free", True),
    "`born` ideographic space `free`": ("born\u3000free", "born free", True),
    "`㎏`": ("㎏", "kg", True),
    "`e` with two combining marks": ("e\u0302\u0301", "ế", False),
    "pieces that spell out `[MASK]` in full width": ("［ＭＡＳＫ］", "[MASK]", True),
}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spm")
    (folder / "spm.model").write_bytes(train("nmt_nfkc").content)
    theirs = transformers.DebertaV2Tokenizer.from_pretrained(folder)
    return {"ours": outplace.DebertaV2Tokenizer.from_pretrained(folder), "theirs": theirs}


def test_the_table_has_these_rows() -> None:
    table = DOCS.read_text(encoding="utf-8").split("<!--")[1]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    assert cells[2:] == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_happens(row: str, sides: dict[str, Any]) -> None:
    text, normal, unknown_upstream = ROWS[row]
    processor = train("nmt_nfkc").processor
    ours, theirs = (sides[side](text, add_special_tokens=False)["input_ids"] for side in ("ours", "theirs"))
    assert ours == processor.encode(text)
    assert processor.decode(ours).replace(" ⁇ ", "") in normal
    assert (UNKNOWN in theirs and theirs != ours) == unknown_upstream


@pytest.mark.parametrize(
    ("text", "broken"),
    [("a <ctl> b", ["<", "ctl", ">"]), ("<0x41>", ["<", "0x41>"])],
    ids=["control", "byte"],
)
def test_a_text_that_spells_out_a_control_or_byte_piece_is_a_text(
    text: str, broken: list[str], tmp_path: Path
) -> None:
    kind = "symbols" if "ctl" in text else "byte fallback"
    (tmp_path / "spm.model").write_bytes(train(kind).content)
    tokenizer = outplace.DebertaV2Tokenizer.from_pretrained(tmp_path)
    literal = tokenizer.convert_tokens_to_ids("<ctl>" if kind == "symbols" else "<0x41>")
    assert literal != UNKNOWN
    assert literal not in tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.hub
@pytest.mark.parametrize(
    "checkpoint", ["microsoft/deberta-base", "microsoft/deberta-v2-xlarge"], ids=["V1", "V2"]
)
def test_numbers_of_the_published_vocabularies_are_those_upstream_expects(checkpoint: str) -> None:
    goldens = json.loads((Path(__file__).parent / "data" / "token_goldens.json").read_text())[checkpoint]
    tokenizer = outplace.load_tokenizer(checkpoint)
    for text, numbers in goldens["special"].items():
        assert tokenizer(text)["input_ids"] == numbers
    for text, numbers in goldens["plain"].items():
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == numbers
