"""What both generations of DeBERTa are built of; each brings its own LayerNorm, attention and encoder.

Module names are the checkpoints' keys. B batch, L tokens, H heads, D head width, E hidden width,
R rows of the relative position table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import disentangled, masks, runs_plainly
from ..attention.blockwise import blockwise_attention
from ..attention.dropout import drop, kept_by_seed
from ..attention.fused import missing, triton_attention
from ..attention.plan import AttentionPlan, Path, choose
from ..attention.slots import SlotTable
from ..base import PretrainedModel, counted
from ..config import Pack
from ..feed_forward import in_parts
from ..layers import (
    ACTIVATIONS,
    Checkpointing,
    check_length,
    of_attention,
    of_layers,
    run,
    with_weights,
)
from ..outputs import BaseModelOutput
from ..packing import Layout, Needs, Sequences, split_runs
from .config import DisentangledConfig

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
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
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
        return drop(self.dropout, embeddings)

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


Tables = tuple[Tensor | None, Tensor | None]
"""Projected position tables as keys (c2p) and as queries (p2c): [H, R, D], None where a term is off."""


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
        runs: of packed rows, how many sequences of which length stand side by side; None of a batch.
        parts: the contexts of the runs, whose tables' rows count from those in use.
        cu_seqlens: of packed rows that one kernel takes, where sequences begin, and the end, [B + 1].
    """

    path: Path
    mask: Tensor | None
    slots: SlotTable | None
    output_attentions: bool = False
    checkpointing: Checkpointing | None = None
    keep_positions: bool = False
    runs: list[tuple[int, int]] | None = None
    parts: tuple[AttentionContext, ...] = ()
    cu_seqlens: Tensor | None = None

    def __post_init__(self) -> None:
        self.pair_mask = self.pair_slots = None
        if self.runs is not None:
            return
        if self.path == "blockwise":
            # A mask that hides nothing, as tokenizers give of one text, would cost each block a pass.
            self.mask = None if self.mask is None or self.mask.all() else self.mask
        elif self.path != "triton":
            self.pair_mask = masks.pair_mask(self.mask)  # [B, 1, L, L]
            self.pair_slots = None if self.slots is None else self.slots.pairs()  # [L, L]

    def rows(self, *tables: Tensor | None) -> Tables:
        """The rows that the slots are counted in, of projected position tables."""
        if self.slots is None:
            return None, None
        rows = slice(self.slots.first, self.slots.first + self.slots.rows)
        pos_key, pos_query = (None if table is None else table[:, rows] for table in tables)
        return pos_key, pos_query


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
    if context.runs is not None:
        content = [split_runs(x, context.runs) for x in (query, key, value)]
        of_runs: list[Tensor] = []
        for part, q, k, v in zip(context.parts, *content, strict=True):
            to_key, to_query = part.rows(pos_key, pos_query)
            attended, _ = attend(q, k, v, to_key, to_query, part, scale, dropout, mix_scores, mix_weights)
            of_runs = [*of_runs, attended.flatten(0, 1)]
        return torch.cat(of_runs).unsqueeze(0), None
    tensors = query, key, value, pos_key, pos_query
    if context.path in ("blockwise", "triton"):
        slots = context.slots or SlotTable.of_one(query.shape[2], query.device)
        arguments = *tensors, slots, context.mask, scale, dropout
        if context.path == "blockwise":
            return blockwise_attention(*arguments).flatten(2), None
        return triton_attention(*arguments, context.cu_seqlens).flatten(2), None
    pairs = context.pair_slots, context.pair_mask
    if context.path == "sdpa":
        return disentangled.sdpa_attention(*tensors, *pairs, scale, dropout).transpose(1, 2).flatten(2), None
    attended, weights = disentangled.eager_attention(
        *tensors, *pairs, scale, dropout, mix_scores, mix_weights
    )
    return attended.transpose(1, 2).flatten(2), weights if context.output_attentions else None


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
    pos_dropout: nn.Module

    def project_positions(self, table: Tensor) -> Tables:
        """A relative position table [R, E] projected."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"kept": None}

    def positions(self, rel_embeddings: Tensor | None, context: AttentionContext) -> Tables:
        """The projected rows in use, computed or kept."""
        if rel_embeddings is None or context.slots is None:
            return None, None
        if not context.keep_positions:
            self.kept = None
            return self._dropped(rel_embeddings)
        probe = self._dropped(rel_embeddings[:1])
        if self.kept is None or not self.kept.hold(rel_embeddings, probe):
            self.kept = KeptPositions(rel_embeddings, probe, self._dropped(rel_embeddings))
        return context.rows(*self.kept.tables)

    def _dropped(self, rel_embeddings: Tensor) -> Tables:
        """The relative position table [R, E], after dropout, projected."""
        table = drop(self.pos_dropout, rel_embeddings)
        if not runs_plainly(table.device):
            return self.project_positions(table)
        with kept_by_seed(table, rel_embeddings):
            return self.project_positions(table)


class SelfOutput(nn.Module):
    """Projection after attention, with the residual."""

    def __init__(self, config: DisentangledConfig, norm: Norm) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = norm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        attended = drop(self.dropout, self.dense(hidden_states))
        return self.LayerNorm(attended + input_tensor)  # type: ignore[no-any-return]


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
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.add(self.dense(hidden_states), input_tensor)

    def add(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        """What comes after the projection."""
        return self.LayerNorm(drop(self.dropout, hidden_states) + residual)  # type: ignore[no-any-return]


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
        attended, weights = self.attention(hidden_states, rel_embeddings, query_states, context=context)
        return self.feed_forward(attended), weights

    def feed_forward(self, attended: Tensor) -> Tensor:
        """The feed-forward network, [B, L, E]."""
        return in_parts(self.intermediate, self.output, attended, attended)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)


Plans = AttentionPlan | list[AttentionPlan]
"""Which attention is taken: by a batch or a whole row, or by each run of a row's sequences."""


