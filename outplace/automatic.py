"""The right class for a checkpoint that is known by name alone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import outplace

from .models.base import PretrainedModel
from .models.config import read_json_object
from .weights import CheckpointError
from .weights.hub import HUB_OPTIONS, fetch_config
from .weights.loading import load_checkpoint

if TYPE_CHECKING:
    from .models.tokenization import Tokenizer

FAMILIES = {"deberta": "Deberta", "deberta-v2": "DebertaV2", "esm": "Esm"}
"""`model_type` of a config, and what the family's classes begin with."""

HEADS = (
    "ForMaskedLM",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
)


def load(name_or_path: str | Path, **options: Any) -> tuple[PretrainedModel, Tokenizer]:
    """The model and the tokenizer of a checkpoint, each of the class that the checkpoint needs.

    The model's class is the one that `config.json` names (`architectures`), or, where it names none of
    ours, that of its `model_type` with the head that the weights hold. A checkpoint of V3's pre-training
    gives the model without a head: it is a discriminator, and its masked-language head a leftover.

    Args:
        options: as `PretrainedModel.from_pretrained`.

    Raises:
        FileNotFoundError, CheckpointError: as `PretrainedModel.from_pretrained`.
        ValueError: a family that has no class here.
    """
    tokenizer = load_tokenizer(name_or_path, **{key: options[key] for key in HUB_OPTIONS if key in options})
    return load_checkpoint(model_class, name_or_path, **options), tokenizer


def load_tokenizer(name_or_path: str | Path, **hub: Any) -> Tokenizer:
    """The tokenizer of a checkpoint, by the `model_type` of its `config.json`.

    Args:
        hub: as `Tokenizer.from_pretrained`.

    Raises:
        FileNotFoundError: no such checkpoint, or no vocabulary in it.
        ValueError: a family that has no tokenizer here, or a malformed file.
    """
    path = fetch_config(name_or_path, **hub)
    cls = getattr(outplace, f"{family(read_json_object(path))}Tokenizer")
    return cls.from_pretrained(name_or_path, **hub)  # type: ignore[no-any-return]


def model_class(config: dict[str, Any], keys: Collection[str]) -> type[PretrainedModel]:
    """The class for a checkpoint; see `load`.

    Args:
        config: what its `config.json` holds.
        keys: the names of its tensors.

    Raises:
        CheckpointError: a family that has no class here.
    """
    prefix = family(config)
    classes = {name: getattr(outplace, name) for name in class_names(prefix)}
    for name in config.get("architectures") or ():
        if name in classes:
            return classes[name]  # type: ignore[no-any-return]
    name = f"{prefix}{_head_of(keys)}"
    return classes.get(name, classes[f"{prefix}Model"])  # type: ignore[no-any-return]


def class_names(prefix: str) -> list[str]:
    """The family's model classes: first the one without a head."""
    names = [f"{prefix}Model", *(f"{prefix}{head}" for head in HEADS)]
    return [name for name in names if name in outplace.__all__]


def family(config: dict[str, Any]) -> str:
    """What the names of a checkpoint's family begin with: `Deberta`, `DebertaV2` or `Esm`.

    Raises:
        CheckpointError: none of them.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"config.json has model_type {kind!r}; known here are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def _head_of(keys: Collection[str]) -> str:
    """`ForMaskedLM` and so on, by the parameters that only this head has; `Model` where there are none."""

    def held(*starts: str) -> bool:
        return any(key.startswith(starts) for key in keys)

    if held("qa_outputs."):
        return "ForQuestionAnswering"
    if held("classifier."):
        pooled = held("pooler.", "classifier.dense.")
        return "ForSequenceClassification" if pooled else "ForTokenClassification"
    if held("cls.predictions.", "lm_predictions.", "lm_head.") and not held("mask_predictions."):
        return "ForMaskedLM"
    return "Model"
