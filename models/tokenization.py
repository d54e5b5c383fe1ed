"""What every tokenizer here is: the call that people know, around a `tokenizers.Tokenizer`.

Truncation and padding are done here for each call by itself, never by settings of the shared
`tokenizers` object, so one tokenizer serves any number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer

from .encoding import BatchEncoding

T = TypeVar("T", bound="Tokenizer")

Padding = bool | Literal["longest", "max_length", "do_not_pad"]
Truncation = bool | Literal["longest_first", "only_first", "only_second", "do_not_truncate"]
Text = str | Sequence[str]

CONFIG = "tokenizer_config.json"
UNLIMITED = int(1e30)
"""`model_max_length` of a tokenizer that knows no limit; upstream's number."""

SPECIAL = ("unk_token", "cls_token", "sep_token", "eos_token", "bos_token", "pad_token", "mask_token")


class Tokenizer:
    """Base of the tokenizers.

    `mask_token`, `mask_token_id` and so on, for each name in `SPECIAL`, are None where a family has no
    such token. Another token of the vocabulary can be assigned to the former.

    Args:
        backend: does the splitting; its own padding and truncation must be off.
        special: names of special tokens, of `SPECIAL`, to the tokens.
        model_max_length: what `truncation=True` cuts to unless told.
        padding_side: "right" or "left".
        added_tokens_decoder: tokens beside the backend's own vocabulary, by number.

    Raises:
        ValueError: a special token is not in the vocabulary, or a number does not fit the vocabulary.
    """

    model_input_names: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "attention_mask")
    padding_side: str
    model_max_length: int

    def __init__(
        self,
        backend: FastTokenizer,
        special: Mapping[str, str | None],
        *,
        model_max_length: int | None = None,
        padding_side: str = "right",
        added_tokens_decoder: Mapping[int, AddedToken] | None = None,
    ) -> None:
        _check_side(padding_side)
        self.backend = backend
        self.model_max_length = UNLIMITED if model_max_length is None else model_max_length
        self.padding_side = padding_side
        for number, token in sorted((added_tokens_decoder or {}).items()):
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != number:
                raise ValueError(
                    f"the added token {token.content!r} has the number {number}, where the vocabulary gives "
                    f"{backend.token_to_id(token.content)}"
                )
        self._set_special(special)

    # Special tokens

    def __getattr__(self, name: str) -> Any:
        special = self.__dict__.get("special", {})
        if name in SPECIAL:
            return special.get(name)
        if name.removesuffix("_id") in SPECIAL:
            token = special.get(name.removesuffix("_id"))
            return None if token is None else self.backend.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SPECIAL:
            self._set_special({**self.special, name: value})
        elif name.removesuffix("_id") in SPECIAL:
            raise AttributeError(f"{name} follows {name.removesuffix('_id')}; set that")
        else:
            super().__setattr__(name, value)

    def _set_special(self, special: Mapping[str, str | None]) -> None:
        for name, token in special.items():
            if token is not None and self.backend.token_to_id(token) is None:
                raise ValueError(f"{name} is {token!r}, which is not in the vocabulary")
        self.special = dict(special)
        self._update_backend()

    def _update_backend(self) -> None:
        """Tell the backend which special tokens there are now; overridden by a family."""

    @property
    def all_special_tokens(self) -> list[str]:
        added = self.backend.get_added_tokens_decoder().values()
        named = [token for token in self.special.values() if token is not None]
        return list(dict.fromkeys([*named, *(token.content for token in added if token.special)]))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.convert_tokens_to_ids(token) for token in self.all_special_tokens]

    def get_special_tokens_mask(
        self, token_ids: Iterable[int], already_has_special_tokens: bool = True
    ) -> list[int]:
        """1 for each special token in what was encoded before, 0 for others: for data collators."""
        if not already_has_special_tokens:
            raise ValueError("the token numbers must have their special tokens already")
        special = set(self.all_special_ids)
        return [int(i in special) for i in _as_list(token_ids)]

    # Files

    @classmethod
    def from_pretrained(
        cls: type[T],
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> T:
        """The tokenizer of a folder or Hub repository.

        Args:
            revision, subfolder, cache_dir, token, local_files_only, force_download: as in
                `huggingface_hub.hf_hub_download`.

        Raises:
            FileNotFoundError: no such folder, repository or file.
            ValueError: a file is malformed; the message names it.
        """
        from ..weights.hub import fetch

        hub = {
            "revision": revision,
            "subfolder": subfolder,
            "cache_dir": cache_dir,
            "token": token,
            "local_files_only": local_files_only,
            "force_download": force_download,
        }
        path = fetch(name_or_path, CONFIG, **hub)
        return cls._from_files(name_or_path, hub, {} if path is None else _read_settings(path))

    @classmethod
    def _from_files(
        cls: type[T], name_or_path: str | Path, hub: dict[str, Any], settings: dict[str, Any]
    ) -> T:
        """The tokenizer of a family's vocabulary files; `settings` are keywords of the constructor."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that upstream's tokenizer of the same name, and this one, load."""
        from ..weights.saving import write_atomically

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        settings = {
            **self.special,
            "model_max_length": self.model_max_length,
            "padding_side": self.padding_side,
            "tokenizer_class": type(self).__name__,
            "extra_special_tokens": [x for x in self.all_special_tokens if x not in self.special.values()],
            "added_tokens_decoder": {
                str(number): {name: getattr(token, name) for name in names}
                for number, token in self.backend.get_added_tokens_decoder().items()
            },
        }
        write_atomically(folder / CONFIG, (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode())
        for name, content in self._vocabulary_files().items():
            write_atomically(folder / name, content)

    def _vocabulary_files(self) -> dict[str, bytes]:
        """A family's vocabulary files, by name; added tokens are not for them."""
        raise NotImplementedError

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones not counted."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        """Number of tokens, added ones counted."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def add_tokens(
        self, tokens: str | AddedToken | Iterable[str | AddedToken], special_tokens: bool = False
    ) -> int:
        """Add tokens that are found whole; returns how many were new. Resize the model's embeddings after."""
        found = [tokens] if isinstance(tokens, str | AddedToken) else list(tokens)
        before = len(self)
        add = self.backend.add_special_tokens if special_tokens else self.backend.add_tokens
        add(found)
        return len(self) - before

    def add_special_tokens(self, tokens: Mapping[str, str]) -> int:
        """Set special tokens by name (`{"pad_token": "<pad>"}`); returns how many were new."""
        for name in tokens:
            if name not in SPECIAL:
                raise ValueError(f"{name!r} is no special token's name; there are {', '.join(SPECIAL)}")
        added = self.add_tokens(tokens.values(), special_tokens=True)
        self._set_special({**self.special, **tokens})
        return added

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """A token's number, or the numbers of several; unknown ones have `unk_token_id`."""
        if isinstance(tokens, str):
            found = self.backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """The token of a number, or the tokens of several; numbers past the vocabulary give `unk_token`."""
        numbers = _as_list(ids)
        if isinstance(numbers, int):
            found = self.backend.id_to_token(numbers)
            return self.unk_token if found is None else found
        special = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.convert_ids_to_tokens(i) for i in numbers if i not in special]

    # Text to numbers

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self(text, add_special_tokens=add_special_tokens).tokens()

    def encode(self, text: str, text_pair: str | None = None, **options: Any) -> Any:
        """Token numbers of one text or pair; options as `__call__`."""
        return self(text, text_pair, **options)["input_ids"]

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
            return_length: `length`, the number of tokens before padding.

        Raises:
            ValueError: texts of the wrong type, an option that is none, or a truncation that leaves nothing.
        """
        batched = _is_batch(text, is_split_into_words)
        texts: list[Any] = list(text) if batched else [text]
        pairs = _partners(texts, text_pair, batched, is_split_into_words)
        cut = _choice(
            "truncation", truncation, "longest_first", "do_not_truncate", ("only_first", "only_second")
        )
        limit = self.model_max_length if max_length is None else max_length

        rows: list[Encoding] = []
        samples: list[int] = []
        for sample, (first, second) in enumerate(zip(texts, pairs, strict=True)):
            row = self._encode(first, second, is_split_into_words, add_special_tokens, cut, limit, stride)
            kept = [row, *row.overflowing] if return_overflowing_tokens else [row]
            rows.extend(kept)
            samples.extend([sample] * len(kept))
        self._review(texts, pairs, rows)

        lengths = [len(row.ids) for row in rows]
        length = self._padded_length(lengths, padding, limit, pad_to_multiple_of)
        if length is not None:
            if cut != "do_not_truncate" and limit < UNLIMITED and limit % (pad_to_multiple_of or 1):
                raise ValueError(
                    f"rows cut to {limit} tokens cannot be padded to a multiple of {pad_to_multiple_of}; "
                    "make max_length a multiple too"
                )
            for row in rows:
                row.pad(
                    length, direction=self.padding_side, pad_id=self.pad_token_id, pad_token=self.pad_token
                )

        names = self.model_input_names
        data: dict[str, list[Any]] = {"input_ids": [row.ids for row in rows]}
        if return_token_type_ids or (return_token_type_ids is None and "token_type_ids" in names):
            data["token_type_ids"] = [row.type_ids for row in rows]
        if return_attention_mask or (return_attention_mask is None and "attention_mask" in names):
            data["attention_mask"] = [row.attention_mask for row in rows]
        if return_special_tokens_mask:
            data["special_tokens_mask"] = [row.special_tokens_mask for row in rows]
        if return_offsets_mapping:
            data["offset_mapping"] = [row.offsets for row in rows]
        if return_length:
            data["length"] = lengths
        if return_overflowing_tokens:
            data["overflow_to_sample_mapping"] = samples
        if not batched and not return_overflowing_tokens and return_tensors is None:
            data = {key: values[0] for key, values in data.items()}
        return BatchEncoding(_as_tensors(data, return_tensors), rows)

    def _review(self, texts: list[Any], pairs: list[Any], rows: list[Encoding]) -> None:
        """Warn of or refuse what a call has encoded; overridden by a family."""

    def _encode(
        self,
        first: Any,
        second: Any,
        words: bool,
        add_special_tokens: bool,
        cut: str,
        limit: int,
        stride: int,
    ) -> Encoding:
        """One text or pair, cut but not padded."""
        row = self.backend.encode(first, second, words, add_special_tokens)
        if cut == "do_not_truncate" or len(row.ids) <= limit:
            return row
        a = self.backend.encode(first, None, words, False)
        # Behind an empty first text, for its rests too are then of the second type.
        empty: Any = [] if words else ""
        b = None if second is None else self.backend.encode(empty, second, words, False)
        special = len(row.ids) - len(a.ids) - (0 if b is None else len(b.ids))
        self._truncate(a, b, limit - special, cut, stride)
        return self.backend.post_process(a, b, add_special_tokens)

    def _truncate(self, a: Encoding, b: Encoding | None, limit: int, cut: str, stride: int) -> None:
        """Cut what is longer than `limit` to it; what is cut off becomes the encodings' `overflowing`."""
        first, second = len(a.ids), 0 if b is None else len(b.ids)
        if cut == "only_second":
            keep = (first, limit - first)
        elif cut == "only_first" or b is None:
            keep = (limit - second, second)
        else:
            keep = self._shares(first, second, limit)
        if min(keep) < 0 or (cut == "only_second" and b is None):
            raise ValueError(
                f"truncation={cut!r} cannot cut {first} and {second} tokens to {limit}; raise max_length, "
                "or cut the other text too"
            )
        for encoding, length in zip((a, b), keep, strict=True):
            if encoding is not None and len(encoding.ids) > length:
                if length and not 0 <= stride < length:
                    raise ValueError(f"stride is {stride}; it must be under the {length} tokens a row keeps")
                encoding.truncate(length, stride=stride if length else 0)

    def _shares(self, first: int, second: int, limit: int) -> tuple[int, int]:
        """How many tokens of each of a pair are kept, where the longer is cut first."""
        shorter = min(first, second, limit // 2)
        return (shorter, limit - shorter) if first <= second else (limit - shorter, shorter)

    def _padded_length(
        self, lengths: Sequence[int], padding: Padding, limit: int, multiple: int | None
    ) -> int | None:
        strategy = _choice("padding", padding, "longest", "do_not_pad", ("max_length",))
        if strategy == "do_not_pad" or not lengths:
            return None
        if self.pad_token_id is None:
            raise ValueError(f"this {type(self).__name__} has no pad_token to pad with")
        if strategy == "max_length" and limit >= UNLIMITED:
            raise ValueError("padding='max_length' needs a max_length: this tokenizer knows no limit")
        length = max(lengths) if strategy == "longest" else limit
        return -(-length // multiple) * multiple if multiple else length

    def pad(
        self,
        encoded: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: Padding = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: str | None = None,
        verbose: bool = True,
    ) -> BatchEncoding:
        """What was encoded before, at one length: for data collators.

        Entries that are not of a tokenizer (labels, say) are gathered as they are.

        Args:
            encoded: a row, a dict of rows' lists, or a list of rows.
            padding, max_length, pad_to_multiple_of, return_attention_mask, return_tensors: as `__call__`.
            padding_side: this tokenizer's unless given.
            verbose: not used; collators may pass it.

        Raises:
            ValueError: no `input_ids`, or an option that is none.
        """
        if not isinstance(encoded, Mapping):
            encoded = {key: [row[key] for row in encoded] for key in (encoded[0] if encoded else ())}
        if "input_ids" not in encoded:
            raise ValueError(f"there are no input_ids to pad, but {', '.join(encoded) or 'nothing'}")
        side = _check_side(self.padding_side if padding_side is None else padding_side)
        data = {key: [_as_list(row) for row in _as_list(rows)] for key, rows in encoded.items()}
        single = bool(data["input_ids"]) and isinstance(data["input_ids"][0], int)
        if single:
            data = {key: [row] for key, row in data.items()}
        lengths = [len(row) for row in data["input_ids"]]
        if return_attention_mask or (
            return_attention_mask is None and "attention_mask" in self.model_input_names
        ):
            data.setdefault("attention_mask", [[1] * n for n in lengths])
        limit = self.model_max_length if max_length is None else max_length
        length = self._padded_length(lengths, padding, limit, pad_to_multiple_of)
        fill = {
            "input_ids": self.pad_token_id,
            "attention_mask": 0,
            "token_type_ids": 0,
            "special_tokens_mask": 1,
            "offset_mapping": (0, 0),
        }

        def padded(row: list[Any], value: Any) -> list[Any]:
            rest = [value] * ((length or 0) - len(row))
            return row + rest if side == "right" else rest + row

        data = {
            key: [padded(row, fill[key]) for row in rows] if key in fill else rows
            for key, rows in data.items()
        }
        if single and return_tensors is None:
            data = {key: rows[0] for key, rows in data.items()}
        return BatchEncoding(_as_tensors(data, return_tensors))

    # Numbers to text

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        numbers = _as_list(ids)
        return self.backend.decode([numbers] if isinstance(numbers, int) else numbers, skip_special_tokens)

    def batch_decode(self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


def _read_settings(path: Path) -> dict[str, Any]:
    """What of a `tokenizer_config.json` the constructors take."""
    from .config import read_json_object

    values = read_json_object(path)
    try:
        special = {name: values[name] for name in SPECIAL if name in values}
        added = (values.get("added_tokens_decoder") or {}).items()
        return {
            **{name: x["content"] if isinstance(x, dict) else x for name, x in special.items()},
            **{name: values[name] for name in ("model_max_length", "padding_side") if name in values},
            "added_tokens_decoder": {int(i): AddedToken(**fields) for i, fields in added},
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes its tokens in a way not known here: {error}") from error


def _choice(name: str, given: bool | str | None, if_true: str, if_false: str, others: tuple[str, ...]) -> str:
    """An option that may be a boolean or one of several words."""
    found = if_true if given is True else (given or if_false)
    if found not in (if_true, if_false, *others):
        words = ", ".join(repr(word) for word in (if_true, *others, if_false))
        raise ValueError(f"{name} is {given!r}; it must be True, False, or one of {words}")
    return found


def _check_side(side: str) -> str:
    if side not in ("right", "left"):
        raise ValueError(f"padding_side is {side!r}; it must be 'right' or 'left'")
    return side


def _is_batch(text: Any, is_split_into_words: bool) -> bool:
    if isinstance(text, str):
        return False
    if not isinstance(text, Sequence) or isinstance(text, bytes):
        raise ValueError(f"text is of type {type(text).__name__}; it must be a string or a list of them")
    return not is_split_into_words or not text or not isinstance(text[0], str)


def _partners(texts: list[Any], text_pair: Any, batched: bool, is_split_into_words: bool) -> list[Any]:
    """What each text is paired with, None where it is alone; all texts are checked."""
    pairs: list[Any] = [None] * len(texts)
    if text_pair is not None:
        if batched and not _is_batch(text_pair, is_split_into_words):
            raise ValueError("text is a list of texts, and text_pair is one alone; give a list for both")
        pairs = list(text_pair) if batched else [text_pair]
        if len(pairs) != len(texts):
            raise ValueError(f"there are {len(texts)} texts and {len(pairs)} for the pairs")
    for text in texts if text_pair is None else texts + pairs:
        _check_text(text, is_split_into_words)
    return pairs


def _check_text(text: Any, is_split_into_words: bool) -> None:
    """Refuse what is no text, or no list of words."""
    if not is_split_into_words and not isinstance(text, str):
        raise ValueError(f"a text is of type {type(text).__name__}; it must be a string")
    if is_split_into_words and (isinstance(text, str | bytes) or not isinstance(text, Sequence)):
        raise ValueError(f"a text is of type {type(text).__name__}; it must be a list of words")
    for word in text if is_split_into_words else ():
        if not isinstance(word, str):
            raise ValueError(f"a word is of type {type(word).__name__}; it must be a string")


def _as_list(value: Any) -> Any:
    """Tensors and arrays as Python numbers, other things as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_tensors(data: dict[str, Any], kind: str | None) -> dict[str, Any]:
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
