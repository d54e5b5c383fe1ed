"""Proteins from FASTA files, as such files are found."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

_GZIP_MAGIC = b"\x1f\x8b"
_NO_SEQUENCE = re.compile(r"[^A-Za-z*.\-\s]")
_DROPPED = re.compile(r"[.\-\s]+")


class FastaError(ValueError):
    """A file is not the FASTA that can be read here; the message names the file and the line."""


@dataclass(frozen=True)
class Record:
    """One protein.

    Args:
        name: the header up to its first white space; empty where the header is.
        description: the rest of the header.
        sequence: one letter, A to Z, a residue; never empty.
        line: of the header, counted from 1.
    """

    name: str
    description: str
    sequence: str
    line: int


def read_fasta(source: str | Path | BufferedReader) -> Iterator[Record]:
    """The proteins of a file, one by one, plain or gzipped whatever its name.

    Sequences may be wrapped and in lower case; blank lines, all line ends and a byte-order mark are
    fine. Gaps (`-` and `.`) are dropped, so the rows of an alignment give their proteins. A `*` at the
    end, a stop, is dropped; one within is read as the unknown residue X. Headers that are not UTF-8
    are read as Latin-1.

    Args:
        source: a path, or a buffered binary stream such as `sys.stdin.buffer`, which is left open.

    Raises:
        FastaError: text before the first `>`, a character that stands for no residue, a record without
            residues, a binary file, or damaged gzip. Records before it have been given out by then.
        OSError: the file cannot be opened or read.
    """
    if not isinstance(source, BufferedReader):
        with Path(source).open("rb") as file:
            yield from read_fasta(file)
        return
    place = getattr(source, "name", "the stream")
    packed = source.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    try:
        yield from _records(gzip.GzipFile(fileobj=source) if packed else source, place)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FastaError(f"{place} is damaged or incomplete gzip: {error}") from error


def clean(text: str) -> str:
    """Upper-cased, without white space and gaps; stops stay.

    Raises:
        ValueError: a character that stands for no residue, gap or stop; the message names it.
    """
    foreign = _NO_SEQUENCE.search(text)
    if foreign is not None:
        raise ValueError(f"{foreign[0]!r} is no residue")
    return _DROPPED.sub("", text).upper()


def without_stops(sequence: str) -> str:
    """A trailing `*` dropped, one within turned into X."""
    return sequence.rstrip("*").replace("*", "X")


def _records(lines: Iterable[bytes], place: str) -> Iterator[Record]:
    header: tuple[str, int] | None = None
    parts: list[str] = []
    for number, line in _decoded(lines, place):
        if line.startswith(">"):
            if header is not None:
                yield _record(*header, parts, place)
            header, parts = (line[1:], number), []
        elif line and header is None:
            shown = line if len(line) <= 40 else f"{line[:40]}…"
            raise FastaError(f"{place}, line {number}: {shown!r} stands before the first '>'")
        elif line and header is not None:
            try:
                parts.append(clean(line))
            except ValueError as error:
                raise FastaError(f"{place}, line {number}: {error}, in {_named(header[0])}") from error
    if header is not None:
        yield _record(*header, parts, place)


def _record(header: str, line: int, parts: list[str], place: str) -> Record:
    name, description = (*header.split(maxsplit=1), "", "")[:2]
    sequence = without_stops("".join(parts))
    if not sequence:
        raise FastaError(f"{place}, line {line}: {_named(header)} has no residues")
    return Record(name, description, sequence, line)


def _named(header: str) -> str:
    return f"record {''.join(header.split()[:1])!r}"


def _decoded(chunks: Iterable[bytes], place: str) -> Iterator[tuple[int, str]]:
    """Stripped lines with their numbers. Chunks end in line feeds; carriage returns may divide them."""
    number = 0
    for chunk in chunks:
        if b"\0" in chunk:
            raise FastaError(f"{place} holds NUL bytes: a binary file, not FASTA")
        for line in chunk.splitlines():
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                yield number, line.decode("utf-8").strip()
            except UnicodeDecodeError:
                yield number, line.decode("latin-1").strip()
