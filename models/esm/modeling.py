"""ESM-2 (Lin et al. 2022, https://doi.org/10.1126/science.ade2574), ESM-1b and ESM-1v, out-of-place.

The classes stand in the order a tensor meets them. Module names are the checkpoints' keys.
B batch, L tokens, H heads, D head width, E hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...weights.renames import ESM
from ..attention import dense, masks, runs_plainly
from ..attention.dropout import drop
from ..attention.plan import choose
from ..base import PretrainedModel, counted, resolve_input
from ..config import Pack
from ..feed_forward import in_parts
from ..layers import (
    ACTIVATIONS,
    Checkpointing,
    LayerStack,
    at_least_float32,
    check_length,
    of_attention,
    of_layers,
    run,
    with_weights,
)
from ..losses import cross_entropy, esm_sequence_loss
from ..outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from ..packing import Layout, Needs, Sequences, split_runs
from .config import EsmConfig

TRAINED_MASK_RATIO = 0.15 * 0.8
"""Share of mask tokens in the training of every ESM: 15 % are targets, 80 % of those are masked."""


def token_dropout(
    embeddings: Tensor, is_mask: Tensor | None, real: Tensor | None, sequences: Sequences | None = None
) -> Tensor:
    """Zero the embeddings of mask tokens and scale the others to make up for it.

    The factor is (1 - 0.12) / (1 - share of mask tokens), in eval too. A sequence of nothing but
    masks, where upstream divides 0 by 0, stays zero.

    Args:
        embeddings: [B, L, E].
        is_mask: [B, L], or None where no token is one.
        real: [B, L], False on padding, or None.
        sequences: those of a row, [1, total, E].
    """
    scaled = embeddings * (1 - TRAINED_MASK_RATIO)
    if is_mask is None:
        return scaled
    exact = at_least_float32(embeddings.dtype)
    if sequences is not None:
        real = torch.ones_like(is_mask) if real is None else real
        kept = 1 - sequences.sums(is_mask.to(exact)) / sequences.sums(real.to(exact)).clamp(min=1)
        kept = torch.where(kept > 0, kept, 1)[sequences.indices()][None, :, None]
    else:
        lengths = is_mask.shape[1] if real is None else real.sum(-1).clamp(min=1)
        kept = 1 - is_mask.sum(-1).to(exact) / lengths
        kept = torch.where(kept > 0, kept, 1)[:, None, None]
    return (scaled.masked_fill(is_mask.unsqueeze(-1), 0) / kept).to(embeddings.dtype)


class EsmEmbeddings(nn.Module):
    """Residues, and absolute positions where the model has them; padding zeroed."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        config.require_complete()
        assert config.vocab_size is not None
        self.padding_idx = config.pad_token_id
        self.mask_token_id = config.mask_token_id
        self.token_dropout = config.token_dropout
        self.word_embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.layer_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if config.emb_layer_norm_before
            else None
        )
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size, padding_idx=config.pad_token_id)
            if config.position_embedding_type == "absolute"
            else None
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """[B, L] ids or [B, L, E] vectors to [B, L, E]. `attention_mask` [B, L] is False on padding.

        With `sequences` they are of a row, [1, total], and have `position_ids`.
        """
        embeddings = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if self.token_dropout:
            is_mask = None if input_ids is None else torch.as_tensor(input_ids == self.mask_token_id)
            embeddings = token_dropout(embeddings, is_mask, attention_mask, sequences)
        # Upstream has no attribute of this name under rotary positions.
        position_embeddings = getattr(self, "position_embeddings", None)
        if position_embeddings is not None:
            if position_ids is None:
                position_ids = self.positions(input_ids, embeddings.shape[1], embeddings.device)
            embeddings = embeddings + position_embeddings(position_ids)
        if self.layer_norm is not None:
            embeddings = self.layer_norm(embeddings)
        if attention_mask is not None:
            embeddings = embeddings * attention_mask.unsqueeze(-1).to(embeddings.dtype)
        return embeddings

    def positions(
        self,
        input_ids: Tensor | None,
        length: int,
        device: torch.device,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """Absolute positions, counted from `pad_token_id + 1` over what is no padding; [1 or B, L].

        Raises:
            ValueError: the table has fewer rows than the longest sequence, of `length`, has tokens.
        """
        assert self.position_embeddings is not None
        assert self.padding_idx is not None
        first = self.padding_idx + 1
        check_length(length, self.position_embeddings.num_embeddings - first, "the absolute position table")
        if input_ids is None:
            if sequences is not None:
                return sequences.positions() + first
            return torch.arange(first, first + length, device=device).unsqueeze(0)
        real = (input_ids != self.padding_idx).long()
        count = real.cumsum(1)
        if sequences is not None:
            before = F.pad(count, (1, 0))[:, sequences.cu_seqlens]
            count = count - before[:, sequences.indices()]
        return count * real + self.padding_idx


class RotaryEmbedding(nn.Module):
    """Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    `inv_freq` is the checkpoint's: ESM-2 was trained with frequencies rounded to half precision, so
    recomputed ones are not the same. It stays in at least float32 when the model is cast.
    """

    inv_freq: Tensor

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.rope_theta, self.head_dim = config.rope_theta, config.head_dim
        self.register_buffer("inv_freq", self.initial_buffers()["inv_freq"])

    def initial_buffers(self) -> dict[str, Tensor]:
        """θ^(-2i / D) for i in [0, D / 2): the frequencies of a model that is trained from scratch."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return {"inv_freq": 1.0 / (self.rope_theta**exponent)}

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        before = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != at_least_float32(self.inv_freq.dtype):
            self.inv_freq = before.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [1 or B, L] to the cosine and sine of their angles, [1 or B, L, 1, D / 2] each."""
        frequencies = self.inv_freq.to(at_least_float32(self.inv_freq.dtype))
        angles = (position_ids.unsqueeze(-1) * frequencies).unsqueeze(2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of features (d, d + D / 2) of x [B, L, H, D] by its position's angle."""
    cos, sin = rotary
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass
class AttentionContext:
    """What every layer of one forward pass reads.

    Args:
        mask: boolean [B, 1, 1 or L, L], or None where all attends to all.
        rotary: cosine and sine, [1 or B, L, 1, D / 2] each, or None.
        eager: whether attention is spelt out, which it is where its weights are wanted.
        output_attentions: whether attention weights are returned.
        checkpointing: how attention is recomputed by itself, if it is.
        sequences: those of a row, [1, total], where they attend one run of a length after the other; the mask
            is then [1, total].
    """

    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None
    eager: bool
    output_attentions: bool
    checkpointing: Checkpointing | None = None
    sequences: Sequences | None = None


def attend(
    query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Attention over [B, H, L, D] on the path of the context: [B, L, E], and the weights where spelt out."""
    sequences, weights, tensors = context.sequences, None, (query, key, value)
    if sequences is not None:
        serves = dense.varlen_serves(query.device, query.dtype, query.shape[-1], dropout)
        if serves and context.mask is None and not context.eager:
            attended = dense.varlen_attention(*tensors, sequences.cu_seqlens, sequences.longest)
            return attended.transpose(1, 2).flatten(2), None
        runs = sequences.runs()
        of_runs = [None] * len(runs) if context.mask is None else split_runs(context.mask, runs)
        contexts = [replace(context, mask=masks.key_mask(mask), sequences=None) for mask in of_runs]
        content = (split_runs(x, runs) for x in tensors)
        parts = [
            attend(q, k, v, part, dropout)[0].flatten(0, 1)
            for part, q, k, v in zip(contexts, *content, strict=True)
        ]
        return torch.cat(parts).unsqueeze(0), None
    if context.eager:
        attended, weights = dense.eager_attention(*tensors, context.mask, dropout)
    else:
        attended = dense.sdpa_attention(*tensors, context.mask, dropout)
    return attended.transpose(1, 2).flatten(2), weights if context.output_attentions else None


class EsmSelfAttention(nn.Module):
    """Self-attention; the query is scaled before it is rotated, as in the original."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = config.attention_probs_dropout_prob

    def forward(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E], and the attention weights [B, H, L, L] where asked for."""
        query = self.heads(self.query(hidden_states)) * self.head_dim**-0.5
        key = self.heads(self.key(hidden_states))
        value = self.heads(self.value(hidden_states))
        if context.rotary is not None:
            query, key = rotate(query, context.rotary), rotate(key, context.rotary)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return attend(query, key, value, context, self.dropout if self.training else 0.0)

    def heads(self, x: Tensor) -> Tensor:
        """[B, L, E] to [B, L, H, D]."""
        return x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A projection to the hidden width, added to what came before."""

    def __init__(self, width: int, config: EsmConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.add(self.dense(x), residual)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """What comes after the projection."""
        return drop(self.dropout, x) + residual


class EsmAttention(nn.Module):
    """Norm, self-attention and its projection."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.self = EsmSelfAttention(config)
        self.output = Residual(config.hidden_size, config)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        normalized = self.LayerNorm(hidden_states)
        attended, weights = run(context.checkpointing, self.self, normalized, context=context)
        return self.output(attended, hidden_states), weights


class EsmIntermediate(nn.Module):
    """First half of the feed-forward network. `F.gelu` is the original's formula, to rounding."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS["gelu"]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states))


class EsmLayer(nn.Module):
    """One transformer layer: attention, then feed-forward, normalised before each."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.attention = EsmAttention(config)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = EsmIntermediate(config)
        self.output = Residual(config.intermediate_size, config)

    def forward(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """[B, L, E] to [B, L, E], and the attention weights [B, H, L, L] where asked for."""
        attended, weights = with_weights(self.attention(hidden_states, context=context))
        return in_parts(self.intermediate, self.output, self.LayerNorm(attended), attended), weights


class EsmEncoder(nn.Module):
    """The layers and the norm after them."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.layer = LayerStack(EsmLayer(config) for _ in range(config.num_hidden_layers))
        self.emb_layer_norm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, *, context: AttentionContext, output_hidden_states: bool = False
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the layers.

        Returns:
            The normalised output of the last layer, [B, L, E], after the input of each layer where all
            states are asked for; and the attention weights of each layer, [B, H, L, L], where asked for.
        """
        states: tuple[Tensor, ...] = ()
        attentions: tuple[Tensor, ...] = ()
        for layer in self.layer:
            if output_hidden_states:
                states = (*states, hidden_states)
            hidden_states, weights = with_weights(
                run(of_layers(self.layer), layer, hidden_states, context=context)
            )
            if weights is not None:
                attentions = (*attentions, weights)
        return (*states, self.emb_layer_norm_after(hidden_states)), attentions


class EsmPooler(nn.Module):
    """The first token's state through dense and tanh: [B, L, E] to [B, E]."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden_states[:, 0]))


def average_product_correct(x: Tensor) -> Tensor:
    """Subtract from each score the product of its row's and column's sums over the total; x [..., L, L]."""
    total = x.sum((-1, -2), keepdim=True)
    product = x.sum(-1, keepdim=True) * x.sum(-2, keepdim=True)
    return x - product / torch.where(total == 0, 1, total)


class EsmContactPredictionHead(nn.Module):
    """Residue contacts by logistic regression on attention (Rao et al. 2020, https://doi.org/10.1101/2020.12.15.422761).

    The regression is fitted apart from the network, so it takes no gradient in training.
    """

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.eos_token_id = config.eos_token_id if isinstance(config.eos_token_id, int) else 2
        self.regression = nn.Linear(config.num_hidden_layers * config.num_attention_heads, 1)
        self.regression.requires_grad_(False)

    def forward(self, tokens: Tensor, attentions: Tensor) -> Tensor:
        """
        Args:
            tokens: [B, L].
            attentions: [B, layers, H, L, L], zero on padding.

        Returns:
            Probability that residues i and j touch, [B, L - 2, L - 2]: the first and last token are cut off.
        """
        kept = (tokens != self.eos_token_id).to(attentions.dtype)
        attentions = attentions * (kept[:, :, None] * kept[:, None, :])[:, None, None]
        maps = attentions[..., 1:-1, 1:-1].flatten(1, 2)  # [B, layers * H, L - 2, L - 2]
        maps = average_product_correct(maps + maps.transpose(-1, -2))
        return torch.sigmoid(self.regression(maps.permute(0, 2, 3, 1)).squeeze(-1))


class EsmPreTrainedModel(PretrainedModel):
    """Base of the ESM models."""

    config_class = EsmConfig
    base_model_prefix = "esm"
    renames = ESM
    config: EsmConfig

    def packs_on(self, device: torch.device) -> bool:
        dropout = self.settings.attention_probs_dropout_prob if self.training else 0.0
        return dense.varlen_serves(device, self.dtype, self.settings.head_dim, dropout)

    @property
    def counted_token(self) -> int | None:
        return self.settings.mask_token_id if self.settings.token_dropout else None

    def resolve_mask(self, input_ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """The given mask, or else the one that the padding among the ids tells."""
        padding = self.settings.pad_token_id
        return (
            input_ids != padding if mask is None and input_ids is not None and padding is not None else mask
        )

    def default_positions(
        self,
        input_ids: Tensor | None,
        length: int,
        device: torch.device,
        sequences: Sequences | None = None,
    ) -> Tensor:
        if self.settings.position_embedding_type == "absolute":
            embeddings: EsmEmbeddings = self.base_model.embeddings  # type: ignore[assignment]
            return embeddings.positions(input_ids, length, device, sequences)
        return counted(length, device, sequences)

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        cu_seqlens: Tensor | None,
        pack: Pack | None,
        needs: Needs | None = None,
    ) -> tuple[Layout, Tensor, BaseModelOutputWithPooling]:
        """Of a model with a head: how tokens lie, and the base model's last states and outputs."""
        layout = self.layout(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            pack,
            self.option("output_attentions", output_attentions),
            needs,
        )
        outputs: BaseModelOutputWithPooling = self.base_model(
            layout.row(input_ids),
            layout.attention_mask,
            layout.position_ids,
            layout.row(inputs_embeds),
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cu_seqlens=layout.cu_seqlens,
            pack=False,
        )
        assert outputs.last_hidden_state is not None
        return layout, outputs.last_hidden_state, outputs


def refuse_encoder(hidden_states: None, attention_mask: None) -> None:
    """Refuse what a decoder would attend to.

    Raises:
        ValueError: there is some.
    """
    if hidden_states is not None or attention_mask is not None:
        raise ValueError(
            "encoder_hidden_states is not supported: ESM here is an encoder without cross-attention"
        )


class EsmModel(EsmPreTrainedModel):
    """ESM without a head: [B, L] ids to [B, L, E] hidden states.

    Args:
        add_pooling_layer: whether `pooler_output` is computed; no published checkpoint has trained it.
    """

    def __init__(
        self, config: EsmConfig, add_pooling_layer: bool = True, attn_implementation: str | None = None
    ) -> None:
        super().__init__(config, attn_implementation)
        self.embeddings = EsmEmbeddings(self.config)
        self.rotary_embeddings = (
            RotaryEmbedding(self.config) if self.config.position_embedding_type == "rotary" else None
        )
        self.encoder = EsmEncoder(self.config)
        self.pooler = EsmPooler(self.config) if add_pooling_layer else None
        self.contact_head = EsmContactPredictionHead(self.config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: None = None,
        encoder_attention_mask: None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """
        Args:
            input_ids: [B, L]. Or else `inputs_embeds`, [B, L, E], which go through all that ids go
                through but the look-up and the search for mask tokens.
            attention_mask: [B, L] (1 for a real token) or [B, L, L] (1 where a query attends to a
                key), of any dtype. Unless given, tokens that equal `config.pad_token_id` are padding,
                as in the original; upstream attends to them.
            position_ids: [B, L]. Rotary positions count from 0 and absolute ones from
                `pad_token_id + 1` unless given.
            encoder_hidden_states, encoder_attention_mask: refused; ESM here is an encoder.
            output_attentions, output_hidden_states, return_dict: the config's unless given.
            cu_seqlens: of sequences that lie end to end in one row, as all inputs then do, [1, total], and
                all outputs, [1, total, E]: where each begins, and `total`; integers, [B + 1].
            pack: whether a padded batch is computed without its padding, the config's unless given; see
                `layout`. Padding is then zero in what is returned.
            token_type_ids, use_cache: ignored.

        Raises:
            ValueError: inputs of wrong shape, both or none of them, more tokens than absolute positions,
                attention weights of a path that has none, malformed `cu_seqlens`, or `pack` where it
                cannot be.
        """
        refuse_encoder(encoder_hidden_states, encoder_attention_mask)
        output_attentions = self.option("output_attentions", output_attentions)
        output_hidden_states = self.option("output_hidden_states", output_hidden_states)
        inputs = input_ids, attention_mask, position_ids, inputs_embeds
        needs = Needs(first=self.pooler is not None)
        states, attentions, pooled = self.run(
            *inputs, output_attentions, output_hidden_states, cu_seqlens, pack, needs
        )
        output = BaseModelOutputWithPooling(
            last_hidden_state=states[-1],
            pooler_output=pooled,
            hidden_states=states if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
        )
        return self.returned(output, return_dict)

    def run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool,
        output_hidden_states: bool,
        cu_seqlens: Tensor | None,
        pack: Pack | None,
        needs: Needs,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]:
        """Return the states and attention weights of `EsmEncoder.forward`, and the pooled first state."""
        layout = self.layout(
            input_ids, attention_mask, position_ids, inputs_embeds, cu_seqlens, pack, output_attentions, needs
        )
        ids, vectors = layout.row(input_ids), layout.row(inputs_embeds)
        plan = choose(self.settings, *resolve_input(ids, vectors), output_attentions)
        states, attentions = self.run_encoder(
            ids, vectors, layout, output_attentions, output_hidden_states, plan.path == "eager"
        )
        pooled = None if self.pooler is None else self.pooler(layout.first(states[-1]))
        return tuple(map(layout.padded, states)), attentions, pooled

    def run_encoder(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        layout: Layout,
        output_attentions: bool,
        output_hidden_states: bool,
        eager: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run embeddings and encoder on inputs laid out so; spell attention out where `eager`."""
        mask, position_ids, sequences = layout.mask, layout.position_ids, layout.sequences
        real = masks.token_mask(mask)
        embeddings = self.embeddings(input_ids, real, position_ids, inputs_embeds, sequences)
        device = embeddings.device
        if position_ids is None:
            position_ids = counted(embeddings.shape[1], device, None)
        rotary = self.rotary(position_ids)
        if sequences is None:
            mask = masks.key_mask(mask)
        elif output_attentions or sequences.lengths is None or not runs_plainly(device):
            mask, sequences = masks.key_mask(sequences.pairs(mask)), None
        context = AttentionContext(
            mask, rotary, eager, output_attentions, of_attention(self.encoder.layer), sequences
        )
        return self.encode_states(embeddings, context, output_hidden_states)

    def rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the cosine and sine of rotary positions, or None where positions are absolute."""
        if self.rotary_embeddings is None:
            return None
        return self.rotary_embeddings(position_ids=position_ids)  # type: ignore[no-any-return]

    def encode_states(
        self, embeddings: Tensor, context: AttentionContext, output_hidden_states: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the encoder; results are those of `EsmEncoder.forward`."""
        return self.encoder(  # type: ignore[no-any-return]
            embeddings, context=context, output_hidden_states=output_hidden_states
        )

    def predict_contacts(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Probability that two residues touch, from attention: ids [B, L] to [B, L - 2, L - 2].

        The same on every attention path, and for a padded sequence the same as for it alone.
        """
        layout = self.layout(tokens, attention_mask, None, None, None, False, output_attentions=True)
        _, attentions = self.run_encoder(tokens, None, layout, True, False, eager=True)
        weights = torch.stack(attentions, dim=1)  # [B, layers, H, L, L]
        real = masks.token_mask(layout.mask)
        if real is not None:
            pairs = (real[:, :, None] & real[:, None, :])[:, None, None]
            weights = weights * pairs.to(weights.dtype)
        return self.contact_head(tokens, weights)  # type: ignore[no-any-return]


class EsmLMHead(nn.Module):
    """Masked-language head whose decoder shares the embeddings' weight."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, L, E] to [B, L, V]."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(hidden_states)))) + self.bias  # type: ignore[no-any-return]


class EsmForMaskedLM(EsmPreTrainedModel):
    """ESM that fills masks: logits over the residues at each position."""

    def __init__(self, config: EsmConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.esm = EsmModel(self.config, add_pooling_layer=False)
        self.lm_head = EsmLMHead(self.config)
        self.post_init()

    def vocabulary_parameters(self) -> list[str]:
        return [*super().vocabulary_parameters(), "lm_head.decoder.weight", "lm_head.bias"]

    def ties(self) -> dict[str, str]:
        if not self.config.tie_word_embeddings:
            return {}
        return {"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"}

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: None = None,
        encoder_attention_mask: None = None,
        labels: Tensor | None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """As `EsmModel.forward`. `labels`: [B, L] token ids, -100 where no prediction is asked for."""
        refuse_encoder(encoder_hidden_states, encoder_attention_mask)
        layout, last, outputs = self.encode(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            cu_seqlens,
            pack,
            Needs(labels),
        )
        logits = self.lm_head(last)
        output = MaskedLMOutput(
            loss=None if labels is None else cross_entropy(logits, layout.labels(labels)),
            logits=layout.padded(logits),
            hidden_states=layout.all_padded(outputs.hidden_states),
            attentions=outputs.attentions,
        )
        return self.returned(output, return_dict)

    def predict_contacts(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """See `EsmModel.predict_contacts`."""
        return self.esm.predict_contacts(tokens, attention_mask)


class EsmClassificationHead(nn.Module):
    """The first token's state through dense and tanh to the classes: [B, L, E] to [B, num_labels]."""

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        first = torch.tanh(self.dense(self.dropout(hidden_states[:, 0])))
        return self.out_proj(self.dropout(first))  # type: ignore[no-any-return]


class EsmForSequenceClassification(EsmPreTrainedModel):
    """ESM that classifies, or scores, a protein."""

    def __init__(self, config: EsmConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.esm = EsmModel(self.config, add_pooling_layer=False)
        self.classifier = EsmClassificationHead(self.config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """As `EsmModel.forward`. `labels`: see `losses.esm_sequence_loss`."""
        layout, last, outputs = self.encode(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            cu_seqlens,
            pack,
            Needs(first=True),
        )
        logits = self.classifier(layout.first(last))
        output = SequenceClassifierOutput(
            loss=None if labels is None else esm_sequence_loss(self.config, logits, labels),
            logits=logits,
            hidden_states=layout.all_padded(outputs.hidden_states),
            attentions=outputs.attentions,
        )
        return self.returned(output, return_dict)


class EsmForTokenClassification(EsmPreTrainedModel):
    """ESM that classifies each residue."""

    def __init__(self, config: EsmConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.esm = EsmModel(self.config, add_pooling_layer=False)
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """As `EsmModel.forward`. `labels`: [B, L] class indices, -100 where a residue is not scored."""
        layout, last, outputs = self.encode(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            cu_seqlens,
            pack,
            Needs(labels),
        )
        logits = self.classifier(self.dropout(last))
        output = TokenClassifierOutput(
            loss=None if labels is None else cross_entropy(logits, layout.labels(labels)),
            logits=layout.padded(logits),
            hidden_states=layout.all_padded(outputs.hidden_states),
            attentions=outputs.attentions,
        )
        return self.returned(output, return_dict)
