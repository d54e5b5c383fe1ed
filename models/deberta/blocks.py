"""What both generations of DeBERTa are built of; each brings its own LayerNorm, attention and encoder.

Module names are the checkpoints' keys. B batch, L tokens, H heads, D head width, E hidden width,
R rows of the relative position table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import disentangled, masks, runs_plainly
from ..attention.blockwise import blockwise_attention
from ..attention.dropout import Dropout
from ..attention.plan import AttentionPlan, Path, choose
from ..attention.slots import SlotTable
from ..base import PretrainedModel, resolve_input
from ..feed_forward import feed_forward
from ..layers import ACTIVATIONS, Checkpointing, LayerStack, check_length, run
from ..outputs import BaseModelOutput
from .config import DisentangledConfig

ROWS = 256
"""Tokens that go through the feed-forward network together in inference."""
KEPT_BYTES = 64 << 20
"""Projected position tables are kept between passes of inference, unless told, where they take no more."""
Norm = Callable[[int, float], nn.Module]
"""Builds a LayerNorm from a width and an epsilon."""


class Embeddings(nn.Module):
    """Words, token types and, with `position_biased_input`, positions; normalised, padding zeroed."""

    def __init__(self, config: DisentangledConfig, norm: Norm) -> None:
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.position_biased_input = config.position_biased_input
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, width)
            if config.position_biased_input or config.enhanced_mask_decoder
            else None
        )
        self.token_type_embeddings = (
            nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size > 0 else None
        )
        self.embed_proj = (
            nn.Linear(width, config.hidden_size, bias=False) if width != config.hidden_size else None
        )
        self.LayerNorm = norm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """[B, L] ids or [B, L, embedding_size] vectors to [B, L, E]. `mask` [B, L] is False on padding."""
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length, _ = embeddings.shape
        if self.position_biased_input:
            embeddings = embeddings + self.positions(length, position_ids, embeddings.device)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(batch, length, dtype=torch.long, device=embeddings.device)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        if self.embed_proj is not None:
            embeddings = self.embed_proj(embeddings)
        embeddings = self.LayerNorm(embeddings)
        if mask is not None:
            embeddings = embeddings * mask.unsqueeze(-1).to(embeddings.dtype)
        return self.dropout(embeddings)  # type: ignore[no-any-return]

    def positions(self, length: int, position_ids: Tensor | None, device: torch.device) -> Tensor:
        """Rows of the absolute position table, [1 or B, L, embedding_size].

        Raises:
            ValueError: the table has fewer rows than the sequence has tokens.
        """
        assert self.position_embeddings is not None
        if position_ids is None:
            check_length(length, self.position_embeddings.num_embeddings, "the absolute position table")
            position_ids = torch.arange(length, device=device).unsqueeze(0)
        return self.position_embeddings(position_ids.long())  # type: ignore[no-any-return]


@dataclass
class AttentionContext:
    """What every layer of one forward pass reads: nothing here needs a gradient.

    Args:
        path: which attention is taken.
        mask: boolean [B, L] or [B, L, L], or None where all attends to all.
        slots: row of the relative position table for each distance.
        output_attentions: whether attention weights are returned.
        checkpointing: how attention is recomputed by itself, if it is.
        keep_positions: whether each layer keeps its projected position tables for the next pass; the
            relative position table then comes whole, not only the rows in use.
    """

    path: Path
    mask: Tensor | None
    slots: SlotTable | None
    output_attentions: bool = False
    checkpointing: Checkpointing | None = None
    keep_positions: bool = False

    def __post_init__(self) -> None:
        self.pair_mask = self.pair_slots = None
        if self.path == "blockwise":
            # A mask that hides nothing, as tokenizers give of one text, would cost each block a pass.
            self.mask = None if self.mask is None or self.mask.all() else self.mask
        else:
            self.pair_mask = masks.pair_mask(self.mask)  # [B, 1, L, L]
            self.pair_slots = None if self.slots is None else self.slots.pairs()  # [L, L]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    context: AttentionContext,
    scale: float,
    dropout: float,
    mix_scores: nn.Module | None = None,
    mix_weights: nn.Module | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Disentangled attention on the path of the context; arguments as `disentangled.eager_attention`.

    Returns:
        [B, L, E], and the attention weights [B, H, L, L] where the context asks for them.
    """
    tensors = query, key, value, pos_key, pos_query
    if context.path == "blockwise":
        slots = context.slots or SlotTable.of_one(query.shape[2], query.device)
        attended = blockwise_attention(*tensors, slots, context.mask, scale, dropout)
        return attended.flatten(2), None
    pairs = context.pair_slots, context.pair_mask
    if context.path == "sdpa":
        return disentangled.sdpa_attention(*tensors, *pairs, scale, dropout).transpose(1, 2).flatten(2), None
    attended, weights = disentangled.eager_attention(
        *tensors, *pairs, scale, dropout, mix_scores, mix_weights
    )
    return attended.transpose(1, 2).flatten(2), weights if context.output_attentions else None


