"""Text to token numbers and back, by SentencePiece's Unigram model."""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteFallback
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import Unigram
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Steps
from tokenizers.pre_tokenizers import Metaspace, Punctuation, Split
from tokenizers.pre_tokenizers import Sequence as Splits

from ..deberta.tokenizer import TOKENIZER_FILE, BaseDebertaTokenizer, make_tokenizer, read_tokenizer
from ..encoding import SPACE
from ..rewriting import Rewritten, rewrite
from ..tokenization import Tokenizer
from .sentencepiece import (
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    CharacterMap,
    SentencePieceModel,
    read_model,
)

T = TypeVar("T", bound="DebertaV2Tokenizer")

VOCAB_FILE = "spm.model"
GUARD = "\ufdd0"
"""Put into a text that spells out a special token, so that none is found; no character has this number."""


class DebertaV2Tokenizer(BaseDebertaTokenizer):
    """SentencePiece's Unigram model, of DeBERTa-V2, V3 and mDeBERTa; without the `sentencepiece` package.

    What a text becomes is what SentencePiece makes of it, with which the checkpoints were trained: its
    character map is followed to the letter (`CharacterMap`). transformers 5 leaves the map out, so `ﬁ`,
    full-width letters, `…` and no-break spaces are other tokens there; transformers 4 follows it by
    grapheme. Special and added tokens are found first, and the text between two of them is encoded by
    itself, as in transformers. A pair is `[CLS] A [SEP] B [SEP]` with the token types 0 and 1.

    Args:
        vocab_file: `spm.model`.
        tokenizer_file: `tokenizer.json`, in its place; with both, `spm.model` gives what the other lost.
        do_lower_case: turn letters to lower case first.
        split_by_punct: let no token reach over a punctuation mark.
        added_tokens_decoder: tokens beside those of the files, by number.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed file, or one that holds another kind of model.
    """

    settings = (*Tokenizer.settings, "do_lower_case", "split_by_punct")

    def __init__(
        self,
        vocab_file: str | Path | None = None,
        *,
        tokenizer_file: str | Path | None = None,
        do_lower_case: bool = False,
        split_by_punct: bool = False,
        bos_token: str | None = "[CLS]",
        eos_token: str | None = "[SEP]",
        unk_token: str | None = "[UNK]",
        sep_token: str = "[SEP]",
        pad_token: str | None = "[PAD]",
        cls_token: str = "[CLS]",
        mask_token: str | None = "[MASK]",
        model_max_length: int | None = None,
        padding_side: str = "right",
        truncation_side: str = "right",
        added_tokens_decoder: Mapping[int, AddedToken] | None = None,
    ) -> None:
        model = None if vocab_file is None else _read_sentencepiece(Path(vocab_file))
        values = None if tokenizer_file is None else read_tokenizer(Path(tokenizer_file), "Unigram")
        if model is not None and values is not None:
            if _has_pieces(values, model):
                added_tokens_decoder = {**_added_tokens(values), **(added_tokens_decoder or {})}
            else:
                model = None
        self._content: bytes | None = None
        if model is not None and vocab_file is not None:
            self._content = Path(vocab_file).read_bytes()
            backend = _from_sentencepiece(model, split_by_punct)
        elif values is not None and tokenizer_file is not None:
            backend, model = _from_tokenizer_file(values, Path(tokenizer_file))
        else:
            raise ValueError("give a vocab_file (spm.model) or a tokenizer_file (tokenizer.json)")
        self.do_lower_case = do_lower_case
        self.split_by_punct = split_by_punct
        self._characters = model.character_map
        self._character_map = CharacterMap(model.character_map)
        self._symbols = [piece for piece, _, kind in model.pieces if kind == USER_DEFINED]
        self._unspoken = [piece for piece, _, kind in model.pieces if kind not in (NORMAL, USER_DEFINED)]
        special = {
            "pad_token": pad_token,
            "cls_token": cls_token,
            "sep_token": sep_token,
            "unk_token": unk_token,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "mask_token": mask_token,
        }
        super().__init__(
            backend,
            special,
            model_max_length=model_max_length,
            padding_side=padding_side,
            truncation_side=truncation_side,
            added_tokens_decoder=added_tokens_decoder,
        )

    @classmethod
    def _from_files(
        cls: type[T], name_or_path: str | Path, hub: dict[str, Any], settings: dict[str, Any]
    ) -> T:
        from ...weights.hub import fetch

        vocab, whole = (fetch(name_or_path, name, **hub) for name in (VOCAB_FILE, TOKENIZER_FILE))
        if vocab is None and whole is None:
            raise FileNotFoundError(f"{name_or_path} holds neither {VOCAB_FILE} nor {TOKENIZER_FILE}")
        return cls(vocab, tokenizer_file=whole, **settings)

    def _vocabulary_files(self) -> dict[str, bytes]:
        values = json.loads(self.backend.to_str())
        values["normalizer"] = {"type": "Sequence", "normalizers": self._normalizers()}
        files = {TOKENIZER_FILE: json.dumps(values, ensure_ascii=False).encode()}
        return files if self._content is None else {VOCAB_FILE: self._content, **files}

    def _normalizers(self) -> list[dict[str, Any]]:
        """The steps from a text to its pieces as other programs know them, with `tokenizers`' own map."""
        own = json.loads(self.backend.to_str())["normalizer"]
        own = [] if own is None else own.get("normalizers", [own])
        lower = [{"type": "Lowercase"}] if self.do_lower_case else []
        if not self._characters:
            return [*lower, *own]
        characters = base64.b64encode(self._characters).decode()
        return [*lower, {"type": "Precompiled", "precompiled_charsmap": characters}, *own]

    def _update_backend(self) -> None:
        super()._update_backend()
        added = self.backend.get_added_tokens_decoder().values()
        self._whole = [token.content for token in added if not token.normalized]
        self._character_map.protect([*self._whole, *self._symbols])
        self._letters = _any_of(self._whole, r"[^\Wa-z]")
        self._literal = _any_of([*self._whole, *self._unspoken])

    def _rewrite(self, text: str) -> Rewritten | None:
        made = self._character_map(rewrite(text, self._letters, self._lower) if self.do_lower_case else text)
        if self._literal.search(made.text):

            def guarded(new: str, at: int, free: int) -> tuple[int, int, str]:
                literal = self._literal.match(new, at)
                token = new[at] if literal is None else literal[0]
                if token in self._whole and text[slice(*made.span(at, at + len(token)))] == token:
                    return at, at + len(token), token
                return at, at + 1, new[at] + GUARD

            made = rewrite(made, self._literal, guarded)
        return made if made.edits else None

    def _lower(self, text: str, at: int, free: int) -> tuple[int, int, str]:
        whole = next((token for token in self._whole if text.startswith(token, at)), None)
        return (at, at + 1, text[at].lower()) if whole is None else (at, at + len(whole), whole)


