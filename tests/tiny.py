"""Tiny configurations of every class, with everything switched on that a checkpoint could have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import outplace

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
RELATIVE = {"relative_attention": True, "pos_att_type": "c2p|p2c", "max_relative_positions": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "Deberta": SHAPE
    | RELATIVE
    | {"vocab_size": 61, "type_vocab_size": 2, "talking_head": True, "max_position_embeddings": 32},
    "DebertaV2": SHAPE
    | RELATIVE
    | {
        "vocab_size": 61,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
        "max_position_embeddings": 32,
    },
    "Esm": SHAPE
    | {
        "vocab_size": 33,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "max_position_embeddings": 40,
    },
}
CLASSES = [
    "DebertaModel",
    "DebertaForMaskedLM",
    "DebertaForSequenceClassification",
    "DebertaForTokenClassification",
    "DebertaForQuestionAnswering",
    "DebertaV2Model",
    "DebertaV2ForMaskedLM",
    "DebertaV2ForSequenceClassification",
    "DebertaV2ForTokenClassification",
    "DebertaV2ForQuestionAnswering",
    "DebertaV2ForMultipleChoice",
    "EsmModel",
    "EsmForMaskedLM",
    "EsmForSequenceClassification",
    "EsmForTokenClassification",
]


def family(name: str) -> str:
    return name.removesuffix("Model").partition("For")[0]


def config(name: str, **fields: Any) -> Any:
    """The tiny configuration of a class's family."""
    return getattr(outplace, f"{family(name)}Config")(**CONFIGS[family(name)] | fields)


def model(name: str, **fields: Any) -> Any:
    """A seeded tiny model in eval mode."""
    torch.manual_seed(0)
    return getattr(outplace, name)(config(name, **fields)).eval()


def ids(batch: int = 3, length: int = 12) -> Tensor:
    return torch.randint(4, 30, (batch, length), generator=torch.Generator().manual_seed(1))


def inputs(name: str, batch: int = 3, length: int = 12) -> dict[str, Tensor]:
    """Ids, a mask that hides the end of the second row, and the labels of the class's head."""
    tokens, mask = ids(batch, length), torch.ones(batch, length, dtype=torch.long)
    mask[1, length - length // 3 :] = 0
    rows = torch.arange(batch)
    found = {"input_ids": torch.where(mask == 1, tokens, int(family(name) == "Esm")), "attention_mask": mask}
    if name.endswith("ForMultipleChoice"):
        found = {key: torch.stack((x, x.roll(1, 0)), dim=1) for key, x in found.items()}
    if name.endswith("ForMaskedLM"):
        found["labels"] = torch.where(mask == 1, tokens, -100)
    elif name.endswith("ForTokenClassification"):
        found["labels"] = torch.where(mask == 1, tokens % 2, -100)
    elif name.endswith(("ForSequenceClassification", "ForMultipleChoice")):
        found["labels"] = rows % 2
    elif name.endswith("ForQuestionAnswering"):
        found |= {"start_positions": rows, "end_positions": rows + 2}
    return found
