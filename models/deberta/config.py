"""Configuration of DeBERTa, and what DeBERTa-V2 shares with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import PretrainedConfig
from ..layers import ACTIVATIONS

POSITION_TERMS = ("c2p", "p2c", "p2p", "none")
REFUSED_BY_TALKING_HEADS = dict.fromkeys(
    ("sdpa", "blockwise", "triton"),
    "but talking heads mix the scores of all heads, which only 'eager' forms together",
)
"""Values of `attn_implementation` that a model with talking heads cannot have, and why."""


@dataclass(kw_only=True)
class DisentangledConfig(PretrainedConfig):
    """Fields of both generations of DeBERTa. Where a default differs, the family states it.

    Args:
        relative_attention: whether attention is disentangled (paper, section 3.1).
        pos_att_type: the position terms, of "c2p" and "p2c", as a list or as "c2p|p2c". "p2p" is
            accepted and computes nothing, as upstream; V1 counts it in the scale of the scores.
        max_relative_positions: the paper's k; below 1 it is `max_position_embeddings`.
        position_biased_input: whether absolute positions are added to the input.
        embedding_size: width of the embedding tables, projected to `hidden_size`; that unless given.
        cls_dropout: before the classifier; `hidden_dropout_prob` unless given.
        legacy: which masked-language head is built, `cls.predictions` (upstream's) or
            `lm_predictions` (the original's, which the published checkpoints carry).
        enhanced_mask_decoder: whether the masked-language head sees absolute positions through the
            decoder of the paper's section 3.2. Beyond upstream; needs `position_biased_input=False`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    relative_attention: bool = False
    max_relative_positions: int = -1
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    position_biased_input: bool = True
    pos_att_type: list[str] | str | None = None
    pooler_dropout: float = 0.0
    pooler_hidden_act: str = "gelu"
    pooler_hidden_size: int | None = None
    embedding_size: int | None = None
    cls_dropout: float | None = None
    legacy: bool = True
    enhanced_mask_decoder: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.pos_att_type, str):
            self.pos_att_type = [term.strip() for term in self.pos_att_type.lower().split("|")]
        if self.pooler_hidden_size is None:
            self.pooler_hidden_size = self.hidden_size
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        self._require_positive(
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        )
        self._require_probability("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout")
        self._require(
            "num_attention_heads",
            self.hidden_size % self.num_attention_heads == 0,
            f"which does not divide hidden_size {self.hidden_size}",
        )
        self._require("type_vocab_size", self.type_vocab_size >= 0, "but it cannot be negative")
        self._require(
            "pooler_hidden_size",
            self.pooler_hidden_size == self.hidden_size,
            f"but the pooler reads the hidden state, of hidden_size {self.hidden_size}",
        )
        self._require(
            "pad_token_id",
            self.pad_token_id is None or 0 <= self.pad_token_id < self.vocab_size,
            f"which is no row of a vocabulary of {self.vocab_size}",
        )
        for field in ("hidden_act", "pooler_hidden_act"):
            self._require(field, getattr(self, field) in ACTIVATIONS, f"not one of {sorted(ACTIVATIONS)}")
        self._require(
            "pos_att_type",
            set(self.position_terms) <= set(POSITION_TERMS),
            f"whose terms must be of {list(POSITION_TERMS)}",
        )
        self._require(
            "enhanced_mask_decoder",
            not (self.enhanced_mask_decoder and self.position_biased_input),
            "but the decoder adds the positions that position_biased_input has added already",
        )

    @property
    def position_terms(self) -> list[str]:
        """`pos_att_type` as a list."""
        return list(self.pos_att_type or [])

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def relative_span(self) -> int:
        """The paper's k: how far relative positions are told apart."""
        return (
            self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings
        )


@dataclass(kw_only=True)
class DebertaConfig(DisentangledConfig):
    """Configuration of DeBERTa; the defaults are those of deberta-base's shape.

    Args:
        talking_head: whether scores and weights are mixed over the heads.
    """

    model_type: ClassVar[str] = "deberta"

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    talking_head: bool = False

    def refused_attention(self) -> dict[str, str]:
        refused = super().refused_attention()
        if self.talking_head:
            refused = refused | REFUSED_BY_TALKING_HEADS
        return refused