Tables = tuple[Tensor | None, Tensor | None]
"""Projected position tables as keys (c2p) and as queries (p2c): [H, R, D], None where a term is off."""


@dataclass(frozen=True)
class KeptPositions:
    """The projected position tables of a layer, and what shows that they still hold.

    Args:
        source: the relative position table that was projected.
        probe: the projections of its first row alone.
        tables: the projections.
    """

    source: Tensor
    probe: Tables
    tables: Tables

    def hold(self, source: Tensor, probe: Tables) -> bool:
        """Whether they are of this table, and the projections still do to its first row what they did.

        Versions of the weights do not tell: `weight.data` is written to without one, and an adapter is
        switched off without touching any.
        """
        return source is self.source and all(map(_equal, self.probe, probe))

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tables if x is not None)


class SelfAttention(nn.Module):
    """What the disentangled self-attention of both generations does with the relative position table."""

    kept: KeptPositions | None = None

    def project_positions(self, rel_embeddings: Tensor) -> Tables:
        """The relative position table [R, E] projected."""
        raise NotImplementedError

    def positions(self, rel_embeddings: Tensor | None, context: AttentionContext) -> Tables:
        """The projected rows in use, computed or kept."""
        if rel_embeddings is None or context.slots is None:
            return None, None
        if not context.keep_positions:
            self.kept = None
            return self.project_positions(rel_embeddings)
        probe = self.project_positions(rel_embeddings[:1])
        if self.kept is None or not self.kept.hold(rel_embeddings, probe):
            self.kept = KeptPositions(rel_embeddings, probe, self.project_positions(rel_embeddings))
        first, rows = context.slots.first, context.slots.rows
        pos_key, pos_query = self.kept.tables
        return (
            None if pos_key is None else pos_key[:, first : first + rows],
            None if pos_query is None else pos_query[:, first : first + rows],
        )


