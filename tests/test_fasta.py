"""FASTA as it is found."""

from __future__ import annotations

import gzip
import io
import string
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outplace.fasta import FastaError, Record, read_fasta

DATA = Path(__file__).parent / "data"
NANO_DATA = Path(__file__).parents[1] / "benchmarks" / "nano" / "data"


def read(content: bytes) -> list[Record]:
    return list(read_fasta(io.BufferedReader(io.BytesIO(content))))


def sequences(content: bytes) -> list[tuple[str, str]]:
    return [(record.name, record.sequence) for record in read(content)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b">a\nMKT\n", [("a", "MKT")], id="plain"),
        pytest.param(b">a\nMKT", [("a", "MKT")], id="no line end at the end"),
        pytest.param(b">a\nMK\nT\n>b\nW\n", [("a", "MKT"), ("b", "W")], id="wrapped"),
        pytest.param(b">a\nmKt\n", [("a", "MKT")], id="lower case"),
        pytest.param(b"\n\n>a\n\nMK\n  \nT\n\n", [("a", "MKT")], id="blank lines"),
        pytest.param(b">a\r\nMK\r\nT\r\n", [("a", "MKT")], id="CRLF"),
        pytest.param(b">a\rMK\rT\r>b\rW", [("a", "MKT"), ("b", "W")], id="CR"),
        pytest.param(b">a\n  MKT LLV\t\n", [("a", "MKTLLV")], id="white space within"),
        pytest.param(b">a\nMKT*\n", [("a", "MKT")], id="stop at the end"),
        pytest.param(b">a\nMKT*\n*\n", [("a", "MKT")], id="stops at the end, wrapped"),
        pytest.param(b">a\nMK*--\n", [("a", "MK")], id="stop before gaps at the end"),
        pytest.param(b">a\nMK*T*\n", [("a", "MKXT")], id="stop within"),
        pytest.param(b">a\nM-K..T\n", [("a", "MKT")], id="gaps"),
        pytest.param(b">a\nBJOUXZ\n", [("a", "BJOUXZ")], id="rare letters"),
        pytest.param(b"\xef\xbb\xbf>a\nM\n", [("a", "M")], id="byte-order mark"),
        pytest.param(b"> a b\nM\n", [("a", "M")], id="space before the name"),
        pytest.param(b">a\tb\nM\n", [("a", "M")], id="tab after the name"),
        pytest.param(b">\nM\n", [("", "M")], id="no name"),
        pytest.param(b">a>b\nM\n", [("a>b", "M")], id="> in a name"),
        pytest.param(b">a\nM\n>a\nK\n", [("a", "M"), ("a", "K")], id="a name twice"),
        pytest.param(">protéine\nM\n".encode(), [("protéine", "M")], id="UTF-8"),
        pytest.param(b">prot\xe9ine\nM\n", [("protéine", "M")], id="Latin-1"),
        pytest.param(b"", [], id="empty"),
        pytest.param(b"\n\n", [], id="only blank lines"),
        pytest.param(b">a\n" + b"M" * 10_000, [("a", "M" * 10_000)], id="ten thousand residues"),
        pytest.param(gzip.compress(b">a\nMKT\n"), [("a", "MKT")], id="gzip"),
        pytest.param(
            gzip.compress(b">a\nMK") + gzip.compress(b"T\n"), [("a", "MKT")], id="gzip of several members"
        ),
    ],
)
def test_what_is_found_in_files_is_read(content: bytes, expected: list[tuple[str, str]]) -> None:
    assert sequences(content) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\nMKT\n>a\nM\n", r"line 2: 'MKT' stands before the first '>'", id="no header"),
        pytest.param(b"x" * 1000, r"line 1: 'x{40}…' stands before", id="long text"),
        pytest.param(b">a\nM\n>b x\n>c\nM\n", r"line 3: record 'b' has no residues", id="no residues"),
        pytest.param(b">a\nM\n>b", r"line 3: record 'b' has no residues", id="a header at the end"),
        pytest.param(b">a\n-.*\n", r"line 1: record 'a' has no residues", id="nothing but gaps and stops"),
        pytest.param(b">a\nMKT\nM1T\n", r"line 3: '1' is no residue, in record 'a'", id="a digit"),
        pytest.param(b">a\nMK?\n", r"line 2: '\?' is no residue", id="a question mark"),
        pytest.param(b">a\nMK\xe9\n", r"line 2: 'é' is no residue", id="a letter beyond Z"),
        pytest.param(">a\nMİ\n".encode(), r"'İ' is no residue", id="a wide letter"),
        pytest.param(b">a\nM\0K\n", r"NUL bytes: a binary file", id="NUL"),
        pytest.param(b"\x7fELF\0\0", r"NUL bytes: a binary file", id="binary"),
        pytest.param(">a\nM\n".encode("utf-16"), r"NUL bytes: a binary file", id="UTF-16"),
        pytest.param(gzip.compress(b">a\nMKT\n")[:-9], r"incomplete gzip", id="cut gzip"),
        pytest.param(b"\x1f\x8bnonsense", r"damaged or incomplete gzip", id="no gzip after its magic"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(content: bytes, message: str) -> None:
    with pytest.raises(FastaError, match=message):
        read(content)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_text("MKT")
    with pytest.raises(FastaError, match=r"x\.fasta, line 1"):
        list(read_fasta(tmp_path / "x.fasta"))


def test_description_and_line_are_kept() -> None:
    assert read(b"\n>sp|P1|A  Beta lactamase \nM\n>b\nK\n") == [
        Record("sp|P1|A", "Beta lactamase", "M", 2),
        Record("b", "", "K", 4),
    ]


def test_records_before_an_error_are_given_out() -> None:
    records = read_fasta(io.BufferedReader(io.BytesIO(b">a\nM\n>b\n1\n")))
    assert next(records).name == "a"
    with pytest.raises(FastaError):
        next(records)


def test_a_stream_is_left_open() -> None:
    stream = io.BufferedReader(io.BytesIO(gzip.compress(b">a\nM\n")))
    assert len(list(read_fasta(stream))) == 1
    assert not stream.closed


def test_gzip_is_told_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(b">a\nM\n")
    (tmp_path / "packed.fasta").write_bytes(gzip.compress(b">a\nM\n"))
    assert list(read_fasta(tmp_path / "plain.gz")) == list(read_fasta(str(tmp_path / "packed.fasta")))


@pytest.mark.parametrize(
    ("path", "count", "residues"),
    [(DATA / "few_proteins.fasta", 3, 250), (NANO_DATA / "some_proteins.fasta", 15, 5115)],
)
def test_real_proteins_are_read_whole(path: Path, count: int, residues: int) -> None:
    records = list(read_fasta(path))
    assert len(records) == count
    assert sum(len(record.sequence) for record in records) == residues
    assert all(record.name.startswith("UniRef50_") for record in records)


WORD = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)


