"""Proteins to token numbers and back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
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
    residues. Lower case is outside it, which is warned of. Beyond upstream, offsets and words are known.

    Args:
        vocab_file: tokens, one a line; ESM-2's unless given.
        eos_token: None for no token after a protein; pairs are then refused.

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
        model_max_length: int | None = None,
        padding_side: str = "right",
    ) -> None:
        tokens = VOCABULARY if vocab_file is None else _read_vocabulary(Path(vocab_file))
        vocabulary = {token: index for index, token in enumerate(tokens)}
        special = {
            "unk_token": unk_token,
            "cls_token": cls_token,
            "eos_token": eos_token,
            "pad_token": pad_token,
            "mask_token": mask_token,
        }
        backend = FastTokenizer(WordLevel(vocabulary, unk_token=unk_token))
        anything = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
        backend.pre_tokenizer = Steps([WhitespaceSplit(), Split(Regex(anything), "isolated")])
        super().__init__(backend, special, model_max_length, padding_side)
        end = "" if eos_token is None else f" {eos_token}"
        backend.post_processor = TemplateProcessing(
            single=f"{cls_token} $A{end}",
            pair=f"{cls_token} $A{end} $B{end}",
            special_tokens=[(t, vocabulary[t]) for t in (cls_token, eos_token) if t is not None],
        )

    @classmethod
    def _from_files(
        cls: type[T], name_or_path: str | Path, hub: dict[str, Any], settings: dict[str, Any]
    ) -> T:
        from ...weights.hub import fetch

        path = fetch(name_or_path, VOCAB_FILE, **hub)
        if path is None:
            raise FileNotFoundError(f"{name_or_path} holds no {VOCAB_FILE}")
        # A name that ESM has not, which upstream writes as null.
        return cls(
            path, **{key: value for key, value in settings.items() if key not in ("sep_token", "bos_token")}
        )

    def _vocabulary_files(self) -> dict[str, bytes]:
        tokens = sorted(self.get_vocab().items(), key=lambda item: item[1])
        return {VOCAB_FILE: "\n".join(token for token, _ in tokens).encode()}

    def _check(self, text: Any, is_split_into_words: bool) -> None:
        super()._check(text, is_split_into_words)
        joined = text if isinstance(text, str) else " ".join(text)
        outside = re.sub(r"<[a-z_0-9]+>", "", joined)
        if re.search("[a-z]", outside) and self.backend.token_to_id("a") is None:
            warnings.warn(
                "lower-case letters are not in the vocabulary and become <unk>; upper-case the sequence",
                stacklevel=4,
            )

    def __call__(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        if text_pair is not None and self.eos_token is None:
            raise ValueError("a pair needs an eos_token between its proteins, and this tokenizer has none")
        return super().__call__(text, text_pair, **options)

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Tokens with a space between them, as upstream's."""
        found = [ids] if isinstance(ids, int) else ids
        return " ".join(self.convert_ids_to_tokens(found, skip_special_tokens))


def _read_vocabulary(path: Path) -> list[str]:
    tokens = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not any(tokens):
        raise ValueError(f"{path} holds no tokens")
    for token in tokens:
        if tokens.count(token) > 1:
            raise ValueError(f"{path} holds the token {token!r} more than once")
    return tokens
