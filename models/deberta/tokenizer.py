"""Text to token numbers and back, by byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from ..tokenization import Tokenizer

T = TypeVar("T", bound="DebertaTokenizer")

VOCAB_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
TOKENIZER_FILE = "tokenizer.json"


class BaseDebertaTokenizer(Tokenizer):
    """What the tokenizers of the DeBERTa families share: `[CLS] A [SEP]`, and `[CLS] A [SEP] B [SEP]`.

    The token types are 0 up to the first `[SEP]` and 1 behind it.
    """

    def _add_special(self, special: Mapping[str, str | None]) -> None:
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        missing = [name for name, token in special.items() if token is not None and token not in known]
        self.backend.add_special_tokens([self._special_token(name, str(special[name])) for name in missing])

    def _special_token(self, name: str, token: str) -> AddedToken:
        """How a special token is found in a text."""
        return AddedToken(token, special=True, normalized=False)

    def _update_backend(self) -> None:
        self._add_special(self.special)
        start, end = self.cls_token, self.sep_token
        if start is None or end is None:
            raise ValueError(f"{type(self).__name__} needs a cls_token and a sep_token")
        self.backend.post_processor = TemplateProcessing(
            single=[start, "$A", end],
            pair=[start, "$A", end, "$B:1", f"{end}:1"],
            special_tokens=[(token, self.convert_tokens_to_ids(token)) for token in (start, end)],
        )


class DebertaTokenizer(BaseDebertaTokenizer):
    """Byte-level BPE, as GPT-2's: any text can be encoded, and a word's token has the space before it.

    A pair is `[CLS] A [SEP] B [SEP]` with the token types 0 and 1, as the checkpoints were trained and as
    transformers 4 has it; transformers 5 puts a second `[SEP]` between and has type 0 throughout.
    `[MASK]` takes the space before it.

    Args:
        vocab_file: `vocab.json`, tokens to numbers.
        merges_file: `merges.txt`, pairs to be merged, one a line.
        tokenizer_file: `tokenizer.json`, in the place of both.
        add_prefix_space: put a space before a text, so that its first word is as those within; words
            given one by one (`is_split_into_words`) need it.
        added_tokens_decoder: tokens beside those of the files, by number.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed file, or a special token's number is another.
    """

    settings = (*Tokenizer.settings, "add_prefix_space")

    def __init__(
        self,
        vocab_file: str | Path | None = None,
        merges_file: str | Path | None = None,
        *,
        tokenizer_file: str | Path | None = None,
        bos_token: str | None = "[CLS]",
        eos_token: str | None = "[SEP]",
        unk_token: str | None = "[UNK]",
        sep_token: str = "[SEP]",
        pad_token: str | None = "[PAD]",
        cls_token: str = "[CLS]",
        mask_token: str | None = "[MASK]",
        add_prefix_space: bool = False,
        model_max_length: int | None = None,
        padding_side: str = "right",
        truncation_side: str = "right",
        added_tokens_decoder: Mapping[int, AddedToken] | None = None,
    ) -> None:
        if tokenizer_file is not None:
            path = Path(tokenizer_file)
            backend = make_tokenizer(read_tokenizer(path, "BPE"), path)
        elif vocab_file is not None and merges_file is not None:
            backend = FastTokenizer(_read_bpe(Path(vocab_file), Path(merges_file)))
        else:
            raise ValueError("give a vocab_file and a merges_file, or a tokenizer_file")
        backend.pre_tokenizer = ByteLevel(add_prefix_space=add_prefix_space)
        backend.decoder = ByteLevelDecoder()
        self.add_prefix_space = add_prefix_space
        special = {
            "cls_token": cls_token,
            "pad_token": pad_token,
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

    def _special_token(self, name: str, token: str) -> AddedToken:
        return AddedToken(token, special=True, normalized=False, lstrip=name == "mask_token")

    @classmethod
    def _from_files(
        cls: type[T], name_or_path: str | Path, hub: dict[str, Any], settings: dict[str, Any]
    ) -> T:
        from ...weights.hub import fetch

        path = fetch(name_or_path, TOKENIZER_FILE, **hub)
        if path is not None:
            return cls(tokenizer_file=path, **settings)
        vocab, merges = (fetch(name_or_path, name, **hub) for name in (VOCAB_FILE, MERGES_FILE))
        if vocab is None or merges is None:
            raise FileNotFoundError(
                f"{name_or_path} holds no {TOKENIZER_FILE}, and not both of {VOCAB_FILE} and {MERGES_FILE}"
            )
        return cls(vocab, merges, **settings)

    def _vocabulary_files(self) -> dict[str, bytes]:
        whole = self.backend.to_str()
        model = json.loads(whole)["model"]
        merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
        vocabulary = json.dumps(model["vocab"], ensure_ascii=False)
        return {
            VOCAB_FILE: vocabulary.encode(),
            MERGES_FILE: f"{merges}\n".encode(),
            TOKENIZER_FILE: whole.encode(),
        }

    def _check_words(self) -> None:
        if not self.add_prefix_space:
            raise ValueError(
                "words one by one need add_prefix_space=True, or each would be encoded as a text's first; "
                "pass it to from_pretrained"
            )


def read_tokenizer(path: Path, model: str) -> dict[str, Any]:
    """What a `tokenizer.json` holds, without settings for padding and truncation.

    Args:
        model: the kind of model that it must hold.

    Raises:
        ValueError: it is malformed, or holds another kind.
    """
    from ..config import read_json_object

    values = read_json_object(path)
    kind = values["model"].get("type") if isinstance(values.get("model"), dict) else None
    if kind != model:
        raise ValueError(f"{path} holds a model of type {kind!r}; this tokenizer needs {model!r}")
    return {**values, "padding": None, "truncation": None}


def make_tokenizer(values: dict[str, Any], path: Path) -> FastTokenizer:
    """The tokenizer of what a `tokenizer.json` holds. Raises `ValueError` where it is malformed."""
    try:
        return FastTokenizer.from_str(json.dumps(values))
    except Exception as error:  # what `tokenizers` raises is no narrower
        raise ValueError(f"{path} is malformed: {error}") from error


def _read_bpe(vocab_file: Path, merges_file: Path) -> BPE:
    from ..config import read_json_object

    vocabulary = read_json_object(vocab_file)
    try:
        lines = merges_file.read_text(encoding="utf-8").split("\n")
        rows = [line for line in lines if line and not line.startswith("#version")]
        merges = [(first, second) for first, second in (row.split(" ") for row in rows)]
    except ValueError as error:
        raise ValueError(f"{merges_file} does not hold two tokens a line: {error}") from error
    try:
        return BPE(vocabulary, merges)
    except Exception as error:  # what `tokenizers` raises is no narrower
        raise ValueError(f"{vocab_file} and {merges_file} do not fit: {error}") from error
