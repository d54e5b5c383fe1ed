"""What every tokenizer here is: the call that people know, around a `tokenizers.Tokenizer`.

Truncation and padding are done here for each call by itself, never by settings of the shared
`tokenizers` object, so one tokenizer serves any number of threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer

from .encoding import BatchEncoding, Rewritings, as_list, as_tensors
from .rewriting import Rewritten

T = TypeVar("T", bound="Tokenizer")

Padding = bool | Literal["longest", "max_length", "do_not_pad"]
Truncation = bool | Literal["longest_first", "only_first", "only_second", "do_not_truncate"]
Text = str | Sequence[str]

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
UNLIMITED = int(1e30)
"""`model_max_length` of a tokenizer that knows no limit; upstream's number."""

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

SPECIAL = ("unk_token", "cls_token", "sep_token", "eos_token", "bos_token", "pad_token", "mask_token")


class Tokenizer:
    """Base of the tokenizers.

    `mask_token`, `mask_token_id` and so on, for each name in `SPECIAL`, are None where a family has no
    such token. Another token of the vocabulary can be assigned to the former.

    Args:
        backend: does the splitting; its own padding and truncation must be off.
        special: names of special tokens, of `SPECIAL`, to the tokens.
        model_max_length: what `truncation=True` cuts to unless told.
        padding_side, truncation_side: "right" or "left".
        added_tokens_decoder: tokens beside the backend's own vocabulary, by number.

    Raises:
        ValueError: a special token is not in the vocabulary, or a number does not fit the vocabulary.
    """

    model_input_names: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "attention_mask")
    settings: ClassVar[tuple[str, ...]] = ("model_max_length", "padding_side", "truncation_side")
    """Keywords of the constructor that `tokenizer_config.json` holds."""
    padding_side: str
    truncation_side: str
    model_max_length: int

    def __init__(
        self,
        backend: FastTokenizer,
        special: Mapping[str, str | None],
        *,
        model_max_length: int | None = None,
        padding_side: str = "right",
        truncation_side: str = "right",
        added_tokens_decoder: Mapping[int, AddedToken] | None = None,
    ) -> None:
        _check_side("padding_side", padding_side)
        _check_side("truncation_side", truncation_side)
        self.backend = backend
        self.model_max_length = UNLIMITED if model_max_length is None else model_max_length
        self.padding_side = padding_side
        self.truncation_side = truncation_side
        for number, token in sorted((added_tokens_decoder or {}).items()):
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != number:
                raise ValueError(
                    f"the added token {token.content!r} has the number {number}, where the vocabulary gives "
                    f"{backend.token_to_id(token.content)}"
                )
        self._add_special(special)
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

    def _add_special(self, special: Mapping[str, str | None]) -> None:
        """Add the special tokens that a vocabulary of this family leaves out; overridden by a family."""

    def _update_backend(self) -> None:
        """Tell the backend which tokens there are now; overridden by a family."""

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
        return [int(i in special) for i in as_list(token_ids)]

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
        **options: Any,
    ) -> T:
        """The tokenizer of a folder or Hub repository.

        Args:
            revision, subfolder, cache_dir, token, local_files_only, force_download: as in
                `huggingface_hub.hf_hub_download`.
            options: keywords of the constructor, in the place of what the files say.

        Raises:
            FileNotFoundError: no such folder, repository or file.
            ValueError: a file is malformed; the message names it.
        """
        hub = {
            "revision": revision,
            "subfolder": subfolder,
            "cache_dir": cache_dir,
            "token": token,
            "local_files_only": local_files_only,
            "force_download": force_download,
        }
        return cls._from_files(name_or_path, hub, {**cls._read_settings(name_or_path, hub), **options})

    @classmethod
    def _read_settings(cls, name_or_path: str | Path, hub: dict[str, Any]) -> dict[str, Any]:
        """What of a checkpoint's settings the constructor takes; tokens may lie in files of their own."""
        from ..weights.hub import fetch
        from .config import read_json_object

        def read(name: str) -> tuple[Path | None, dict[str, Any]]:
            path = fetch(name_or_path, name, **hub)
            return path, {} if path is None else read_json_object(path)

        path, values = read(CONFIG)
        special_path, special = read(SPECIAL_TOKENS)
        named = {name: x for name, x in {**special, **values}.items() if name in SPECIAL}
        decoder = values.get("added_tokens_decoder")
        numbers_path, numbers = (path, {}) if decoder else read(ADDED_TOKENS)
        with _known_form(special_path or path):
            tokens = {name: x["content"] if isinstance(x, dict) else x for name, x in named.items()}
        with _known_form(numbers_path):
            added = {
                int(number): AddedToken(token, special=token in tokens.values(), normalized=False)
                for token, number in numbers.items()
            }
        with _known_form(path):
            described = {int(number): AddedToken(**fields) for number, fields in (decoder or {}).items()}
        own = {name: values[name] for name in cls.settings if name in values}
        return {**tokens, **own, "added_tokens_decoder": {**added, **described}}

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
            **{name: getattr(self, name) for name in self.settings},
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
        """A family's vocabulary files, by name."""
        raise NotImplementedError

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload tokenizer",
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Save to a Hub repository, in one commit; as `PretrainedModel.push_to_hub`."""
        from ..weights.publishing import push

        return push(
            repo_id,
            self.save_pretrained,
            commit_message=commit_message,
            token=token,
            private=private,
            revision=revision,
            create_pr=create_pr,
        )

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
        self._update_backend()
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
        numbers = as_list(ids)
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
        if is_split_into_words:
            self._check_words()
        cut = _choice(
            "truncation", truncation, "longest_first", "do_not_truncate", ("only_first", "only_second")
        )
        limit = self.model_max_length if max_length is None else max_length

        given, rewritten = self._rewrite_all(texts, pairs, is_split_into_words)
        encoded = self._encode(*given, is_split_into_words, add_special_tokens, cut, limit, stride)
        rows: list[Encoding] = []
        samples: list[int] = []
        for sample, row in enumerate(encoded):
            kept = [row, *row.overflowing] if return_overflowing_tokens else [row]
            rows.extend(kept)
            samples.extend([sample] * len(kept))
        self._review(texts, pairs, rows)

        lengths = [len(row) for row in rows]
        length = self._padded_length(lengths, padding, limit, pad_to_multiple_of)
        if length is not None:
            if cut != "do_not_truncate" and limit < UNLIMITED and limit % (pad_to_multiple_of or 1):
                raise ValueError(
                    f"rows cut to {limit} tokens cannot be padded to a multiple of {pad_to_multiple_of}; "
                    "make max_length a multiple too"
                )
            fill = {"direction": self.padding_side, "pad_id": self.pad_token_id, "pad_token": self.pad_token}
            for row in rows:
                row.pad(length, **fill)

        names = self.model_input_names
        data: dict[str, list[Any]] = {"input_ids": [row.ids for row in rows]}
        if return_token_type_ids or (return_token_type_ids is None and "token_type_ids" in names):
            data["token_type_ids"] = [row.type_ids for row in rows]
        if return_attention_mask or (return_attention_mask is None and "attention_mask" in names):
            data["attention_mask"] = [row.attention_mask for row in rows]
        if return_special_tokens_mask:
            data["special_tokens_mask"] = [row.special_tokens_mask for row in rows]
        rewritings = [rewritten.get(sample) for sample in samples] if rewritten else []
        if return_offsets_mapping:
            known = BatchEncoding({}, rows, rewritings)
            data["offset_mapping"] = [known.offsets(i) for i in range(len(rows))]
        if return_length:
            data["length"] = lengths
        if return_overflowing_tokens:
            data["overflow_to_sample_mapping"] = samples
        if not batched and not return_overflowing_tokens and return_tensors is None:
            data = {key: values[0] for key, values in data.items()}
        return BatchEncoding(as_tensors(data, return_tensors), rows, rewritings)

    def _review(self, texts: list[Any], pairs: list[Any], rows: list[Encoding]) -> None:
        """Warn of or refuse what a call has encoded; overridden by a family."""

    def _check_words(self) -> None:
        """Refuse words one by one where they would be encoded wrongly; overridden by a family."""

    def _rewrite(self, text: str) -> Rewritten | None:
        """What the backend is given in the place of a text, if it is another; overridden by a family."""
        return None

    def _rewrite_all(
        self, texts: list[Any], pairs: list[Any], words: bool
    ) -> tuple[tuple[list[Any], list[Any]], dict[int, Rewritings]]:
        """The texts as the backend is given them, and for each row of which some were rewritten, those."""
        given: tuple[list[Any], list[Any]] = ([], [])
        rewritten: dict[int, dict[tuple[int, int | None], Rewritten]] = {}

        def one(text: str, row: int, *place: Any) -> str:
            made = self._rewrite(text)
            if made is None:
                return text
            rewritten.setdefault(row, {})[place] = made
            return made.text

        for which, column in enumerate((texts, pairs)):
            for row, text in enumerate(column):
                if words and text is not None:
                    given[which].append([one(word, row, which, i) for i, word in enumerate(text)])
                else:
                    given[which].append(None if text is None else one(text, row, which, None))
        return given, rewritten  # type: ignore[return-value]

    def _encode(
        self,
        texts: list[Any],
        pairs: list[Any],
        words: bool,
        add_special_tokens: bool,
        cut: str,
        limit: int,
        stride: int,
    ) -> list[Encoding]:
        """The texts or pairs, cut but not padded."""
        both = [text if pair is None else (text, pair) for text, pair in zip(texts, pairs, strict=True)]
        if cut == "do_not_truncate" or limit >= UNLIMITED:
            return self._encode_batch(both, words, add_special_tokens)
        # What has fewer bytes than two a token will hardly be cut; the rest is encoded in parts that can be.
        short = [i for i, row in enumerate(zip(texts, pairs, strict=True)) if _size(row) <= 2 * limit]
        whole = self._encode_batch([both[i] for i in short], words, add_special_tokens)
        rows = {i: row for i, row in zip(short, whole, strict=True) if len(row) <= limit}
        long = [i for i in range(len(texts)) if i not in rows]
        # A second text is encoded behind an empty first one, for its rests too are then of its type.
        empty: Any = [] if words else ""
        seconds = [(empty, pairs[i]) for i in long if pairs[i] is not None]
        second = iter(self._encode_batch(seconds, words, False))
        for i, a in zip(long, self._encode_batch([texts[i] for i in long], words, False), strict=True):
            b = None if pairs[i] is None else next(second)
            special = self.backend.num_special_tokens_to_add(b is not None) if add_special_tokens else 0
            if len(a) + (0 if b is None else len(b)) > limit - special:
                self._truncate(a, b, limit - special, cut, stride)
            rows[i] = self.backend.post_process(a, b, add_special_tokens)
        return [rows[i] for i in range(len(texts))]

    def _encode_batch(self, inputs: list[Any], words: bool, add_special_tokens: bool) -> list[Encoding]:
        if len(inputs) > 1:
            return self.backend.encode_batch(inputs, words, add_special_tokens)
        # One alone starts no threads, which a process that forks later would be warned of.
        pairs = [one if isinstance(one, tuple) else (one, None) for one in inputs]
        return [self.backend.encode(first, second, words, add_special_tokens) for first, second in pairs]

    def _truncate(self, a: Encoding, b: Encoding | None, limit: int, cut: str, stride: int) -> None:
        """Cut what is longer than `limit` to it; what is cut off becomes the encodings' `overflowing`."""
        first, second = len(a), 0 if b is None else len(b)
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
            if encoding is not None and len(encoding) > length:
                if length and not 0 <= stride < length:
                    raise ValueError(f"stride is {stride}; it must be under the {length} tokens a row keeps")
                encoding.truncate(length, stride if length else 0, self.truncation_side)

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
        side = self.padding_side if padding_side is None else _check_side("padding_side", padding_side)
        data = {key: [as_list(row) for row in as_list(rows)] for key, rows in encoded.items()}
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
        return BatchEncoding(as_tensors(data, return_tensors))

    # Numbers to text

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        numbers = as_list(ids)
        return self.backend.decode([numbers] if isinstance(numbers, int) else numbers, skip_special_tokens)

    def batch_decode(self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


@contextmanager
def _known_form(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes its tokens in a way not known here: {error}") from error


def _choice(name: str, given: bool | str | None, if_true: str, if_false: str, others: tuple[str, ...]) -> str:
    """An option that may be a boolean or one of several words."""
    found = if_true if given is True else (given or if_false)
    if found not in (if_true, if_false, *others):
        words = ", ".join(repr(word) for word in (if_true, *others, if_false))
        raise ValueError(f"{name} is {given!r}; it must be True, False, or one of {words}")
    return found


def _check_side(name: str, side: str) -> str:
    if side not in ("right", "left"):
        raise ValueError(f"{name} is {side!r}; it must be 'right' or 'left'")
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
    for word in text if is_split_into_words else (text,):
        if not isinstance(word, str):
            raise ValueError(f"a word is of type {type(word).__name__}; it must be a string")
        if not word.isascii() and (lone := LONE_SURROGATE.search(word)):
            raise ValueError(
                f"a text has a lone surrogate, {lone[0]!a} at {lone.start()}, which is no character; decode "
                "its bytes with errors='replace'"
            )


def _size(row: tuple[Any, Any]) -> int:
    """Bytes of a text or a pair."""
    texts = [[text] if isinstance(text, str) else text for text in row if text is not None]
    return sum(len(word) if word.isascii() else len(word.encode()) for text in texts for word in text)