def _any_of(texts: Iterable[str], *patterns: str) -> re.Pattern[str]:
    """A pattern that finds the longest of some texts, and then others."""
    longest = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest), *patterns]) or "(?!)")


def _read_sentencepiece(path: Path) -> SentencePieceModel:
    try:
        model = read_model(path.read_bytes())
        if model.model_type != UNIGRAM:
            raise ValueError("its model is not of the type Unigram")
        if model.space_is_suffix or not model.escape_whitespaces:
            raise ValueError("its pieces do not have their space in front, as ▁")
        if len(_unknown(model)) != 1:
            raise ValueError(f"it has {len(_unknown(model))} pieces for what is unknown, and must have one")
        CharacterMap(model.character_map)
    except ValueError as error:
        raise ValueError(f"{path} is no SentencePiece model that can be read here: {error}") from error
    return model


def _unknown(model: SentencePieceModel) -> list[int]:
    return [number for number, (_, _, kind) in enumerate(model.pieces) if kind == UNKNOWN]


def _from_sentencepiece(model: SentencePieceModel, split_by_punct: bool) -> FastTokenizer:
    backend = FastTokenizer(Unigram(_scored(model.pieces), _unknown(model)[0], model.byte_fallback))
    spaces = [Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), Replace(Regex(" {2,}"), " ")]
    # With punctuation split off, each part has a space in front, not the text alone.
    before_text = model.add_dummy_prefix and not split_by_punct
    backend.normalizer = Steps(
        [
            *(spaces if model.remove_extra_whitespaces else []),
            *([Prepend(SPACE)] if before_text else []),
        ]
    )
    # Pieces that reach over a space need the text as one.
    split = not any(SPACE in piece[1:] for piece, _, _ in model.pieces)
    scheme = "always" if model.add_dummy_prefix else "never"
    words = Metaspace(prepend_scheme="never" if before_text else scheme, split=split)
    marks = [Punctuation("isolated")] if split_by_punct else []
    backend.pre_tokenizer = Splits([Split(GUARD, "removed"), *marks, words])
    backend.decoder = Decoders([ByteFallback(), MetaspaceDecoder(prepend_scheme=scheme, split=split)])
    return backend


def _scored(pieces: list[tuple[str, float, int]]) -> list[tuple[str, float]]:
    """Pieces and scores; a user-defined symbol's is such that it is always taken, by SentencePiece's rule."""
    highest = max((score for _, score, kind in pieces if kind == NORMAL), default=0.0)

    return [
        (piece, len(piece.encode()) * highest - 0.1 if kind == USER_DEFINED else score)
        for piece, score, kind in pieces
    ]


def _from_tokenizer_file(values: dict[str, Any], path: Path) -> tuple[FastTokenizer, SentencePieceModel]:
    """The backend, and a model that has the character map alone."""
    normalizer = values.get("normalizer") or {"type": "Sequence", "normalizers": []}
    try:
        steps = normalizer.get("normalizers", [normalizer])
        kinds = [step["type"] for step in steps]
        characters = b""
        if "Precompiled" in kinds:
            at = kinds.index("Precompiled")
            characters = base64.b64decode(steps[at]["precompiled_charsmap"] or "")
            # The steps before it, which change case or strip, are done here too.
            steps = steps[at + 1 :]
        CharacterMap(characters)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has a normalizer that cannot be read here: {error}") from error
    if "NFC" in kinds and not characters:
        warnings.warn(
            f"{path} has no character map, which transformers 5 leaves out: full-width letters, ligatures "
            f"and other such characters will be unknown; put the checkpoint's {VOCAB_FILE} beside it",
            stacklevel=5,
        )
    kept = {"type": "Sequence", "normalizers": steps} if steps else None
    return make_tokenizer({**values, "normalizer": kept}, path), SentencePieceModel(
        [], character_map=characters
    )


def _has_pieces(values: dict[str, Any], model: SentencePieceModel) -> bool:
    """Whether a `tokenizer.json` has the pieces of an `spm.model`; it may have more."""
    entries = values["model"].get("vocab") or []
    return [piece for piece, _ in entries[: len(model.pieces)]] == [piece for piece, _, _ in model.pieces]


def _added_tokens(values: dict[str, Any]) -> dict[int, AddedToken]:
    """The tokens beside the vocabulary in a `tokenizer.json`, by number."""
    entries = [dict(entry) for entry in values.get("added_tokens") or ()]
    return {entry.pop("id"): AddedToken(**entry) for entry in entries}
