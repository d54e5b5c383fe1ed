"""What every model configuration here is: typed fields, checked, and kept whole through `config.json`."""

from __future__ import annotations

import copy
import difflib
import json
import types
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

C = TypeVar("C", bound="PretrainedConfig")

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
MAX_JSON_BYTES = 32 << 20
AttnImplementation = Literal["auto", "eager", "sdpa", "blockwise", "triton"]
Pack = Literal["auto"] | bool


@dataclass(kw_only=True)
class PretrainedConfig:
    """Fields that all families share. Names and defaults are upstream's.

    `num_labels`, `id2label` and `label2id` follow each other: setting one sets the others.
    A key of a checkpoint's `config.json` that is no field is kept as an attribute and saved back;
    a keyword of the constructor that is no field is a mistake.

    Args:
        pack: whether padded batches are computed without their padding; see `base.PretrainedModel.layout`.

    Raises:
        TypeError: a keyword that is no field.
        ValueError: a value of the wrong type, or one that no model can have; the message names the field.
    """

    model_type: ClassVar[str]

    output_attentions: bool = False
    output_hidden_states: bool = False
    return_dict: bool = True
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    problem_type: ProblemType | None = None
    architectures: list[str] | None = None
    dtype: str | None = None
    attn_implementation: AttnImplementation = "auto"
    pack: Pack = "auto"
    num_labels: int = None  # type: ignore[assignment]  # 2, unless id2label says otherwise
    id2label: dict[int, str] | None = None
    label2id: dict[str, int] | None = None

    def __post_init__(self) -> None:
        names, count = self.id2label, self.num_labels
        if names is None:
            self.num_labels = 2 if count is None else count
        elif not isinstance(names, dict):
            self._refuse("id2label", "which maps no class index to a name")
        elif count not in (None, len(names)):
            self._refuse("num_labels", f"but id2label names {len(names)} classes; give one of them")
        else:
            self._name_labels({int(i): label for i, label in names.items()})  # JSON has no integer keys
        for name, annotation in _field_types(type(self)).items():
            if not _is_a(getattr(self, name), annotation):
                self._refuse(name, f"which is not of the type {_readable(annotation)}")
        self.validate()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if "label2id" not in self.__dict__:  # the last field: the constructor is still filling them in
            return
        if name == "num_labels" and isinstance(value, int) and len(self.id2label or ()) != value:
            self._name_labels({i: f"LABEL_{i}" for i in range(value)})
        elif name == "id2label" and isinstance(value, dict) and len(value) != self.num_labels:
            self._name_labels(value)

    def _name_labels(self, names: dict[int, str]) -> None:
        object.__setattr__(self, "num_labels", len(names))
        object.__setattr__(self, "id2label", names)
        if set((self.label2id or {}).values()) != set(names):
            object.__setattr__(self, "label2id", {label: i for i, label in names.items()})

    def validate(self) -> None:
        """Refuse what no model can have. Families add their own."""
        refused = self.refused_attention()
        if self.attn_implementation in refused:
            self._refuse("attn_implementation", refused[self.attn_implementation])
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            self._refuse(
                "problem_type", "but there is one label; use num_labels=2 for two classes, or 'regression'"
            )

    def refused_attention(self) -> dict[str, str]:
        """The values of `attn_implementation` that this model cannot have, and why; families add theirs."""
        return {}

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        raise NotImplementedError

    def _refuse(self, name: str, why: str) -> typing.NoReturn:
        raise ValueError(f"{type(self).__name__}.{name} is {getattr(self, name)!r}, {why}")

    def _require(self, name: str, fits: bool, why: str) -> None:
        if not fits:
            self._refuse(name, why)

    def _require_positive(self, *names: str) -> None:
        for name in names:
            self._require(name, getattr(self, name) > 0, "but it must be at least 1")

    def _require_probability(self, *names: str) -> None:
        for name in names:
            self._require(name, 0 <= getattr(self, name) < 1, "but a dropout probability lies in [0, 1)")

    @classmethod
    def from_dict(cls: type[C], values: dict[str, Any], **overrides: Any) -> C:
        """A configuration from the contents of a `config.json`; `overrides` win and must be fields.

        Raises:
            TypeError: an override that is no field; the message names the nearest one.
            ValueError: as the constructor, or the file is of another family.
        """
        known = {field.name for field in fields(cls)}
        for name in overrides.keys() - known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        values = dict(values)
        family = values.pop("model_type", cls.model_type)
        if family != cls.model_type:
            raise ValueError(f"{cls.__name__} is of model_type {cls.model_type!r}, the config of {family!r}")
        if "torch_dtype" in values:
            values.setdefault("dtype", values.pop("torch_dtype"))
        values.pop("_attn_implementation", None)
        labels = {"num_labels", "id2label", "label2id"}
        if labels & overrides.keys():
            values = {name: value for name, value in values.items() if name not in labels}
        values |= overrides
        config = cls(**{name: value for name, value in values.items() if name in known})
        for name in values.keys() - known:
            object.__setattr__(config, name, values[name])
        return config

    @classmethod
    def from_json_file(cls: type[C], path: str | Path, **overrides: Any) -> C:
        """As `from_dict`, from a file. Raises `ValueError` naming the file where it is not a JSON object."""
        return cls.from_dict(read_json_object(path), **overrides)

    @classmethod
    def from_pretrained(cls: type[C], name_or_path: str | Path, **options: Any) -> C:
        """The configuration of a folder or Hub repository.

        `options` are those of the Hub (`revision`, `subfolder`, `cache_dir`, `token`,
        `local_files_only`, `force_download`) and fields to override.
        """
        from ..weights.hub import HUB_OPTIONS, fetch_config

        hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        return cls.from_json_file(fetch_config(name_or_path, **hub), **options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` into `folder`, which is made where it does not exist."""
        from ..weights.saving import write_atomically

        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(folder) / "config.json", self.to_json_string().encode())

    def get_text_config(self: C, decoder: bool = False) -> C:
        """Itself: what tools ask that serve models of several modalities, PEFT among them."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """All that `config.json` holds, unknown keys included.

        A field left at a default of None is not written: upstream reads several of them by
        "is the key there", and fails on a null.
        """
        unset = {field.name for field in fields(self) if field.default is None}
        here = {"attn_implementation", "num_labels"} | ({"pack"} if self.pack == "auto" else set())
        values = {
            name: value
            for name, value in vars(self).items()
            if not (value is None and name in unset) and name not in here
        }
        return copy.deepcopy(values) | {"model_type": self.model_type}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def replace(self: C, **changes: Any) -> C:
        """A deep copy with some fields changed. Errors as `from_dict`."""
        return self.from_dict(copy.deepcopy(vars(self)), **changes)


def read_json_object(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ValueError` naming the file where it holds something else."""
    size = Path(path).stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes; a configuration or an index has {MAX_JSON_BYTES:,} at the most"
        )
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def _field_types(cls: type[PretrainedConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _is_a(value: Any, annotation: Any) -> bool:
    """Whether `value` is of the annotated type. An int is a float, a bool is no int."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_is_a(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list | tuple) and all(_is_a(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _is_a(key, arguments[0]) and _is_a(item, arguments[1]) for key, item in value.items()
        )
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _readable(annotation: Any) -> str:
    return (
        annotation.__name__
        if isinstance(annotation, type) and not typing.get_args(annotation)
        else str(annotation).replace("typing.", "")
    )
