"""SentencePiece's model file: its pieces, its settings, and its character map.

The file is a protocol buffer (`sentencepiece_model.proto`), of which only the fields that a Unigram
tokenizer needs are read; the character map in it is a double-array trie, with what each key becomes.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..rewriting import Rewritten, rewrite

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
UNIGRAM = 1
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
LONGEST_KEY = 64
"""Characters of a key of the character map; SentencePiece's own have 4 at most."""


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model file says.

    Args:
        pieces: with their scores (log-probabilities) and types.
        character_map: as the file holds it, empty where nothing is mapped.
    """

    pieces: list[tuple[str, float, int]]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    space_is_suffix: bool = False
    character_map: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def read_model(content: bytes) -> SentencePieceModel:
    """Read a model file.

    Raises:
        ValueError: it is no such file, or a damaged one.
    """
    pieces: list[tuple[str, float, int]] = []
    settings: dict[str, Any] = {}
    for number, wire, value in _fields(content):
        if number == 1:
            pieces.append(_piece(_expect(wire, BYTES, value)))
        elif number in _SETTINGS:
            known = _SETTINGS[number]
            for inner, inner_wire, inner_value in _fields(_expect(wire, BYTES, value)):
                if inner in known:
                    name, kind = known[inner]
                    settings[name] = kind(
                        _expect(inner_wire, BYTES if kind is bytes else VARINT, inner_value)
                    )
    if not pieces:
        raise ValueError("it holds no pieces")
    return SentencePieceModel(pieces, **settings)


_SETTINGS: dict[int, dict[int, tuple[str, type]]] = {
    2: {3: ("model_type", int), 24: ("space_is_suffix", bool), 35: ("byte_fallback", bool)},
    3: {
        2: ("character_map", bytes),
        3: ("add_dummy_prefix", bool),
        4: ("remove_extra_whitespaces", bool),
        5: ("escape_whitespaces", bool),
    },
}
"""Of the trainer's and the normaliser's settings, each field's number, name and type."""


def _piece(content: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, wire, value in _fields(content):
        if number == 1:
            text = _expect(wire, BYTES, value).decode()
        elif number == 2:
            (score,) = struct.unpack("<f", _expect(wire, FIXED32, value))
        elif number == 3:
            kind = _expect(wire, VARINT, value)
    return text, score, kind


def _expect(wire: int, wanted: int, value: Any) -> Any:
    if wire != wanted:
        raise ValueError(f"a field has the wire type {wire}, not {wanted}")
    return value


def _fields(content: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field of a message."""
    at, end = 0, len(content)
    while at < end:
        key, at = _varint(content, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(content, at)
            yield number, wire, value
            continue
        if wire == BYTES:
            size, at = _varint(content, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"a field has the wire type {wire}, which is none")
        if size > end - at:
            raise ValueError(f"a field of {size} bytes reaches past the end")
        yield number, wire, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError("it ends inside a number")
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is longer than ten bytes")


class CharacterMap:
    """A normaliser: at each place the longest key is replaced, as SentencePiece does.

    `tokenizers` has one too, which goes by grapheme: of a letter and its marks it maps the shortest key
    and drops the rest, or each character by itself. So decomposed Vietnamese or Korean differs there.

    The compiled map is the size of a trie in bytes (uint32), the trie, and the texts it points at, each
    ended by a zero byte. A unit of the trie (uint32) holds the byte that leads to it and the offset to its
    children, each at `offset ^ byte`; bit 8 says that a key ends at it, and then the child at byte 0 holds
    where the key's text begins.

    Args:
        content: the compiled map; nothing is mapped where it is empty.
        protected: texts that stay as they are.

    Raises:
        ValueError: a damaged map.
    """

    def __init__(self, content: bytes = b"", protected: Iterable[str] = ()) -> None:
        size = int.from_bytes(content[:4], "little")
        if content and (size % 4 or not 0 < size <= len(content) - 4):
            raise ValueError(f"its character map of {len(content)} bytes gives its trie {size}")
        self.units = array("I", content[4 : 4 + size])
        if sys.byteorder == "big":
            self.units.byteswap()
        self.texts = content[4 + size :]
        self.seconds, self.places = self._find_places()
        self.protect(protected)

    def protect(self, texts: Iterable[str]) -> None:
        """Let these stay as they are, wherever they are found."""
        self.protected = sorted(set(texts), key=len, reverse=True)
        places = self.places | {text[0] for text in self.protected}
        self.pattern = re.compile(_one_of(places) if places else "(?!)")

    def _find_places(self) -> tuple[set[str], set[str]]:
        """The second characters of keys whose first is often a plain letter: marks, mostly, which are rare;
        and with those the characters that are keys themselves.
        """
        # A unit does not say which bytes follow it; but each says of itself whose child it may be.
        children: dict[int, list[int]] = {}
        for at, unit in enumerate(self.units):
            if not unit >> 31:
                children.setdefault(at ^ (unit & 0xFF), []).append(at)

        def characters(base: int, prefix: bytes = b"") -> Iterator[tuple[str, bool, int]]:
            """Those that lead on from here, whether a key ends at each, and where it leads to."""
            for at in children.get(base, ()):
                unit = self.units[at]
                key = prefix + bytes([unit & 0xFF])
                if key[0] >= 0xC0 and len(key) < 2 + (key[0] >= 0xE0) + (key[0] >= 0xF0):
                    yield from characters(at ^ _offset(unit), key)
                elif key != b"\0":
                    yield key.decode(), bool(unit & 0x100), at ^ _offset(unit)

        firsts = list(characters(_offset(self.units[0]))) if self.units else []
        singles = {first for first, ends, _ in firsts if ends}
        seconds = {second for _, ends, base in firsts if not ends for second, _, _ in characters(base)}
        return seconds, singles | seconds

    def __call__(self, text: str | Rewritten) -> Rewritten:
        """The text with its keys replaced. Raises `ValueError` where a damaged map leads nowhere."""
        return rewrite(text, self.pattern, self._replace)

    def _replace(self, text: str, at: int, free: int) -> tuple[int, int, str] | None:
        for kept in self.protected:
            if text.startswith(kept, at):
                return at, at + len(kept), kept
        if at > free and text[at] in self.seconds:
            return self._longest(text, at - 1) or self._longest(text, at)
        return self._longest(text, at)

    def _longest(self, text: str, begin: int) -> tuple[int, int, str] | None:
        found = None
        base = _offset(self.units[0]) if self.units else 0
        for length, character in enumerate(text[begin : begin + LONGEST_KEY], start=1):
            unit = 0
            for byte in character.encode():
                at = base ^ byte
                unit = self.units[at] if at < len(self.units) else 0
                if unit & 0x800000FF != byte:
                    return found
                base = at ^ _offset(unit)
            if unit & 0x100:
                found = begin, begin + length, self._text(base)
        return found

    def _text(self, leaf: int) -> str:
        begin = self.units[leaf] & 0x7FFFFFFF if leaf < len(self.units) else len(self.texts)
        end = self.texts.find(b"\0", begin)
        if end < 0:
            raise ValueError("the character map points past its texts")
        return self.texts[begin:end].decode()


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _one_of(characters: set[str]) -> str:
    """A pattern for one of many characters; of those past U+FFFF, where ranges are slow, for all."""
    ranges: list[list[int]] = []
    for point in sorted(ord(character) for character in characters if character < "\U00010000"):
        if ranges and point == ranges[-1][1] + 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    if max(characters) >= "\U00010000":
        ranges.append([0x10000, 0x10FFFF])
    return "[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]"
