"""What every tokenizer here is: the call that people know, around a `tokenizers.Tokenizer`.

Truncation and padding are done here for each call by itself, never by settings of the shared
`tokenizers` object, so one tokenizer serves any number of threads.
"""

from __future__ import annotations

import json
import sys
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer

T = TypeVar("T", bound="Tokenizer")

Padding = bool | Literal["longest", "max_length", "do_not_pad"]
Truncation = bool | Literal["longest_first", "only_first", "only_second", "do_not_truncate"]
Text = str | Sequence[str]

CONFIG = "tokenizer_config.json"
UNLIMITED = int(1e30)
"""`model_max_length` of a tokenizer that knows no limit; upstream's number."""

SPECIAL = ("unk_token", "cls_token", "sep_token", "eos_token", "bos_token", "pad_token", "mask_token")


class BatchEncoding(UserDict[str, Any]):
    """What a tokenizer returns: a mapping whose entries are attributes too.

    `input_ids` and the like are lists, or tensors [B, L] where asked for. Each row's `Encoding` tells
    tokens, words and offsets; rows are numbered in the order of the lists.
    """

    def __init__(self, data: Mapping[str, Any], encodings: Sequence[Encoding] = ()) -> None:
        super().__init__(data)
        self.encodings = list(encodings)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(f"this encoding has no {name!r}") from None

    def tokens(self, row: int = 0) -> list[str]:
        return self.encodings[row].tokens

    def word_ids(self, row: int = 0) -> list[int | None]:
        """For each token the word it is of, None for special tokens."""
        return self.encodings[row].word_ids

    def sequence_ids(self, row: int = 0) -> list[int | None]:
        """For each token 0 or 1, which text of a pair it is of, None for special tokens."""
        # A truncated pair's first text has lost its number.
        encoding = self.encodings[row]
        ids = zip(encoding.sequence_ids, encoding.special_tokens_mask, strict=True)
        return [None if special else (number or 0) for number, special in ids]

    def char_to_token(self, row: int, char: int, sequence: int = 0) -> int | None:
        return self.encodings[row].char_to_token(char, sequence)

    def token_to_chars(self, row: int, token: int) -> tuple[int, int] | None:
        return self.encodings[row].token_to_chars(token)

    def to(self, device: Any) -> BatchEncoding:
        """The same with its tensors on another device."""
        moved = {key: x.to(device) if hasattr(x, "to") else x for key, x in self.items()}
        return BatchEncoding(moved, self.encodings)


