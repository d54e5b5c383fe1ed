"""Our models around the parameters of upstream's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import outplace

from .models.base import PretrainedModel


def from_transformers(model: nn.Module) -> PretrainedModel:
    """Our class of the same name around an upstream model's parameters: no copy, same outputs.

    Both models share storage from then on: what trains one changes the other. Layers that something
    has put in the place of plain ones (PEFT's adapters, quantised linears) are taken over as they are.

    Args:
        model: an instance of one of `transformers`' DeBERTa, DeBERTa-V2 or ESM classes, or a
            `PeftModel` around one.

    Raises:
        TypeError: a class that has no counterpart here.
        ValueError: a configuration that is refused here, or layers that do not correspond.
    """
    if callable(unwrap := getattr(model, "get_base_model", None)):
        model = unwrap()
    name = type(model).__name__
    cls = getattr(outplace, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PretrainedModel)):
        raise TypeError(f"{type(model).__module__}.{name} has no counterpart here")
    source: Any = model
    options: dict[str, Any] = {"add_pooling_layer": source.pooler is not None} if name == "EsmModel" else {}
    config = cls.config_class.from_dict(source.config.to_dict())
    with torch.device("meta"):
        ours = cls(config, **options)
    _adopt(ours, model, "")
    rotary: Any = getattr(ours.base_model, "rotary_embeddings", None)
    if rotary is not None and rotary.inv_freq.is_meta:  # In transformers 4 each layer has the same ones.
        rotary.inv_freq = source.base_model.encoder.layer[0].attention.self.rotary_embeddings.inv_freq
    left = [key for key, tensor in ours.state_dict().items() if tensor.is_meta]
    if left:
        raise ValueError(f"{name} of transformers has no parameters for {', '.join(left)}")
    return ours.train(model.training)


def _adopt(ours: nn.Module, theirs: nn.Module, path: str) -> None:
    """Take over, in place of each module or parameter of ours, what stands at its path in theirs."""
    for name, child in list(ours.named_children()):
        other = getattr(theirs, name, None)
        if not isinstance(other, nn.Module):
            # Dropout and the like, which upstream may keep elsewhere and which hold no parameters.
            if any(True for _ in child.parameters()):
                raise ValueError(f"transformers' model has no module {path}{name}")
            continue
        if type(child).__module__.startswith("torch.") and not isinstance(child, nn.ModuleList):
            setattr(ours, name, other)
        else:
            _adopt(child, other, f"{path}{name}.")
    for name, _ in list(ours.named_parameters(recurse=False)):
        setattr(ours, name, getattr(theirs, name))
    for name, _ in list(ours.named_buffers(recurse=False)):
        setattr(ours, name, getattr(theirs, name))
