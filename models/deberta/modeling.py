"""DeBERTa (He et al. 2020, https://arxiv.org/abs/2006.03654), out-of-place.

The classes stand in the order a tensor meets them; what DeBERTa-V2 shares is in `blocks` and `heads`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...weights.renames import DEBERTA
from ..attention import disentangled
from ..base import PretrainedModel
from ..layers import LayerStack, at_least_float32
from . import heads
from .blocks import AttentionContext, Backbone, Embeddings, Encoder, Layer, SelfAttention, Tables, attend
from .config import DebertaConfig


class DebertaLayerNorm(nn.Module):
    """LayerNorm whose scale and shift are applied in the input's dtype, after the rest in at least float32.

    Upstream's order of operations; `F.layer_norm` differs from it by rounding.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(at_least_float32(hidden_states.dtype))
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        normalized = centred / torch.sqrt(variance + self.eps)
        return self.weight * normalized.to(hidden_states.dtype) + self.bias


class DisentangledSelfAttention(SelfAttention):
    """Disentangled self-attention (paper, section 3.1) over one projection of query, key and value.

    `in_proj` holds, for each head in turn, its query, key and value rows.
    """

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        # Upstream counts every term listed, with or without relative attention, "p2p" and "none" too.
        self.scale = math.sqrt(self.head_dim * (1 + len(config.position_terms)))
        self.c2p, self.p2c = (term in config.position_terms for term in ("c2p", "p2c"))
        if config.relative_attention:
            self.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
            if self.c2p:
                self.pos_proj = nn.Linear(width, width, bias=False)
            if self.p2c:
                self.pos_q_proj = nn.Linear(width, width)
        self.head_logits_proj = self.head_weights_proj = None
        if config.talking_head:
            self.head_logits_proj = nn.Linear(self.num_heads, self.num_heads, bias=False)
            self.head_weights_proj = nn.Linear(self.num_heads, self.num_heads, bias=False)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self,
        hidden_states: Tensor,
        rel_embeddings: Tensor | None,
        query_states: Tensor | None,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E]; see `blocks.Layer`."""
        query, key, value = self.project(hidden_states)
        if query_states is not None:
            query, _, _ = self.project(query_states)
        query = query + self.heads(self.q_bias[None, None])
        value = value + self.heads(self.v_bias[None, None])

        pos_key, pos_query = self.positions(rel_embeddings, context)
        return attend(
            query / self.scale,
            key,
            value,
            pos_key,
            pos_query,
            context,
            scale=1,
            dropout=self.dropout.p if self.training else 0.0,
            mix_scores=self.head_logits_proj,
            mix_weights=self.head_weights_proj,
        )

    def project_positions(self, table: Tensor) -> Tables:
        table = table.unsqueeze(0)
        pos_key = pos_query = None
        if self.c2p:
            pos_key = self.heads(self.pos_proj(table))[0]
        if self.p2c:
            pos_query = self.heads(self.pos_q_proj(table))[0] / self.scale
        return pos_key, pos_query

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value without their biases, [B, H, L, D] each."""
        query, key, value = self.heads(self.in_proj(hidden_states)).chunk(3, dim=-1)
        return query, key, value

    def heads(self, x: Tensor) -> Tensor:
        """[B, L, H * n] to [B, H, L, n]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]


class DebertaLayer(Layer):
    def __init__(self, config: DebertaConfig) -> None:
        super().__init__(DisentangledSelfAttention(config), config, DebertaLayerNorm)


class DebertaEncoder(Encoder):
    """Layers over a table with one row a distance, of which short sequences use the middle."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.layer = LayerStack(DebertaLayer(config) for _ in range(config.num_hidden_layers))
        self.span = config.relative_span
        self.rel_embeddings = (
            nn.Embedding(2 * self.span, config.hidden_size) if config.relative_attention else None
        )
        self.keep_positions = self.keeps_by_default(config.hidden_size, len(config.position_terms))

    def slots_of(self, distance: Tensor) -> Tensor:
        return disentangled.slots(distance, self.span)


class DebertaPreTrainedModel(PretrainedModel):
    """Base of the DeBERTa models."""

    config_class = DebertaConfig
    base_model_prefix = "deberta"
    renames = DEBERTA


class DebertaModel(Backbone, DebertaPreTrainedModel):
    """DeBERTa without a head: [B, L] ids to [B, L, E] hidden states."""

    config: DebertaConfig

    def __init__(self, config: DebertaConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.embeddings = Embeddings(self.config, DebertaLayerNorm)
        self.encoder = DebertaEncoder(self.config)
        self.post_init()


class DebertaForMaskedLM(heads.ForMaskedLM, DebertaPreTrainedModel):
    """DeBERTa that fills masks."""

    backbone = DebertaModel


class DebertaForSequenceClassification(heads.ForSequenceClassification, DebertaPreTrainedModel):
    """DeBERTa that classifies, or scores, a text or a pair of texts."""

    backbone = DebertaModel


class DebertaForTokenClassification(heads.ForTokenClassification, DebertaPreTrainedModel):
    """DeBERTa that classifies each token."""

    backbone = DebertaModel


class DebertaForQuestionAnswering(heads.ForQuestionAnswering, DebertaPreTrainedModel):
    """DeBERTa that marks the span of an answer."""

    backbone = DebertaModel
