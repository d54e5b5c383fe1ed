"""Configuration of ESM-2, ESM-1b and ESM-1v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..config import PretrainedConfig

REFUSED = dict.fromkeys(
    ("blockwise", "triton"),
    "which is for relative positions, and ESM has none; torch fuses its attention under 'sdpa'",
)
"""Values of `attn_implementation` that ESM cannot have, and why."""


@dataclass(kw_only=True)
class EsmConfig(PretrainedConfig):
    """Configuration of ESM; the defaults are upstream's, the published models set most fields.

    Args:
        vocab_size: must be set before a model is built.
        mask_token_id: needed by `token_dropout`.
        pad_token_id: needed by absolute positions; also tells padding where no mask is given.
        position_embedding_type: "rotary" (ESM-2) or "absolute" (ESM-1b, ESM-1v).
        emb_layer_norm_before: whether the embeddings are normalised.
        token_dropout: whether the embedding of a mask token is zero and the others are scaled up for it.
        is_decoder, add_cross_attention, is_folding_model: refused unless False.
    """

    model_type: ClassVar[str] = "esm"

    vocab_size: int | None = None
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 1026
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-12
    position_embedding_type: Literal["absolute", "rotary"] = "absolute"
    emb_layer_norm_before: bool | None = None
    token_dropout: bool = False
    use_cache: bool = True
    is_decoder: bool = False
    add_cross_attention: bool = False
    is_folding_model: bool = False
    esmfold_config: dict[str, Any] | None = None
    vocab_list: list[str] | None = None

    def validate(self) -> None:
        super().validate()
        for field, instead in (
            ("is_decoder", "ESM here is an encoder"),
            ("add_cross_attention", "ESM here is an encoder"),
            ("is_folding_model", "ESMFold is not part of this project"),
        ):
            self._require(field, not getattr(self, field), f"which is not supported: {instead}")
        self._require_positive(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        )
        self._require_probability("hidden_dropout_prob", "attention_probs_dropout_prob")
        self._require(
            "num_attention_heads",
            self.hidden_size % self.num_attention_heads == 0,
            f"which does not divide hidden_size {self.hidden_size}",
        )
        rotary = self.position_embedding_type == "rotary"
        self._require(
            "num_attention_heads",
            not rotary or self.head_dim % 2 == 0,
            f"which gives heads of width {self.head_dim}; rotary positions need an even one",
        )

    def refused_attention(self) -> dict[str, str]:
        return super().refused_attention() | REFUSED

    def require_complete(self) -> None:
        """Refuse to build a model from what upstream leaves unset by default."""
        self._require("vocab_size", self.vocab_size is not None, "but a model needs it; ESM-2 has 33")
        absolute = self.position_embedding_type == "absolute"
        self._require(
            "pad_token_id",
            self.pad_token_id is not None or not absolute,
            "but absolute positions are counted from it; ESM has 1",
        )
        self._require(
            "mask_token_id",
            self.mask_token_id is not None or not self.token_dropout,
            "but token_dropout looks for it; ESM has 32",
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads
