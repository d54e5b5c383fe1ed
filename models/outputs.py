"""What the models return: small dataclasses that also index, iterate and unpack as upstream's do."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

States = tuple[Tensor, ...]


@dataclass(eq=False)
class ModelOutput:
    """A dataclass whose fields that are None do not count.

    `output["logits"]` and `output.logits` are the field, `output[0]` and `output[:2]` go by position,
    iteration and `**output` go by name, `to_tuple()` gives the values; one is made of a dictionary too.
    Instances pass through
    `torch.utils._pytree`, so transforms, compilation and export see the tensors inside.
    """

    def __init_subclass__(cls) -> None:
        pytree.register_pytree_node(
            cls,
            lambda output: (list(output.values()), list(output.keys())),
            lambda values, names: cls(dict(zip(names, values, strict=True))),  # type: ignore[call-arg]
            flatten_with_keys_fn=lambda output: (
                [(pytree.MappingKey(name), value) for name, value in output.items()],
                list(output.keys()),
            ),
            serialized_type_name=f"outplace.{cls.__name__}",
        )

    def __post_init__(self) -> None:
        # What rebuilds a mapping of any class does so from a dictionary: accelerate, upstream's pipelines.
        first = fields(self)[0].name
        values = getattr(self, first)
        if isinstance(values, Mapping):
            setattr(self, first, None)
            for name, value in values.items():
                setattr(self, name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def _set_fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def keys(self) -> KeysView[str]:
        return self._set_fields().keys()

    def values(self) -> ValuesView[Any]:
        return self._set_fields().values()

    def items(self) -> ItemsView[str, Any]:
        return self._set_fields().items()

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self._set_fields().values())

    def get(self, name: str, default: Any = None) -> Any:
        return self._set_fields().get(name, default)

    def __getitem__(self, key: str | int | slice) -> Any:
        return self._set_fields()[key] if isinstance(key, str) else self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._set_fields())

    def __len__(self) -> int:
        return len(self._set_fields())

    def __contains__(self, name: object) -> bool:
        return name in self._set_fields()


@dataclass(eq=False)
class BaseModelOutput(ModelOutput):
    """`last_hidden_state` [B, L, E]; `hidden_states`, one [B, L, E] before the first layer and one after
    each; `attentions`, one [B, H, L, L] a layer."""

    last_hidden_state: Tensor | None = None
    hidden_states: States | None = None
    attentions: States | None = None


@dataclass(eq=False)
class BaseModelOutputWithPooling(ModelOutput):
    """As `BaseModelOutput`, with `pooler_output` [B, E]."""

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: States | None = None
    attentions: States | None = None


@dataclass(eq=False)
class MaskedLMOutput(ModelOutput):
    """`loss` [], `logits` [B, L, V]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: States | None = None
    attentions: States | None = None


@dataclass(eq=False)
class SequenceClassifierOutput(ModelOutput):
    """`loss` [], `logits` [B, num_labels]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: States | None = None
    attentions: States | None = None


@dataclass(eq=False)
class TokenClassifierOutput(ModelOutput):
    """`loss` [], `logits` [B, L, num_labels]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: States | None = None
    attentions: States | None = None


@dataclass(eq=False)
class MultipleChoiceModelOutput(ModelOutput):
    """`loss` [], `logits` [B, choices]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: States | None = None
    attentions: States | None = None


@dataclass(eq=False)
class QuestionAnsweringModelOutput(ModelOutput):
    """`loss` [], `start_logits` [B, L], `end_logits` [B, L]."""

    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    hidden_states: States | None = None
    attentions: States | None = None
