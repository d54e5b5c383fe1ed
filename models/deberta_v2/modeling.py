"""DeBERTa-V2 and V3 (https://arxiv.org/abs/2006.03654, https://arxiv.org/abs/2111.09543), out-of-place.

What differs from DeBERTa: separate projections, log-spaced position buckets, position tables that may
share the content's projections, torch's LayerNorm, and a convolution beside the first layer. The
rest is in `deberta.blocks` and `deberta.heads`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...weights.renames import DEBERTA_V2
from ..attention import disentangled
from ..attention.dropout import drop
from ..base import PretrainedModel
from ..deberta import heads
from ..deberta.blocks import (
    AttentionContext,
    Backbone,
    Embeddings,
    Encoder,
    Layer,
    SelfAttention,
    Tables,
    attend,
)
from ..layers import ACTIVATIONS, LayerStack
from ..packing import Sequences
from .config import DebertaV2Config


class DisentangledSelfAttention(SelfAttention):
    """Disentangled self-attention (paper, section 3.1) with a projection each for query, key and value.

    In float32 and float64 the terms are scaled where upstream scales them, so the results are equal
    to it; in half precision the factors are scaled before the products, which then cannot overflow
    where the score itself is in range.
    """

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = config.head_dim
        self.query_proj = nn.Linear(width, width)
        self.key_proj = nn.Linear(width, width)
        self.value_proj = nn.Linear(width, width)
        self.c2p, self.p2c = (term in config.position_terms for term in ("c2p", "p2c"))
        self.scale = math.sqrt(self.head_dim * (1 + self.c2p + self.p2c))
        self.share_att_key = config.share_att_key
        if config.relative_attention:
            self.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
            if self.c2p and not config.share_att_key:
                self.pos_key_proj = nn.Linear(width, width)
            if self.p2c and not config.share_att_key:
                self.pos_query_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self,
        hidden_states: Tensor,
        rel_embeddings: Tensor | None,
        query_states: Tensor | None,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E]; see `deberta.blocks.Layer`."""
        query = self.heads(self.query_proj(hidden_states if query_states is None else query_states))
        key = self.heads(self.key_proj(hidden_states))
        value = self.heads(self.value_proj(hidden_states))
        pos_key, pos_query = self.positions(rel_embeddings, context)
        scale = self.scale
        if query.dtype in (torch.float16, torch.bfloat16):
            query, scale = query / scale, 1.0
            pos_query = None if pos_query is None else pos_query / self.scale
        dropout = self.dropout.p if self.training else 0.0
        return attend(query, key, value, pos_key, pos_query, context, scale, dropout)

    def project_positions(self, table: Tensor) -> Tables:
        table = table.unsqueeze(0)
        pos_key = pos_query = None
        if self.c2p:
            project = self.key_proj if self.share_att_key else self.pos_key_proj
            pos_key = self.heads(project(table))[0]
        if self.p2c:
            project = self.query_proj if self.share_att_key else self.pos_query_proj
            pos_query = self.heads(project(table))[0]
        return pos_key, pos_query

    def heads(self, x: Tensor) -> Tensor:
        """[B, L, E] to [B, H, L, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[no-any-return]


class ConvLayer(nn.Module):
    """Convolution over the tokens of the embeddings, added to the first layer's output."""

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__()
        kernel = config.conv_kernel_size
        self.conv = nn.Conv1d(
            config.hidden_size,
            config.hidden_size,
            kernel,
            padding=(kernel - 1) // 2,
            groups=config.conv_groups,
        )
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation = ACTIVATIONS[config.conv_act]

    def forward(
        self, inputs: Tensor, outputs: Tensor, mask: Tensor | None, sequences: Sequences | None = None
    ) -> Tensor:
        """`inputs` and `outputs` of the first layer, [B, L, E]; `mask` [B, L] is False on padding.

        Those of `sequences` end to end, [1, total, E], do not see each other.
        """
        if sequences is None:
            convolved = self.convolve(inputs)
        else:
            convolved = sequences.apart(inputs, self.conv.kernel_size[0] // 2, self.convolve)
        if mask is not None:
            convolved = convolved.masked_fill(~mask.unsqueeze(-1), 0)
        states: Tensor = self.LayerNorm(outputs + self.activation(drop(self.dropout, convolved)))
        return states if mask is None else states * mask.unsqueeze(-1).to(states.dtype)

    def convolve(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2).contiguous()  # type: ignore[no-any-return]


class DebertaV2Layer(Layer):
    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__(DisentangledSelfAttention(config), config, nn.LayerNorm)


class DebertaV2Encoder(Encoder):
    """Layers over a table with one row a bucket, or a distance."""

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__()
        self.layer = LayerStack(DebertaV2Layer(config) for _ in range(config.num_hidden_layers))
        self.span, self.max_distance = config.slot_span, config.relative_span
        self.position_buckets = config.position_buckets
        self.clamp_relative_positions = config.clamp_relative_positions
        self.rel_embeddings = (
            nn.Embedding(2 * self.span, config.hidden_size) if config.relative_attention else None
        )
        self.LayerNorm = (
            nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
            if config.normalizes_relative_positions
            else None
        )
        self.keep_positions = self.keeps_by_default(config.hidden_size, len(config.position_terms))
        self.conv = ConvLayer(config) if config.conv_kernel_size > 0 else None

    def slots_of(self, distance: Tensor) -> Tensor:
        if self.position_buckets > 0:
            distance = disentangled.log_bucket(
                distance, self.position_buckets, self.max_distance, self.clamp_relative_positions
            )
        return disentangled.slots(distance, self.span)

    def after_first_layer(
        self, inputs: Tensor, outputs: Tensor, mask: Tensor | None, sequences: Sequences | None
    ) -> Tensor:
        return outputs if self.conv is None else self.conv(inputs, outputs, mask, sequences)


class DebertaV2PreTrainedModel(PretrainedModel):
    """Base of the DeBERTa-V2 and V3 models."""

    config_class = DebertaV2Config
    base_model_prefix = "deberta"
    renames = DEBERTA_V2


class DebertaV2Model(Backbone, DebertaV2PreTrainedModel):
    """DeBERTa-V2 or V3 without a head: [B, L] ids to [B, L, E] hidden states."""

    config: DebertaV2Config

    def __init__(self, config: DebertaV2Config, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.embeddings = Embeddings(self.config, nn.LayerNorm)
        self.encoder = DebertaV2Encoder(self.config)
        self.post_init()


class DebertaV2ForMaskedLM(heads.ForMaskedLM, DebertaV2PreTrainedModel):
    """DeBERTa-V2 or V3 that fills masks."""

    backbone = DebertaV2Model


class DebertaV2ForSequenceClassification(heads.ForSequenceClassification, DebertaV2PreTrainedModel):
    """DeBERTa-V2 or V3 that classifies, or scores, a text or a pair of texts."""

    backbone = DebertaV2Model


class DebertaV2ForTokenClassification(heads.ForTokenClassification, DebertaV2PreTrainedModel):
    """DeBERTa-V2 or V3 that classifies each token."""

    backbone = DebertaV2Model


class DebertaV2ForQuestionAnswering(heads.ForQuestionAnswering, DebertaV2PreTrainedModel):
    """DeBERTa-V2 or V3 that marks the span of an answer."""

    backbone = DebertaV2Model


class DebertaV2ForMultipleChoice(heads.ForMultipleChoice, DebertaV2PreTrainedModel):
    """DeBERTa-V2 or V3 that picks one of several texts."""

    backbone = DebertaV2Model
