"""What parity is measured over: every class, the configurations that change arithmetic, and inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import outplace

SPAN = 8
"""Relative positions told apart in the tiny configurations; inputs are shorter and longer than it."""

_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_DEBERTA = _SHAPE | {"vocab_size": 61, "max_position_embeddings": 32, "max_relative_positions": SPAN}
_ESM = _SHAPE | {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "max_position_embeddings": 40}
_BOTH = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

DEBERTA = {
    "no relative attention": {},
    "c2p": {"relative_attention": True, "pos_att_type": ["c2p"]},
    "p2c": {"relative_attention": True, "pos_att_type": "p2c"},
    "c2p|p2c": {"relative_attention": True, "pos_att_type": "c2p|p2c"},
    "relative, no terms": {"relative_attention": True},
    "c2p|p2c|p2p": {"relative_attention": True, "pos_att_type": "c2p|p2c|p2p"},
    "talking head": _BOTH | {"talking_head": True},
    "no absolute positions": _BOTH | {"position_biased_input": False},
    "token types": _BOTH | {"type_vocab_size": 2},
    "embedding size": _BOTH | {"embedding_size": 24},
    "other activations": _BOTH | {"hidden_act": "relu", "pooler_hidden_act": "tanh"},
}
DEBERTA_V2 = {
    "no relative attention": {},
    "c2p": {"relative_attention": True, "pos_att_type": ["c2p"]},
    "p2c": {"relative_attention": True, "pos_att_type": "p2c"},
    "c2p|p2c": _BOTH,
    "shared keys": _BOTH | {"share_att_key": True},
    "buckets": _BOTH | {"position_buckets": 4},
    "V3 (buckets, shared, normed)": _BOTH
    | {
        "position_buckets": 4,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "convolution": _BOTH | {"conv_kernel_size": 3, "conv_act": "gelu"},
    "grouped convolution": _BOTH | {"conv_kernel_size": 5, "conv_groups": 4},
    "no absolute positions": _BOTH | {"position_biased_input": False},
    "token types": _BOTH | {"type_vocab_size": 2},
    "embedding size": _BOTH | {"embedding_size": 24},
}
ESM = {
    "rotary": {"position_embedding_type": "rotary"},
    "rotary, token dropout": {"position_embedding_type": "rotary", "token_dropout": True},
    "absolute": {},
    "absolute, pre-norm": {"emb_layer_norm_before": True},
    "absolute, token dropout": {"token_dropout": True},
    "absolute, pre-norm, token dropout": {"emb_layer_norm_before": True, "token_dropout": True},
}
HEADS = {
    "Deberta": ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "DebertaV2": (
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    ),
    "Esm": ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
}
PADDINGS = ("none", "right", "left")
LENGTHS = (SPAN - 2, 2 * SPAN + 4)


@dataclass(frozen=True)
class Case:
    """One class under one configuration; `attention` is what both sides are told to use."""

    family: str
    head: str
    variant: str
    config: dict[str, Any] = field(hash=False)
    attention: str = "eager"

    @property
    def class_name(self) -> str:
        return self.family + (self.head or "Model")

    def __str__(self) -> str:
        return f"{self.class_name}, {self.variant}, {self.attention}"

    def upstream(self) -> nn.Module:
        """Upstream's model, with seeded weights that make every term count."""
        config = getattr(transformers, f"{self.family}Config")(**self.config)
        config._attn_implementation = self.attention
        model = getattr(transformers, self.class_name)(config).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if name.endswith("orm.weight") else 0.0
            parameter.data = centre + noise * (0.1 if parameter.ndim == 1 else 0.2)
        model.tie_weights()
        return model

    def ours(self, upstream: nn.Module) -> nn.Module:
        """Our model with upstream's state dict; both load the other's strictly."""
        config = getattr(outplace, f"{self.family}Config")(**self.config)
        model = getattr(outplace, self.class_name)(config, attn_implementation=self.attention).eval()
        model.load_state_dict(upstream.state_dict(), strict=True)
        upstream.load_state_dict(model.state_dict(), strict=True)
        upstream.tie_weights()
        return model

    def inputs(self, padding: str, length: int) -> dict[str, Tensor]:
        """Seeded ids, a mask unless there is no padding, token types and labels."""
        generator = torch.Generator().manual_seed(length)
        batch, vocabulary = 3, self.config["vocab_size"]
        ids = torch.randint(4, vocabulary, (batch, length), generator=generator)
        real = torch.ones(batch, length, dtype=torch.long)
        for row, pad in enumerate((0, 1, length // 2) if padding != "none" else ()):
            span = slice(length - pad, length) if padding == "right" else slice(0, pad)
            real[row, span] = 0
        ids = torch.where(real == 1, ids, self.config.get("pad_token_id", 0))
        inputs = {"input_ids": ids}
        if padding != "none":
            inputs["attention_mask"] = real
        if self.config.get("type_vocab_size"):
            inputs["token_type_ids"] = (torch.arange(length) >= length // 2).long().expand(batch, length)
        if self.head == "ForMultipleChoice":
            inputs = {name: torch.stack((x, x.roll(1, 0)), dim=1) for name, x in inputs.items()}
        return inputs | self.labels(ids, real)

    def labels(self, ids: Tensor, real: Tensor) -> dict[str, Tensor]:
        batch, length = ids.shape
        rows, columns = torch.arange(batch), torch.arange(length)
        if self.head == "ForMaskedLM":
            return {"labels": torch.where((real == 1) & (columns % 2 == 0), ids, -100)}
        if self.head == "ForSequenceClassification":
            return {"labels": rows % 3}
        if self.head == "ForTokenClassification":
            return {"labels": torch.where(real == 1, ids % 3, -100)}
        if self.head == "ForQuestionAnswering":
            return {"start_positions": rows + 1, "end_positions": rows + length - 2}
        return {"labels": rows % 2} if self.head == "ForMultipleChoice" else {}


def cases() -> list[Case]:
    """Every class × every variant of its family, the masked-language heads both ways."""
    found = []
    for family, shape, variants in (
        ("Deberta", _DEBERTA, DEBERTA),
        ("DebertaV2", _DEBERTA, DEBERTA_V2),
        ("Esm", _ESM, ESM),
    ):
        for variant, fields in variants.items():
            for head in ("", *HEADS[family]):
                config = shape | fields
                if head in ("ForSequenceClassification", "ForTokenClassification"):
                    config = config | {"num_labels": 3}
                found.append(Case(family, head, variant, config))
                if family == "Esm":
                    found.append(Case(family, head, variant, config, attention="sdpa"))
                elif head == "ForMaskedLM" and variant != "embedding size":
                    found.append(Case(family, head, f"{variant}, legacy=False", config | {"legacy": False}))
    return found