@st.composite
def records_and_files(draw: st.DrawFn) -> tuple[list[Record], bytes]:
    """Records, and one of the many files that hold them."""
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    lines: list[str] = []
    records = []

    def maybe_blank() -> Iterator[str]:
        if draw(st.booleans()):
            yield ""

    for _ in range(draw(st.integers(0, 4))):
        lines += maybe_blank()
        name = draw(WORD)
        description = " ".join(draw(st.lists(WORD, max_size=3)))
        sequence = draw(st.text(string.ascii_uppercase, min_size=1, max_size=40))
        records.append(Record(name, description, sequence, len(lines) + 1))
        lines.append(f">{name} {description}")
        if draw(st.booleans()):
            sequence = sequence.lower()
        width = draw(st.integers(1, 50))
        for start in range(0, len(sequence), width):
            lines += maybe_blank()
            lines.append(sequence[start : start + width] + draw(st.sampled_from(["", "-", " ", ".."])))
        if draw(st.booleans()):
            lines.append("*")
    content = end.join(lines).encode() + draw(st.sampled_from([b"", end.encode()]))
    return records, gzip.compress(content) if draw(st.booleans()) else content


@given(records_and_files())
def test_however_records_are_written_they_are_read_back(case: tuple[list[Record], bytes]) -> None:
    records, content = case
    assert read(content) == records


@given(st.binary(max_size=60) | st.binary(max_size=60).map(b">a\n".__add__))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with suppress(FastaError):
        assert all(set(record.sequence) <= set(string.ascii_uppercase) for record in read(content))