class Encoder(nn.Module):
    """The layers over one relative position table. A generation says how distances become slots."""

    layer: nn.ModuleList
    rel_embeddings: nn.Embedding | None
    LayerNorm: nn.Module | None
    """Normalises the relative position table. Upstream lacks both attributes where they are unused."""
    span: int
    """Half the rows of the relative position table."""
    keep_positions: bool
    """Whether projected position tables are kept between passes of inference."""
    kept_table: Tensor | None = None
    """The relative position table that they are of."""

    def keeps_by_default(self, width: int, terms: int) -> bool:
        """Return True if caching every layer's projected position tables in float32 fits in `KEPT_BYTES`."""
        return 2 * self.span * len(self.layer) * terms * width * 4 <= KEPT_BYTES

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"kept_table": None}

    def slots(self, length: int, device: torch.device) -> SlotTable | None:
        """Row of the relative position table for each distance; None without relative attention."""
        table = getattr(self, "rel_embeddings", None)
        if table is None:
            return None
        slots = self.slots_of(torch.arange(1 - length, length, device=device))
        return SlotTable.of(slots, 2 * self.span, narrow=runs_plainly(device))

    def slots_of(self, distance: Tensor) -> Tensor:
        """Row of the relative position table for each distance, ascending with it, of the same shape."""
        raise NotImplementedError

    def relative_embeddings(self, slots: SlotTable | None) -> Tensor | None:
        """Return the rows of the relative position table in use, normalised where the model does so, [R, E].

        Looked up by calling the embedding, for tools that bring parameters when a module is called.
        """
        if slots is None or self.rel_embeddings is None:
            return None
        rows = torch.arange(slots.first, slots.first + slots.rows, device=slots.by_distance.device)
        table: Tensor = self.rel_embeddings(rows)
        norm = getattr(self, "LayerNorm", None)
        return table if norm is None else norm(table)

    def after_first_layer(
        self, inputs: Tensor, outputs: Tensor, mask: Tensor | None, sequences: Sequences | None
    ) -> Tensor:
        """What else becomes of the first layer's output, [B, L, E]."""
        return outputs

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        plans: Plans,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        sequences: Sequences | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """
        Args:
            hidden_states: [B, L, E].
            mask: boolean [B, L] or [B, L, L], or None.
            plans: which attention is taken, by the batch or by each run of the sequences.
            sequences: those of a row, [1, total, E].

        Returns:
            The output of the last layer, or, where all are asked for, the input and the output of each
            layer, [B, L, E] each; and the attention weights of each layer, [B, H, L, L], where asked for.
        """
        rel_embeddings, context = self.shared(hidden_states, mask, plans, output_attentions, sequences)
        states: tuple[Tensor, ...] = (hidden_states,)
        attentions: tuple[Tensor, ...] = ()
        for index, layer in enumerate(self.layer):
            hidden_states, weights = with_weights(
                run(of_layers(self.layer), layer, hidden_states, rel_embeddings, context=context)
            )
            if index == 0:
                hidden_states = self.after_first_layer(
                    states[0], hidden_states, masks.token_mask(mask), sequences
                )
            states = (*states, hidden_states) if output_hidden_states else (hidden_states,)
            if weights is not None:
                attentions = (*attentions, weights)
        return states, attentions

    def shared(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        plans: Plans,
        output_attentions: bool,
        sequences: Sequences | None = None,
    ) -> tuple[Tensor | None, AttentionContext]:
        """The work that is the same for every layer, done once."""
        length, device = hidden_states.shape[1], hidden_states.device
        # Whether attention is over all pairs of a row, of which a mask takes those of one sequence.
        whole = isinstance(plans, AttentionPlan) and plans.path != "triton"
        slots = self.slots(length if whole or sequences is None else sequences.longest, device)
        keep = slots is not None and not (self.training or torch.is_grad_enabled())
        keep = keep and runs_plainly(device) and self.keep_positions
        checkpointing = of_attention(self.layer)
        if isinstance(plans, AttentionPlan):
            seen = sequences.pairs(mask) if whole and sequences is not None else mask
            bounds = None if whole or sequences is None else sequences.cu_seqlens
            context = AttentionContext(
                plans.path, seen, slots, output_attentions, checkpointing, keep, cu_seqlens=bounds
            )
        else:
            assert sequences is not None
            runs = sequences.runs()
            of_runs = [None] * len(runs) if mask is None else split_runs(mask, runs)
            parts = tuple(
                AttentionContext(plan.path, part, None if slots is None else slots.shorter(length))
                for (_, length), plan, part in zip(runs, plans, of_runs, strict=True)
            )
            context = AttentionContext("eager", None, slots, False, checkpointing, keep, runs, parts)
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
        self,
        hidden_states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        plans: Plans,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """Enhanced mask decoder (paper, section 3.2), as the original implements it.

        The last layer runs twice more over the states below it; its queries start as those states
        plus absolute positions, which the encoder itself has not seen.

        Args:
            hidden_states: states before the last layer, [B, L, E].
            positions: absolute position embeddings, [1 or B, L, E].
        """
        rel_embeddings, context = self.shared(hidden_states, mask, plans, False, sequences)
        query_states = hidden_states + positions
        for _ in range(2):
            query_states, _ = with_weights(
                run(
                    of_layers(self.layer),
                    self.layer[-1],
                    hidden_states,
                    rel_embeddings,
                    query_states,
                    context=context,
                )
            )
        return query_states