class Tokenizer:
    """Base of the tokenizers.

    Args:
        backend: does the splitting; its own padding and truncation must be off.
        special: names of special tokens, of `SPECIAL`, to the tokens.
        model_max_length: what `truncation=True` cuts to unless told.
        padding_side: "right" or "left".

    Raises:
        ValueError: a special token is not in the vocabulary.
    """

    model_input_names: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "attention_mask")
    padding_side: str
    model_max_length: int

    def __init__(
        self,
        backend: FastTokenizer,
        special: Mapping[str, str | None],
        model_max_length: int | None = None,
        padding_side: str = "right",
    ) -> None:
        if padding_side not in ("right", "left"):
            raise ValueError(f"padding_side is {padding_side!r}; it must be 'right' or 'left'")
        self.backend = backend
        self.special = {name: token for name, token in special.items() if token is not None}
        self.model_max_length = UNLIMITED if model_max_length is None else model_max_length
        self.padding_side = padding_side
        for name, token in self.special.items():
            if backend.token_to_id(token) is None:
                raise ValueError(f"{name} is {token!r}, which is not in the vocabulary")

    # Special tokens: `mask_token`, `mask_token_id` and so on

    def __getattr__(self, name: str) -> Any:
        special = self.__dict__.get("special", {})
        if name in SPECIAL:
            return special.get(name)
        if name.removesuffix("_id") in SPECIAL:
            token = special.get(name.removesuffix("_id"))
            return None if token is None else self.backend.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special.values()))

    @property
    def all_special_ids(self) -> list[int]:
        ids = (self.backend.token_to_id(token) for token in self.all_special_tokens)
        return [i for i in ids if i is not None]

    # Files

    @classmethod
    def from_pretrained(cls: type[T], name_or_path: str | Path, **hub: Any) -> T:
        """The tokenizer of a folder or Hub repository.

        Args:
            hub: as `PretrainedModel.from_pretrained`'s `revision`, `subfolder`, `cache_dir`, `token`,
                `local_files_only` and `force_download`.

        Raises:
            FileNotFoundError: no such folder, repository or file.
            ValueError: a file is malformed; the message names it.
        """
        from ..weights.hub import fetch
        from .config import read_json_object

        path = fetch(name_or_path, CONFIG, **hub)
        settings = {} if path is None else read_json_object(path)
        special = {name: settings[name] for name in SPECIAL if name in settings}
        given = {name: x["content"] if isinstance(x, dict) else x for name, x in special.items()}
        others: dict[str, Any] = {
            name: settings[name] for name in ("model_max_length", "padding_side") if name in settings
        }
        return cls._from_files(name_or_path, hub, {**given, **others})

    @classmethod
    def _from_files(
        cls: type[T], name_or_path: str | Path, hub: dict[str, Any], settings: dict[str, Any]
    ) -> T:
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that upstream's tokenizer of the same name, and this one, load."""
        from ..weights.saving import write_atomically

        Path(folder).mkdir(parents=True, exist_ok=True)
        settings = {
            **self.special,
            "model_max_length": self.model_max_length,
            "padding_side": self.padding_side,
            "tokenizer_class": type(self).__name__,
        }
        write_atomically(
            Path(folder) / CONFIG, (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
        )
        for name, content in self._vocabulary_files().items():
            write_atomically(Path(folder) / name, content)

    def _vocabulary_files(self) -> dict[str, bytes]:
        raise NotImplementedError

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones not counted."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        """Number of tokens, added ones counted."""
        return len(self.get_vocab())

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def add_tokens(self, tokens: str | Iterable[str], special_tokens: bool = False) -> int:
        """Add tokens that are found whole; returns how many were new. Resize the model's embeddings after."""
        found = [tokens] if isinstance(tokens, str) else list(tokens)
        if special_tokens:
            return self.backend.add_special_tokens(found)
        added: int = self.backend.add_tokens([AddedToken(token, normalized=True) for token in found])
        return added

    def add_special_tokens(self, tokens: Mapping[str, str]) -> int:
        """Set special tokens by name (`{"pad_token": "<pad>"}`); returns how many were new."""
        for name in tokens:
            if name not in SPECIAL:
                raise ValueError(f"{name!r} is no special token's name; there are {', '.join(SPECIAL)}")
        added = self.add_tokens(list(tokens.values()), special_tokens=True)
        self.special = {**self.special, **tokens}
        return added

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """A token's number, or the numbers of several; unknown ones have `unk_token_id`."""
        if isinstance(tokens, str):
            found = self.backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """The token of a number, or the tokens of several; numbers past the vocabulary give `unk_token`."""
        if isinstance(ids, int):
            found = self.backend.id_to_token(ids)
            return self.unk_token if found is None else found
        special = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.convert_ids_to_tokens(int(i)) for i in ids if int(i) not in special]

    # Text to numbers

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self(text, add_special_tokens=add_special_tokens).tokens()

    def encode(self, text: str, text_pair: str | None = None, **options: Any) -> list[int]:
        """Token numbers of one text or pair; options as `__call__`."""
        ids: list[int] = self(text, text_pair, **options)["input_ids"]
        return ids

    def __call__(
        self,
        text: Text | Sequence[Sequence[str]],
        text_pair: Text | Sequence[Sequence[str]] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: Padding = False,
        truncation: Truncation = False,
        max_length: int | None = None,
        stride: int = 0,
        pad_to_multiple_of: int | None = None,
        is_split_into_words: bool = False,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
    ) -> BatchEncoding:
        """Texts to token numbers.

        Args:
            text, text_pair: a string, or a list of them; with `is_split_into_words` a list of words, or
                a list of those. One text gives lists, several give lists of lists.
            padding: True or "longest", to the longest row; "max_length", to `max_length`.
            truncation: True or "longest_first", the longer of a pair first; "only_first"; "only_second".
            max_length: counted with special tokens; `model_max_length` unless given.
            stride: how many tokens a row shares with the one it overflows into.
            pad_to_multiple_of: round the padded length up to a multiple.
            return_tensors: "pt" for tensors [B, L]; rows must then have one length.
            return_token_type_ids, return_attention_mask: by `model_input_names` unless given.
            return_overflowing_tokens: cut-off rests become rows of their own, and
                `overflow_to_sample_mapping` tells of which text.
            return_offsets_mapping: first and past-the-last character of each token in its text.

        Raises:
            ValueError: texts of the wrong type, an option that is none, or a truncation that leaves nothing.
        """
        batched = self._is_batch(text, is_split_into_words)
        texts: list[Any] = list(text) if batched else [text]
        pairs: list[Any] = [None] * len(texts)
        if text_pair is not None:
            pairs = list(text_pair) if batched else [text_pair]
            if len(pairs) != len(texts):
                raise ValueError(f"there are {len(texts)} texts and {len(pairs)} for the pairs")
        strategy = _choice(
            "truncation", truncation, "longest_first", "do_not_truncate", ("only_first", "only_second")
        )
        limit = self.model_max_length if max_length is None else max_length

        encodings: list[Encoding] = []
        samples: list[int] = []
        for sample, (first, second) in enumerate(zip(texts, pairs, strict=True)):
            self._check(first, is_split_into_words)
            if second is not None:
                self._check(second, is_split_into_words)
            whole = self.backend.encode(first, second, is_split_into_words, add_special_tokens)
            if strategy != "do_not_truncate" and len(whole.ids) > limit:
                a = self.backend.encode(first, None, is_split_into_words, False)
                b = None if second is None else self.backend.encode(second, None, is_split_into_words, False)
                special = len(whole.ids) - len(a.ids) - (0 if b is None else len(b.ids))
                _truncate(a, b, limit - special, strategy, stride)
                if b is not None:
                    b.set_sequence_id(1)
                whole = self.backend.post_process(a, b, add_special_tokens)
            rows = [whole, *whole.overflowing] if return_overflowing_tokens else [whole]
            encodings.extend(rows)
            samples.extend([sample] * len(rows))

        names = self.model_input_names
        data: dict[str, list[Any]] = {"input_ids": [row.ids for row in encodings]}
        if return_token_type_ids or (return_token_type_ids is None and "token_type_ids" in names):
            data["token_type_ids"] = [row.type_ids for row in encodings]
        if return_attention_mask or (return_attention_mask is None and "attention_mask" in names):
            data["attention_mask"] = [row.attention_mask for row in encodings]
        if return_special_tokens_mask:
            data["special_tokens_mask"] = [row.special_tokens_mask for row in encodings]
        if return_offsets_mapping:
            data["offset_mapping"] = [row.offsets for row in encodings]
        if return_length:
            data["length"] = [len(row.ids) for row in encodings]
        data = self._pad(data, padding, limit if max_length is None else max_length, pad_to_multiple_of)
        if return_overflowing_tokens:
            data["overflow_to_sample_mapping"] = samples
        if not batched and not return_overflowing_tokens and return_tensors is None:
            data = {key: rows[0] for key, rows in data.items()}
        return BatchEncoding(_as_tensors(data, return_tensors), encodings)

    def pad(
        self,
        encoded: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: Padding = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
        **ignored: Any,
    ) -> BatchEncoding:
        """Rows encoded before, a dict of lists or a list of dicts, at one length: for data collators.

        Entries that are not of this tokenizer (labels, say) are gathered as they are.
        """
        rows = (
            encoded
            if isinstance(encoded, Mapping)
            else {key: [row[key] for row in encoded] for key in encoded[0]}
        )
        lists = {key: [_as_list(value) for value in values] for key, values in rows.items()}
        limit = self.model_max_length if max_length is None else max_length
        return BatchEncoding(
            _as_tensors(self._pad(lists, padding, limit, pad_to_multiple_of), return_tensors)
        )

    def _pad(
        self, data: dict[str, list[Any]], padding: Padding, limit: int, multiple: int | None
    ) -> dict[str, list[Any]]:
        strategy = _choice("padding", padding, "longest", "do_not_pad", ("max_length",))
        if strategy == "do_not_pad" or not data["input_ids"]:
            return data
        if self.pad_token_id is None:
            raise ValueError(f"this {type(self).__name__} has no pad_token to pad with")
        lengths = [len(row) for row in data["input_ids"]]
        if strategy == "max_length" and limit >= UNLIMITED:
            raise ValueError("padding='max_length' needs a max_length: this tokenizer knows no limit")
        length = max(lengths) if strategy == "longest" else limit
        length = -(-length // multiple) * multiple if multiple else length
        fill = {
            "input_ids": self.pad_token_id,
            "attention_mask": 0,
            "token_type_ids": 0,
            "special_tokens_mask": 1,
            "offset_mapping": (0, 0),
        }
        data.setdefault("attention_mask", [[1] * n for n in lengths])

        def padded(row: list[Any], value: Any) -> list[Any]:
            rest = [value] * (length - len(row))
            return row + rest if self.padding_side == "right" else rest + row

        return {
            key: [padded(row, fill[key]) for row in rows] if key in fill else rows
            for key, rows in data.items()
        }

    def _is_batch(self, text: Any, is_split_into_words: bool) -> bool:
        if isinstance(text, str):
            return False
        if not isinstance(text, Sequence) or isinstance(text, bytes):
            raise ValueError(f"text is of type {type(text).__name__}; it must be a string or a list of them")
        return not is_split_into_words or not text or not isinstance(text[0], str)

    def _check(self, text: Any, is_split_into_words: bool) -> None:
        """Refuse what is no text, or no list of words."""
        words = isinstance(text, Sequence) and not isinstance(text, str | bytes)
        if is_split_into_words:
            fits = words and all(isinstance(word, str) for word in text)
        else:
            fits = isinstance(text, str)
        if not fits:
            wanted = "a list of words" if is_split_into_words else "a string"
            raise ValueError(f"a text is {text!r} of type {type(text).__name__}; it must be {wanted}")

    # Numbers to text

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        raise NotImplementedError

    def batch_decode(self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


def _choice(name: str, given: bool | str | None, if_true: str, if_false: str, others: tuple[str, ...]) -> str:
    """An option that may be a boolean or one of several words."""
    found = if_true if given is True else (given or if_false)
    if found not in (if_true, if_false, *others):
        words = ", ".join(repr(word) for word in (if_true, *others, if_false))
        raise ValueError(f"{name} is {given!r}; it must be True, False, or one of {words}")
    return found


def _truncate(a: Encoding, b: Encoding | None, limit: int, strategy: str, stride: int) -> None:
    """Cut a text, or a pair, to `limit` tokens; what is cut off becomes the encodings' `overflowing`."""
    limit = min(limit, sys.maxsize)
    first, second = len(a.ids), 0 if b is None else len(b.ids)
    excess = first + second - limit
    if excess <= 0:
        return
    if strategy == "longest_first" and b is not None:
        shorter, longer = sorted((first, second))
        longer = max(shorter, limit - shorter)
        if shorter + longer > limit:
            shorter, longer = limit // 2, limit - limit // 2
        keep = (shorter, longer) if first <= second else (longer, shorter)
    elif strategy == "only_second":
        keep = (first, second - excess)
    else:
        keep = (first - excess, second)
    if min(keep) < 0 or (strategy == "only_second" and b is None):
        raise ValueError(
            f"truncation={strategy!r} cannot cut {first} and {second} tokens to {limit}; raise max_length, "
            "or cut the other text too"
        )
    for encoding, length in zip((a, b), keep, strict=True):
        if encoding is not None and len(encoding.ids) > length:
            encoding.truncate(length, stride=min(stride, max(length - 1, 0)))


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _as_tensors(data: dict[str, Any], kind: str | None) -> dict[str, Any]:
    if kind is None:
        return data
    if kind != "pt":
        raise ValueError(f"return_tensors is {kind!r}; it must be 'pt' or None")
    import torch

    try:
        return {key: torch.tensor(rows) for key, rows in data.items()}
    except ValueError as error:
        raise ValueError(
            "rows of different lengths make no tensor; use padding=True, or truncation=True"
        ) from error
