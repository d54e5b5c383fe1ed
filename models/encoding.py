"""What a tokenizer returns."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Encoding


class BatchEncoding(UserDict[str, Any]):
    """What a tokenizer returns: a mapping whose entries are attributes too.

    `input_ids` and the like are lists, or tensors [B, L] where asked for. The rows' tokens, words and
    offsets stay known, padding included; rows are numbered in the order of the lists.
    """

    def __init__(self, data: Mapping[str, Any], encodings: Sequence[Encoding] = ()) -> None:
        super().__init__(data)
        self.encodings = list(encodings)

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

    def char_to_token(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """Which token holds a character; one number alone is a character of row 0."""
        row, char = (0, batch_or_char_index) if char_index is None else (batch_or_char_index, char_index)
        tokens = enumerate(zip(self.sequence_ids(row), self.encodings[row].offsets, strict=True))
        found = (i for i, (text, (start, end)) in tokens if text == sequence_index and start <= char < end)
        return next(found, None)

    def token_to_chars(
        self, batch_or_token_index: int, token_index: int | None = None
    ) -> tuple[int, int] | None:
        """First and past-the-last character of a token, None for special ones; as `char_to_token`."""
        row, token = (0, batch_or_token_index) if token_index is None else (batch_or_token_index, token_index)
        encoding = self.encodings[row]
        return None if encoding.special_tokens_mask[token] else encoding.offsets[token]

    def to(self, device: Any) -> BatchEncoding:
        """The same with its tensors on another device; this one stays where it is."""
        moved = {key: x.to(device) if hasattr(x, "to") else x for key, x in self.items()}
        return BatchEncoding(moved, self.encodings)
