"""What a tokenizer returns."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Encoding

from .rewriting import Rewritten

Rewritings = Mapping[tuple[int, int | None], Rewritten]
"""Of a row's texts (0, or 1 for the second of a pair) or of their words, those that were rewritten before
they were encoded."""
SPACE = "▁"
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of SentencePiece's byte fallback."""


class BatchEncoding(UserDict[str, Any]):
    """What a tokenizer returns: a mapping whose entries are attributes too.

    `input_ids` and the like are lists, or tensors [B, L] where asked for. The rows' tokens, words and
    offsets stay known, padding included; rows are numbered in the order of the lists.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        encodings: Sequence[Encoding] = (),
        rewritings: Sequence[Rewritings | None] = (),
    ) -> None:
        super().__init__(data)
        self.encodings = list(encodings)
        self.rewritings = list(rewritings)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(f"this encoding has no {name!r}") from None

    def tokens(self, batch_index: int = 0) -> list[str]:
        return self.encodings[batch_index].tokens

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """For each token the word it is of, None for special tokens."""
        return self.encodings[batch_index].word_ids

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        """For each token 0 or 1, which text of a pair it is of, None for special tokens."""
        # The first text of a pair has lost its number where the pair was cut.
        row = self.encodings[batch_index]
        ids = zip(row.sequence_ids, row.special_tokens_mask, strict=True)
        return [None if special else (number or 0) for number, special in ids]

    def offsets(self, batch_index: int = 0) -> list[tuple[int, int]]:
        """For each token its first and its past-the-last character in its text, or in its word.

        Tokens that are parts of one character share its span; one that stands for no character, as
        SentencePiece's space before a text, has an empty span; special tokens have (0, 0).
        """
        row = self.encodings[batch_index]
        spans = _corrected(row.tokens, row.offsets)
        rewritings = self.rewritings[batch_index] if self.rewritings else None
        if rewritings:
            words = row.word_ids if any(word is not None for _, word in rewritings) else [None] * len(spans)
            keys = zip(self.sequence_ids(batch_index), words, strict=True)
            made = [None if text is None else rewritings.get((text, word)) for text, word in keys]
            spans = [x if way is None else way.span(*x) for x, way in zip(spans, made, strict=True)]
        return spans

    def char_to_token(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Which token holds a character; one number alone is a character of row 0."""
        row, char = (0, batch_or_char_index) if char_index is None else (batch_or_char_index, char_index)
        tokens = enumerate(zip(self.sequence_ids(row), self.offsets(row), strict=True))
        found = (i for i, (text, (start, end)) in tokens if text == sequence_index and start <= char < end)
        return next(found, None)

    def token_to_chars(
        self, batch_or_token_index: int, token_index: int | None = None
    ) -> tuple[int, int] | None:
        """First and past-the-last character of a token, None for special ones; as `char_to_token`."""
        row, token = (0, batch_or_token_index) if token_index is None else (batch_or_token_index, token_index)
        return None if self.encodings[row].special_tokens_mask[token] else self.offsets(row)[token]

    def to(self, device: Any) -> BatchEncoding:
        """The same with its tensors on another device; this one stays where it is."""
        moved = {key: x.to(device) if hasattr(x, "to") else x for key, x in self.items()}
        return BatchEncoding(moved, self.encodings, self.rewritings)


def _corrected(tokens: list[str], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`tokenizers`' spans, but for two kinds of token that it gives those of others.

    The space that SentencePiece puts before a text has the span of the first character there, and each
    byte of unknown characters that of all of them.
    """
    if SPACE not in tokens and not any(map(BYTE.fullmatch, tokens)):
        return spans
    found: list[tuple[int, int]] = []
    following = [*spans[1:], (-1, -1)]
    character = 0
    for i, (token, span, after) in enumerate(zip(tokens, spans, following, strict=True)):
        byte = BYTE.fullmatch(token)
        if byte is not None and span[1] - span[0] > 1:
            begins = int(byte[1], 16) & 0xC0 != 0x80
            character = 0 if i == 0 or spans[i - 1] != span else character + begins
            span = (span[0] + character, span[0] + character + 1)
        elif token == SPACE and span[0] == after[0] < after[1]:
            span = (span[0], span[0])
        found.append(span)
    return found


def as_list(value: Any) -> Any:
    """Tensors and arrays as Python numbers, other things as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_tensors(data: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """Lists as tensors where `kind` is 'pt'. Raises `ValueError` for another kind, or uneven rows."""
    if kind is None:
        return data
    if kind != "pt":
        raise ValueError(f"return_tensors is {kind!r}; it must be 'pt' or None")
    import torch

    def tensor(key: str, rows: Any) -> torch.Tensor:
        try:
            return torch.tensor(rows)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{key} makes no tensor: {error}; rows of different lengths need padding=True"
            ) from error

    return {key: tensor(key, rows) for key, rows in data.items()}
