"""What of transformers is replaced, found and checked before anything is touched."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

import outplace

from .grafts import GRAFTS, OLDER_NAMES, Around

TESTED = ("4.57.6", "5.16.1", "5.24.0")
"""Releases of transformers that the whole of this module's tests run with."""

_SHAPE = {
    "vocab_size": 33,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "initializer_range": 0.2,
}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
_BUCKETS = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta": ("Deberta", _SHAPE | _RELATIVE | {"talking_head": True}),
    "deberta-v2": ("DebertaV2", _SHAPE | _RELATIVE | _BUCKETS),
    "esm": (
        "Esm",
        _SHAPE | {"mask_token_id": 32, "position_embedding_type": "rotary", "token_dropout": True},
    ),
}
"""A tiny model of each family that has everything a checkpoint could have."""

PARAMETERS: dict[str, tuple[str, ...]] = {
    "Embeddings": ("input_ids", "token_type_ids", "position_ids", "mask", "inputs_embeds"),
    "SelfOutput": ("hidden_states", "input_tensor"),
    "Output": ("hidden_states", "input_tensor"),
    "ConvLayer": ("hidden_states", "residual_states", "input_mask"),
    "Encoder": (
        "hidden_states",
        "attention_mask",
        "output_hidden_states",
        "output_attentions",
        "query_states",
    ),
    "Model": ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"),
    "EsmEmbeddings": ("input_ids", "attention_mask", "position_ids", "inputs_embeds"),
    "EsmEncoder": ("hidden_states", "attention_mask"),
    "EsmContactPredictionHead": ("tokens", "attentions"),
    "EsmModel": ("input_ids", "attention_mask", "position_ids"),
}
"""By class: the first parameters of the forward methods through which our code and upstream's meet."""


Undo = list[tuple[type, str, Any]]
"""By class and attribute: what stood there before."""
_ABSENT = object()


class StructureError(ImportError):
    """The installed transformers is built otherwise than what is replaced here."""


@dataclass(frozen=True)
class Replacement:
    """A class of upstream's, and the members that it takes over."""

    cls: type
    members: dict[str, Any]


def put(found: Iterable[Replacement], undo: Undo) -> None:
    """Set members on upstream's classes, and note in `undo` what stood there."""
    for replacement in found:
        for name, value in replacement.members.items():
            undo.append((replacement.cls, name, vars(replacement.cls).get(name, _ABSENT)))
            setattr(replacement.cls, name, value)


def take_back(undo: Undo) -> None:
    """Set on upstream's classes what stood there."""
    for cls, name, before in reversed(undo):
        if before is not _ABSENT:
            setattr(cls, name, before)
        elif name in vars(cls):
            delattr(cls, name)


@contextmanager
def swapped(found: Iterable[Replacement]) -> Iterator[None]:
    """Have the replacements in place for a moment."""
    undo: Undo = []
    try:
        put(found, undo)
        yield
    finally:
        take_back(undo)


@cache
def replacements(family: str) -> tuple[Replacement, ...]:
    """Return what is replaced in a family, in the order of `GRAFTS`; nothing is touched yet.

    Raises:
        StructureError: the installed transformers differs from what is replaced; the message says in what.
    """
    module = importlib.import_module(f"transformers.models.{family.replace('-', '_')}.{_file(family)}")
    found: list[Replacement] = []
    differences: list[str] = []
    for name, graft in GRAFTS[family].items():
        cls = getattr(module, name, None) or getattr(module, OLDER_NAMES.get(name, name), None)
        if cls is None:
            differences.append(f"there is no class {name}")
            continue
        differences += _other_parameters(name, cls)
        found.append(Replacement(cls, members(graft, cls)))
    if not differences:
        differences = _other_tensors(family, module)
    if not differences and transformers.__version__ not in TESTED:
        differences = _other_outputs(family, module, tuple(found))
    if differences:
        raise StructureError(
            f"transformers {transformers.__version__} does not build {SHAPES[family][0]} as outplace "
            f"replaces it: {'; '.join(differences)}. Nothing was changed. Install one of {', '.join(TESTED)}"
        )
    return tuple(found)


def _file(family: str) -> str:
    return f"modeling_{family.replace('-', '_')}"


def members(graft: type, cls: type) -> dict[str, Any]:
    """Return what `cls` takes over: all that the graft and our classes behind it define."""
    found: dict[str, Any] = {}
    for base in reversed(graft.__mro__):
        if base not in (object, nn.Module):
            private = {"__getstate__"}
            found |= {k: v for k, v in vars(base).items() if k in private or not k.startswith("__")}
    found = {k: v.make(getattr(cls, k)) if isinstance(v, Around) else v for k, v in found.items()}
    # Upstream wraps the forward pass of a layer when its class is made, for checkpointing.
    wrapped = type(cls.__name__, (cls,), {"__module__": cls.__module__, **found})
    return {name: vars(wrapped)[name] for name in found}


def _other_parameters(name: str, cls: type) -> list[str]:
    short = name.removeprefix("DebertaV2").removeprefix("Deberta")
    expected = PARAMETERS.get(short, ())
    met = tuple(inspect.signature(cls.forward).parameters)[1:] if expected else ()  # type: ignore[attr-defined]
    if met[: len(expected)] == expected:
        return []
    return [f"{name}.forward takes {', '.join(met)}, not {', '.join(expected)} first"]


def _models(family: str, module: Any, package: Any) -> Any:
    prefix, fields = SHAPES[family]
    owner = package if package is outplace else module
    return getattr(owner, f"{prefix}ForMaskedLM")(getattr(package, f"{prefix}Config")(**fields))


def _other_tensors(family: str, module: Any) -> list[str]:
    with torch.device("meta"):
        theirs, ours = (_models(family, module, package) for package in (transformers, outplace))
    shapes = [
        {key: tuple(x.shape) for key, x in model.state_dict().items() if "inv_freq" not in key}
        for model in (theirs, ours)
    ]
    met, expected = shapes
    return [
        *(f"it has no parameter {key}" for key in expected.keys() - met.keys()),
        *(f"it has a parameter {key} that is not known" for key in met.keys() - expected.keys()),
        *(
            f"{key} has shape {met[key]}, not {expected[key]}"
            for key in met.keys() & expected.keys()
            if met[key] != expected[key]
        ),
    ]


@torch.no_grad()
def _other_outputs(family: str, module: Any, found: tuple[Replacement, ...]) -> list[str]:
    """Run a tiny model as upstream and with the replacements, for a release that is not known."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _models(family, module, transformers).eval()
        ids = torch.randint(4, 30, (2, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model(**inputs, output_hidden_states=True)
    try:
        with swapped(found):
            met = model(**inputs, output_hidden_states=True)
    except (AttributeError, TypeError, ValueError) as error:
        return [f"a tiny model does not run: {error}"]
    pairs = zip((met.logits, *met.hidden_states), (expected.logits, *expected.hidden_states), strict=True)
    difference = max(float((x - y).abs().max()) for x, y in pairs)
    return [] if difference < 1e-4 else [f"a tiny model's outputs differ by {difference:.1e}"]
