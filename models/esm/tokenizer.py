"""Proteins to token numbers and back."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Encoding, Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from ..tokenization import Tokenizer

T = TypeVar("T", bound="EsmTokenizer")

VOCAB_FILE = "vocab.txt"
VOCABULARY = [
    "<cls>",
    "<pad>",
    "<eos>",
    "<unk>",
    "L",
    "A",
    "G",
    "V",
    "S",
    "E",
    "R",
    "T",
    "I",
    "D",
    "P",
    "K",
    "Q",
    "N",
    "F",
    "Y",
    "M",
    "H",
    "W",
    "C",
    "X",
    "B",
    "U",
    "Z",
    "O",
    ".",
    "-",
    "<null_1>",
    "<mask>",
]
"""ESM-2's tokens, and ESM-1b's and ESM-1v's."""


class EsmTokenizer(Tokenizer):
    """One token a residue, `<cls>` before a protein and `<eos>` after it; equal to upstream's.

    Tokens are found anywhere in the text; white space only separates. Each run of other characters
    becomes one `<unk>`, so a protein with residues outside the vocabulary has fewer tokens than
    residues. Lower case is outside it, which is warned of. Beyond upstream, offsets and words are known,
    and a truncation that cannot keep to `max_length` is refused.

    Args:
        vocab_file: tokens, one a line; ESM-2's unless given.
        eos_token: None for no token after a protein; pairs are then refused.
        sep_token, bos_token: names that ESM itself has no use for.
        added_tokens_decoder: tokens beside those of the file, by number.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty vocabulary, a token twice, or a special token that it lacks.
    """

    model_input_names = ("input_ids", "attention_mask")

    def __init__(
        self,
        vocab_file: str | Path | None = None,
        *,
        unk_token: str = "<unk>",
        cls_token: str = "<cls>",
        pad_token: str = "<pad>",
        mask_token: str = "<mask>",
        eos_token: str | None = "<eos>",
        sep_token: str | None = None,
        bos_token: str | None = None,
        model_max_length: int | None = None,
        padding_side: str = "right",
        truncation_side: str = "right",
        added_tokens_decoder: Mapping[int, AddedToken] | None = None,
    ) -> None:
        tokens = VOCABULARY if vocab_file is None else _read_vocabulary(Path(vocab_file))
        numbers = {token: number for number, token in enumerate(tokens)}
        backend = FastTokenizer(WordLevel(numbers, unk_token=unk_token))
        # Python's white space, which upstream splits at, is these four more than the regex's.
        spaces = Split(Regex(r"[\s\x1c-\x1f]+"), "removed")
        backend.pre_tokenizer = Steps([spaces, Split(Regex(_any_of(tokens)), "isolated")])
        special = {
            "unk_token": unk_token,
            "cls_token": cls_token,
            "eos_token": eos_token,
            "pad_token": pad_token,
            "mask_token": mask_token,
            "sep_token": sep_token,
            "bos_token": bos_token,
        }
        super().__init__(
            backend,
            special,
            model_max_length=model_max_length,
            padding_side=padding_side,
            truncation_side=truncation_side,
            added_tokens_decoder=added_tokens_decoder,
        )

    def _update_backend(self) -> None:
        self.backend.model.unk_token = self.unk_token
        start = [] if self.cls_token is None else [self.cls_token]
        end = [] if self.eos_token is None else [self.eos_token]
        self.backend.post_processor = TemplateProcessing(
            single=[*start, "$A", *end],
            pair=[*start, "$A", *end, "$B:1", *(f"{token}:1" for token in end)],
            special_tokens=[(token, self.convert_tokens_to_ids(token)) for token in start + end],
        )

    @classmethod
    def _from_files(
        cls: type[T], name_or_path: str | Path, hub: dict[str, Any], settings: dict[str, Any]
    ) -> T:
        from ...weights.hub import fetch

        path = fetch(name_or_path, VOCAB_FILE, **hub)
        if path is None:
            raise FileNotFoundError(f"{name_or_path} holds no {VOCAB_FILE}")
        return cls(path, **settings)

    def _vocabulary_files(self) -> dict[str, bytes]:
        numbers = self.backend.get_vocab(with_added_tokens=False)
        return {VOCAB_FILE: "\n".join(sorted(numbers, key=lambda token: numbers[token])).encode()}

    def _review(self, texts: list[Any], pairs: list[Any], rows: list[Encoding]) -> None:
        both = [text for text in texts + pairs if text is not None]
        if len(both) > len(texts) and self.eos_token is None:
            raise ValueError("a pair needs an eos_token between its proteins, and this tokenizer has none")
        if any(self.unk_token_id in row.ids for row in rows):
            known = re.compile(_any_of(self.get_vocab()))
            outside = (known.sub("", text if isinstance(text, str) else " ".join(text)) for text in both)
            if any(re.search("[a-z]", letters) for letters in outside):
                warnings.warn(
                    "lower-case letters are not in the vocabulary and become <unk>; upper-case the sequence",
                    stacklevel=3,
                )

    def _shares(self, first: int, second: int, limit: int) -> tuple[int, int]:
        # Upstream cuts ESM's pairs by another rule than those of other families: where both proteins
        # are cut, the first has the odd token, whichever was longer.
        if first <= second:
            kept = min(first, limit - limit // 2)
            return kept, limit - kept
        kept = min(second, limit // 2)
        return limit - kept, kept

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Tokens with a space between them, as upstream's."""
        tokens = self.convert_ids_to_tokens(ids, skip_special_tokens)
        return tokens if isinstance(tokens, str) else " ".join(tokens)


def _any_of(tokens: Iterable[str]) -> str:
    """A pattern that finds the longest of the tokens; a blank line of a vocabulary is in no text."""
    return "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token)


def _read_vocabulary(path: Path) -> list[str]:
    try:
        tokens = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    if not any(tokens):
        raise ValueError(f"{path} holds no tokens")
    for token, count in Counter(tokens).items():
        if count > 1:
            raise ValueError(f"{path} holds the token {token!r} more than once")
    return tokens