class SelfOutput(nn.Module):
    """Projection after attention, with the residual."""

    def __init__(self, config: DisentangledConfig, norm: Norm) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = norm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, context: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(context)) + residual)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention and its output projection."""

    def __init__(self, self_attention: nn.Module, config: DisentangledConfig, norm: Norm) -> None:
        super().__init__()
        self.self = self_attention
        self.output = SelfOutput(config, norm)

    def forward(
        self,
        hidden_states: Tensor,
        rel_embeddings: Tensor | None,
        query_states: Tensor | None,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor | None]:
        attended, weights = run(
            context.checkpointing, self.self, hidden_states, rel_embeddings, query_states, context=context
        )
        return self.output(attended, hidden_states if query_states is None else query_states), weights


class Intermediate(nn.Module):
    """First half of the feed-forward network."""

    def __init__(self, config: DisentangledConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states))


class Output(nn.Module):
    """Second half of the feed-forward network, with the residual."""

    def __init__(self, config: DisentangledConfig, norm: Norm) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = norm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, intermediate: Tensor, residual: Tensor) -> Tensor:
        return self.add(self.dense(intermediate), residual)

    def add(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        """What comes after the projection."""
        return self.LayerNorm(self.dropout(hidden_states) + residual)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One transformer layer: attention, then feed-forward, normalised after each."""

    def __init__(self, self_attention: nn.Module, config: DisentangledConfig, norm: Norm) -> None:
        super().__init__()
        self.attention = Attention(self_attention, config, norm)
        self.intermediate = Intermediate(config)
        self.output = Output(config, norm)

    def forward(
        self,
        hidden_states: Tensor,
        rel_embeddings: Tensor | None = None,
        query_states: Tensor | None = None,
        *,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: what keys and values, and queries unless given, are made of, [B, L, E].
            rel_embeddings: relative position table, [R, E].
            query_states: what queries are made of, [B, L, E].

        Returns:
            [B, L, E], and the attention weights [B, H, L, L] where the context asks for them.
        """
        attended, weights = self.attention(hidden_states, rel_embeddings, query_states, context)
        return self.feed_forward(attended), weights

    def feed_forward(self, attended: Tensor) -> Tensor:
        """The feed-forward network, [B, L, E]; for many tokens a part at a time.

        Not so where a module of it has hooks, which are to see the whole, or is not the plain one.
        """
        batch, length, _ = attended.shape
        inner, outer = self.intermediate, self.output
        if batch * length <= ROWS or not runs_plainly(attended.device) or _has_hooks(inner, outer):
            return outer(inner(attended), attended)  # type: ignore[no-any-return]
        if not torch.is_grad_enabled() and not self.training:
            rows = [outer(inner(part), part) for part in attended.flatten(0, 1).split(ROWS)]
            return torch.cat(rows).view(batch, length, -1)
        if not _are_plain(inner.dense, outer.dense) or torch.is_autocast_enabled(attended.device.type):
            return outer(inner(attended), attended)  # type: ignore[no-any-return]
        parameters = inner.dense.weight, inner.dense.bias, outer.dense.weight, outer.dense.bias
        return outer.add(feed_forward(attended, *parameters, inner.activation), attended)


def _are_plain(*layers: nn.Module) -> bool:
    return all(type(layer) is nn.Linear for layer in layers)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)


def _has_hooks(*parts: nn.Module) -> bool:
    modules = (module for part in parts for module in part.modules())
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


class Encoder(nn.Module):
    """The layers over one relative position table. A generation says how distances become slots."""

    layer: LayerStack

    rel_embeddings: nn.Embedding | None
    span: int
    """Half the rows of the relative position table."""
    keep_positions: bool
    """Whether projected position tables are kept between passes of inference."""
    kept_table: Tensor | None = None
    """The relative position table that they are of."""

    def may_keep_positions(self, config: DisentangledConfig) -> bool:
        """Whether the projected tables of all layers, in float32, are within `KEPT_BYTES`."""
        rows = 2 * self.span * config.num_hidden_layers * len(config.position_terms)
        return rows * config.hidden_size * 4 <= KEPT_BYTES

    def slots(self, length: int, device: torch.device) -> SlotTable | None:
        """Row of the relative position table for each distance; None without relative attention."""
        if self.rel_embeddings is None:
            return None
        slots = self.slots_of(torch.arange(1 - length, length, device=device))
        return SlotTable.of(slots, self.rel_embeddings.num_embeddings, narrow=runs_plainly(device))

    def slots_of(self, distance: Tensor) -> Tensor:
        """Row of the relative position table for each distance, ascending with it, of the same shape."""
        raise NotImplementedError

    def relative_embeddings(self, slots: SlotTable | None) -> Tensor | None:
        """The rows of the relative position table that are in use, [R, E].

        Looked up by calling the embedding, for tools that bring parameters when a module is called.
        """
        if slots is None or self.rel_embeddings is None:
            return None
        rows = torch.arange(slots.first, slots.first + slots.rows, device=slots.by_distance.device)
        return self.rel_embeddings(rows)  # type: ignore[no-any-return]

    def after_first_layer(self, inputs: Tensor, outputs: Tensor, mask: Tensor | None) -> Tensor:
        """What else becomes of the first layer's output, [B, L, E]."""
        return outputs

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        plan: AttentionPlan,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """
        Args:
            hidden_states: [B, L, E].
            mask: boolean [B, L] or [B, L, L], or None.
            plan: which attention is taken.

        Returns:
            The output of the last layer, or, where all are asked for, the input and the output of each
            layer, [B, L, E] each; and the attention weights of each layer, [B, H, L, L], where asked for.
        """
        rel_embeddings, context = self.shared(hidden_states, mask, plan, output_attentions)
        states: tuple[Tensor, ...] = (hidden_states,)
        attentions: tuple[Tensor, ...] = ()
        for index, layer in enumerate(self.layer):
            hidden_states, weights = run(
                self.layer.of_layers, layer, hidden_states, rel_embeddings, context=context
            )
            if index == 0:
                hidden_states = self.after_first_layer(states[0], hidden_states, masks.token_mask(mask))
            states = (*states, hidden_states) if output_hidden_states else (hidden_states,)
            if weights is not None:
                attentions = (*attentions, weights)
        return states, attentions

    def shared(
        self, hidden_states: Tensor, mask: Tensor | None, plan: AttentionPlan, output_attentions: bool
    ) -> tuple[Tensor | None, AttentionContext]:
        """The work that is the same for every layer, done once."""
        slots = self.slots(hidden_states.shape[1], hidden_states.device)
        keep = self.keep_positions and not (self.training or torch.is_grad_enabled())
        keep = keep and slots is not None and runs_plainly(hidden_states.device)
        context = AttentionContext(plan.path, mask, slots, output_attentions, self.layer.of_attention, keep)
        if not keep:
            self.kept_table = None
            return self.relative_embeddings(slots), context
        assert slots is not None
        table = self.relative_embeddings(slots.whole(2 * self.span))
        assert table is not None
        if self.kept_table is None or not _equal(self.kept_table, table):
            self.kept_table = table
        return self.kept_table, context

    def enhanced_mask_decoder(
        self, hidden_states: Tensor, positions: Tensor, mask: Tensor | None, plan: AttentionPlan
    ) -> Tensor:
        """Enhanced mask decoder (paper, section 3.2), as the original implements it.

        The last layer runs twice more over the states below it; its queries start as those states
        plus absolute positions, which the encoder itself has not seen.

        Args:
            hidden_states: states before the last layer, [B, L, E].
            positions: absolute position embeddings, [1 or B, L, E].
        """
        rel_embeddings, context = self.shared(hidden_states, mask, plan, output_attentions=False)
        query_states = hidden_states + positions
        for _ in range(2):
            query_states, _ = run(
                self.layer.of_layers,
                self.layer[-1],
                hidden_states,
                rel_embeddings,
                query_states,
                context=context,
            )
        return query_states


class DisentangledModel(PretrainedModel):
    """Base of all DeBERTa models, with or without a head."""

    def keep_positions(self, keep: bool = True) -> None:
        """Whether inference keeps each layer's projected position tables from one pass to the next.

        They depend on the weights alone, and change with them however they are written to. It saves their
        projection and costs `kept_position_bytes`; unless told, they are kept where that is 64 MiB or less.
        """
        for module in self.modules():
            if isinstance(module, Encoder):
                module.keep_positions = keep
            if not keep and isinstance(module, SelfAttention):
                module.kept = None

    @property
    def kept_position_bytes(self) -> int:
        """What the projected position tables that are kept now take."""
        attentions = (module for module in self.modules() if isinstance(module, SelfAttention))
        return sum(attention.kept.bytes for attention in attentions if attention.kept is not None)


class Backbone(DisentangledModel):
    """Embeddings and encoder: the model without a head, whose parts a generation fills in."""

    config: DisentangledConfig
    embeddings: Embeddings
    encoder: Encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        use_cache: bool | None = None,
    ) -> BaseModelOutput | tuple[Any, ...]:
        """
        Args:
            input_ids: [B, L]. Or else `inputs_embeds`, [B, L, embedding_size].
            attention_mask: [B, L] (1 for a real token) or [B, L, L] (1 where a query attends to a
                key), of any dtype; all real unless given. Padding queries of a [B, L] mask attend
                uniformly, as upstream's.
            token_type_ids: [B, L]; ignored by a model without token types.
            position_ids: [B, L], absolute; counted from 0 unless given.
            output_attentions, output_hidden_states, return_dict: the config's unless given.
            use_cache: ignored.

        Raises:
            ValueError: inputs of wrong shape, both or none of them, or more tokens than absolute positions.
        """
        batch, length, device = resolve_input(input_ids, inputs_embeds)
        mask = masks.as_bool(attention_mask, batch, length)
        output_attentions = self.option("output_attentions", output_attentions)
        output_hidden_states = self.option("output_hidden_states", output_hidden_states)
        plan = choose(self.config, batch, length, device, output_attentions)
        embeddings = self.embeddings(
            input_ids, token_type_ids, position_ids, inputs_embeds, masks.token_mask(mask)
        )
        states, attentions = self.encoder(embeddings, mask, plan, output_attentions, output_hidden_states)
        output = BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=states if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
        )
        return self.returned(output, return_dict)

    def enhanced_mask_decoder(
        self, hidden_states: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """The decoder's states [B, L, E], from those before the last layer; see `Encoder`."""
        batch, length, _ = hidden_states.shape
        positions = self.embeddings.positions(length, position_ids, hidden_states.device)
        plan = choose(self.config, batch, length, hidden_states.device, output_attentions=False)
        return self.encoder.enhanced_mask_decoder(
            hidden_states, positions, masks.as_bool(attention_mask, batch, length), plan
        )