class DisentangledModel(PretrainedModel):
    """Base of all DeBERTa models, with or without a head."""

    config: DisentangledConfig

    def packs_on(self, device: torch.device) -> bool:
        settings = self.settings
        asked = settings.attn_implementation in ("auto", "triton") and (
            "triton" not in settings.refused_attention()
        )
        return device.type == "cuda" and asked and missing(settings.head_dim, self.dtype, device) is None

    def default_positions(
        self,
        input_ids: Tensor | None,
        length: int,
        device: torch.device,
        sequences: Sequences | None = None,
    ) -> Tensor:
        if self.reads_positions():
            check_length(length, self.settings.max_position_embeddings, "the absolute position table")
        return counted(length, device, sequences)

    def reads_positions(self) -> bool:
        """Whether a forward pass looks positions up in the absolute position table."""
        return bool(self.settings.position_biased_input)

    def keep_positions(self, keep: bool = True) -> None:
        """Whether inference keeps each layer's projected position tables from one pass to the next.

        They depend on the weights alone, and change with them however they are written to. It saves their
        projection and costs `kept_position_bytes`; unless told, they are kept where that is 64 MiB or less.
        """
        modules: Iterator[Any] = self.modules()
        for module in modules:
            if hasattr(module, "kept_table"):
                module.keep_positions = keep
            if not keep and hasattr(module, "kept"):
                module.kept = None

    @property
    def kept_position_bytes(self) -> int:
        """What the projected position tables that are kept now take."""
        kept = (getattr(module, "kept", None) for module in self.modules())
        return sum(tables.bytes for tables in kept if isinstance(tables, KeptPositions))


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
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
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
            cu_seqlens: of sequences that lie end to end in one row, as all inputs then do, [1, total], and
                all outputs, [1, total, E]: where each begins, and `total`; integers, [B + 1].
            pack: whether a padded batch is computed without its padding, the config's unless given; see
                `layout`. Padding is then zero in what is returned.
            use_cache: ignored.

        Raises:
            ValueError: inputs of wrong shape, both or none of them, more tokens than absolute positions,
                malformed `cu_seqlens`, or `pack` where it cannot be.
        """
        output_attentions = self.option("output_attentions", output_attentions)
        output_hidden_states = self.option("output_hidden_states", output_hidden_states)
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        states, attentions = self.run(*inputs, output_attentions, output_hidden_states, cu_seqlens, pack)
        output = BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=states if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
        )
        return self.returned(output, return_dict)

    def run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool,
        output_hidden_states: bool,
        cu_seqlens: Tensor | None,
        pack: Pack | None,
        needs: Needs | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the states and attention weights of `Encoder.forward`, laid out as the caller's input."""
        layout = self.layout(
            input_ids, attention_mask, position_ids, inputs_embeds, cu_seqlens, pack, output_attentions, needs
        )
        embeddings = self.embeddings(
            layout.row(input_ids),
            layout.row(token_type_ids),
            layout.position_ids,
            masks.token_mask(layout.mask),
            layout.row(inputs_embeds),
        )
        states, attentions = self.run_encoder(
            embeddings,
            layout.mask,
            self.plans(layout, embeddings, output_attentions),
            output_attentions,
            output_hidden_states,
            layout.sequences,
        )
        return tuple(map(layout.padded, states)), attentions

    def run_encoder(
        self,
        embeddings: Tensor,
        mask: Tensor | None,
        plans: Plans,
        output_attentions: bool,
        output_hidden_states: bool,
        sequences: Sequences | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the encoder; arguments and results are those of `Encoder.forward`."""
        return self.encoder(  # type: ignore[no-any-return]
            embeddings, mask, plans, output_attentions, output_hidden_states, sequences
        )

    def plans(self, layout: Layout, states: Tensor, output_attentions: bool) -> Plans:
        """Which attention is taken over states [B, L, E] that lie so."""
        batch, length, _ = states.shape
        device, sequences, dtype = states.device, layout.sequences, states.dtype
        if sequences is None or sequences.lengths is None or output_attentions or not runs_plainly(device):
            pairs = layout.mask is not None and layout.mask.ndim == 3
            return choose(self.settings, batch, length, device, output_attentions, dtype, pairs)
        plans = [choose(self.settings, *run, device, False, dtype) for run in sequences.runs()]
        # The kernels take sequences of any lengths at once.
        return plans[0] if plans and plans[0].path == "triton" else plans

    def enhanced_mask_decoder(self, hidden_states: Tensor, layout: Layout) -> Tensor:
        """The decoder's states [B, L, E], from those before the last layer; see `Encoder`."""
        device, plans = hidden_states.device, self.plans(layout, hidden_states, output_attentions=False)
        positions = self.embeddings.positions(hidden_states.shape[1], layout.position_ids, device)
        return self.encoder.enhanced_mask_decoder(
            hidden_states, positions, layout.mask, plans, layout.sequences
        )
