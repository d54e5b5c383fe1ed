"""What upstream's blocks take over from ours, class by class.

A class here is never instantiated: its members are set on upstream's class of the same row in `GRAFTS`.
Upstream's module tree, parameters and buffers stay as they are; what changes is what runs. A graft therefore
holds our methods, and properties that give upstream's attributes the names that our methods read.

Blocks below an encoder run our methods only when an encoder of ours calls them, which passes `context`.
Called with upstream's own arguments they run upstream's own code.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.activations import ACT2FN

from ..models.attention import masks
from ..models.attention.plan import Path, choose
from ..models.base import PretrainedModel
from ..models.config import Pack
from ..models.deberta import blocks
from ..models.deberta import modeling as deberta
from ..models.deberta.config import REFUSED_BY_TALKING_HEADS
from ..models.deberta_v2 import modeling as deberta_v2
from ..models.esm import modeling as esm
from ..models.esm.config import REFUSED as REFUSED_BY_ESM
from ..models.packing import Needs, Sequences

Method = Callable[..., Any]
PATHS = typing.get_args(Path)


@dataclass(frozen=True)
class Around:
    """A method that needs the one it takes the place of: `make(theirs)` gives it."""

    make: Callable[[Method], Method]


def around(make: Callable[[Method], Method]) -> Any:
    """Mark a function from upstream's method to ours; the result looks like upstream's to `inspect`."""
    return Around(lambda theirs: functools.wraps(theirs)(make(theirs)))


def alias(name: str) -> Any:
    """Return a property under which our methods read, and anyone may set, upstream's attribute `name`."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


def computed(value: Callable[[Any], Any]) -> Any:
    """Return a property that our methods read where upstream has no attribute."""
    return property(value)


def in_context(ours: Method) -> Any:
    """Run `ours` when an encoder of ours calls, and upstream's method otherwise."""

    def make(theirs: Method) -> Method:
        def forward(self: nn.Module, *args: Any, context: Any = None, **kwargs: Any) -> Any:
            if context is None:
                return theirs(self, *args, **kwargs)
            return ours(self, *args, context=context, **kwargs)

        return forward

    return around(make)


# Configuration


class Settings:
    """Upstream's configuration, under the names that our forward passes read."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    @property
    def pack(self) -> Pack:
        pack: Pack = getattr(self.config, "pack", "auto")
        return pack

    @property
    def return_dict(self) -> bool:
        return bool(self.config.return_dict and not getattr(self.config, "torchscript", False))

    @property
    def head_dim(self) -> int:
        return int(self.config.hidden_size) // int(self.config.num_attention_heads)

    @property
    def attn_implementation(self) -> str:
        asked: str | None = self.config._attn_implementation
        # Upstream itself fills in "sdpa" for ESM; there it says no more than "auto".
        return "auto" if asked is None or (asked == "sdpa" and self.is_esm) else asked

    @property
    def is_esm(self) -> bool:
        return isinstance(self.config, transformers.EsmConfig)

    def refused_attention(self) -> dict[str, str]:
        if self.is_esm:
            return REFUSED_BY_ESM
        return REFUSED_BY_TALKING_HEADS if getattr(self.config, "talking_head", False) else {}


def checked_attention(config: Any, asked: str | None) -> str | None:
    """Return the attention that `attn_implementation` names, None for `auto`.

    Raises:
        ValueError: no attention of ours, or one that this model cannot have.
    """
    if asked in (None, "auto"):
        return None
    family = type(config).__name__.removesuffix("Config")
    if asked not in PATHS:
        known = ", ".join(map(repr, ("auto", *PATHS)))
        raise ValueError(
            f"attn_implementation is {asked!r}; for {family} under outplace it must be one of {known}"
        )
    refused = Settings(config).refused_attention()
    if asked in refused:
        raise ValueError(f"attn_implementation is {asked!r} for {family}, {refused[asked]}")
    return asked


def checking(theirs: Method) -> Method:
    """Have `attn_implementation` name our attention; upstream's further names stay for ESM.

    With those ESM's own forward pass runs.
    """

    def check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if not Settings(self.config).is_esm or attn_implementation in ("blockwise", "triton"):
            return checked_attention(self.config, attn_implementation)
        return theirs(self, None if attn_implementation == "auto" else attn_implementation, *args, **kwargs)

    return check


class PreTrainedModel:
    """What every model of the three families is asked about attention."""

    get_correct_attn_implementation = around(checking)
    _check_and_adjust_attn_implementation = around(checking)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True


class DebertaPreTrainedModel(PreTrainedModel):
    _no_split_modules = ("DebertaLayer", "DebertaEmbeddings")


class DebertaV2PreTrainedModel(PreTrainedModel):
    _no_split_modules = ("DebertaV2Layer", "DebertaV2Embeddings")


# Models


@dataclass(frozen=True)
class Asked:
    """What a model with a head has been asked, of which upstream tells its base model nothing.

    Args:
        needs: what the loss reads of padding.
        pack, cu_seqlens: as our models take them.
    """

    needs: Needs | None = None
    pack: Pack | None = None
    cu_seqlens: Tensor | None = None


LEAVES_FORWARD = transformers.__version__.startswith("4.")
_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)


class Model:
    """What upstream's base models take over from `PretrainedModel`."""

    option = PretrainedModel.option
    layout = PretrainedModel.layout
    may_pack = PretrainedModel.may_pack
    packs_on = PretrainedModel.packs_on
    attention_plan = PretrainedModel.attention_plan
    counted_token = PretrainedModel.counted_token
    resolve_mask = PretrainedModel.resolve_mask
    default_positions = PretrainedModel.default_positions
    _given_row = PretrainedModel._given_row

    @property
    def settings(self: Any) -> Settings:
        return Settings(self.config)

    def arguments(self: Any, given: dict[str, Any]) -> tuple[bool, bool, Tensor | None, Pack | None, Needs]:
        """Return the end of the arguments of `run`: what is to be returned, and how tokens are laid out."""
        asked = (None if torch.compiler.is_compiling() else _asked.get()) or Asked()
        needs = asked.needs or Needs()
        pack, cu_seqlens = given.get("pack"), given.get("cu_seqlens")
        return (
            self.option("output_attentions", given.get("output_attentions")),
            self.option("output_hidden_states", given.get("output_hidden_states")),
            asked.cu_seqlens if cu_seqlens is None else cu_seqlens,
            asked.pack if pack is None else pack,
            # What stands on this model is not known; it may read the first token.
            Needs(needs.labels, True, needs.all),
        )

    def wrapped(self: Any, output: Any, given: dict[str, Any]) -> Any:
        """Return the output as the caller, or else the configuration, wants it."""
        return output if self.option("return_dict", given.get("return_dict")) else output.to_tuple()


def named(theirs: Method) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return a function that gives the arguments of a call to `theirs` their names."""
    names = list(inspect.signature(theirs).parameters)[1:]
    return lambda args, kwargs: dict(zip(names, args, strict=False)) | kwargs


def two_dimensional(mask: Tensor | None) -> Tensor | None:
    """Return a mask [B, 1, 1, L] as [B, L], and any other as it is."""
    return (
        mask[:, 0, 0] if mask is not None and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1 else mask
    )


class DebertaModel(Model):
    packs_on = blocks.DisentangledModel.packs_on
    default_positions = blocks.DisentangledModel.default_positions
    reads_positions = blocks.DisentangledModel.reads_positions
    keep_positions = blocks.DisentangledModel.keep_positions
    kept_position_bytes = blocks.DisentangledModel.kept_position_bytes
    run = blocks.Backbone.run
    plans = blocks.Backbone.plans

    @around
    def forward(theirs: Method) -> Method:
        names_of = named(theirs)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = names_of(args, kwargs)
            ids, mask = given.get("input_ids"), two_dimensional(given.get("attention_mask"))
            if ids is not None:
                self.warn_if_padding_and_no_attention_mask(ids, mask)
            arguments = self.arguments(given)
            rest = (given.get(name) for name in ("token_type_ids", "position_ids", "inputs_embeds"))
            states, attentions = self.run(ids, mask, *rest, *arguments)
            wants_attentions, wants_states, *_ = arguments
            output = modeling_outputs.BaseModelOutput(
                last_hidden_state=states[-1],
                hidden_states=states if wants_states else None,
                attentions=attentions if wants_attentions else None,
            )
            return self.wrapped(output, given)

        return forward

    def run_encoder(
        self: Any,
        embeddings: Tensor,
        mask: Tensor | None,
        plans: blocks.Plans,
        output_attentions: bool,
        output_hidden_states: bool,
        sequences: Sequences | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        output = self.encoder(
            embeddings,
            mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            plans=plans,
            sequences=sequences,
        )
        return output.hidden_states or (output.last_hidden_state,), output.attentions or ()


class EsmModel(Model):
    packs_on = esm.EsmPreTrainedModel.packs_on
    counted_token = esm.EsmPreTrainedModel.counted_token
    resolve_mask = esm.EsmPreTrainedModel.resolve_mask
    default_positions = esm.EsmPreTrainedModel.default_positions
    run = esm.EsmModel.run
    run_encoder = esm.EsmModel.run_encoder
    predict_contacts = esm.EsmModel.predict_contacts

    @around
    def forward(theirs: Method) -> Method:
        names_of = named(theirs)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = names_of(args, kwargs)
            mask = two_dimensional(given.get("attention_mask"))
            if not is_ours(self.config, given, mask):
                return theirs(self, *args, **kwargs)
            arguments = self.arguments(given)
            rest = (given.get(name) for name in ("position_ids", "inputs_embeds"))
            states, attentions, pooled = self.run(given.get("input_ids"), mask, *rest, *arguments)
            wants_attentions, wants_states, *_ = arguments
            output = modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions(
                last_hidden_state=states[-1],
                pooler_output=pooled,
                hidden_states=states if wants_states else None,
                attentions=attentions if wants_attentions else None,
            )
            return self.wrapped(output, given)

        return forward

    def rotary(self: Any, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.settings.position_embedding_type != "rotary":
            return None
        module = getattr(self, "rotary_embeddings", None)
        if module is None:  # In transformers 4 each layer has the same one.
            module = self.encoder.layer[0].attention.self.rotary_embeddings
        return module(position_ids=position_ids, context=True)  # type: ignore[no-any-return]

    def encode_states(
        self: Any, embeddings: Tensor, context: esm.AttentionContext, output_hidden_states: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        release(self)
        output = self.encoder(embeddings, context=context, output_hidden_states=output_hidden_states)
        return output.hidden_states or (output.last_hidden_state,), output.attentions or ()


def release(model: nn.Module) -> None:
    """Remove what transformers 4 leaves on a module whose outputs it captured: its own forward pass.

    It would run in the place of the class's.
    """
    if LEAVES_FORWARD and not torch.compiler.is_compiling():
        for module in model.modules():
            if is_bound(module, "forward"):
                del module.__dict__["forward"]


def is_bound(module: nn.Module, name: str) -> bool:
    """Return True if the module has, of its own, a method of its class in transformers under this name."""
    method = module.__dict__.get(name)
    return isinstance(method, MethodType) and method.__func__.__module__ == type(module).__module__


def is_ours(config: Any, given: dict[str, Any], mask: Tensor | None) -> bool:
    """Return True if a call to ESM is one that our encoder serves: the others are upstream's own."""
    foreign = ("head_mask", "encoder_hidden_states", "encoder_attention_mask")
    return (
        not config.is_decoder
        and config.position_embedding_type in ("rotary", "absolute")
        and config._attn_implementation in (None, "eager", "sdpa")
        and isinstance(given.get("output_hidden_states"), bool | None)
        and (mask is None or mask.ndim < 4)
        and all(given.get(name) is None for name in foreign)
    )


# Heads


def asking(needs: Callable[[dict[str, Any]], Needs | None], rows: bool) -> Any:
    """Tell the base model what the loss of a head reads of padding, and how tokens are to be laid out.

    Args:
        needs: what the loss reads, by the arguments of the call.
        rows: whether the head serves sequences end to end in one row.
    """

    def make(theirs: Method) -> Method:
        names_of = named(theirs)

        def forward(
            self: Any, *args: Any, pack: Pack | None = None, cu_seqlens: Tensor | None = None, **kwargs: Any
        ) -> Any:
            given = names_of(args, kwargs)
            if cu_seqlens is not None and (not rows or given.get("start_positions") is not None):
                raise ValueError(
                    f"{type(self).__name__} of transformers reads one row as one sequence, so it takes no "
                    "cu_seqlens; give them to model.base_model, or use the class of this name in outplace"
                )
            if torch.compiler.is_compiling():
                if pack is not None or cu_seqlens is not None:
                    raise ValueError("pack and cu_seqlens cannot be compiled through a head of transformers")
                return theirs(self, *args, **kwargs)
            token = _asked.set(Asked(needs(given), pack, cu_seqlens))
            try:
                return theirs(self, *args, **kwargs)
            finally:
                _asked.reset(token)

        return forward

    return around(make)


def _labels(given: dict[str, Any]) -> Needs:
    return Needs(given.get("labels"))


def _span(given: dict[str, Any]) -> Needs:
    labelled = given.get("start_positions") is not None and given.get("end_positions") is not None
    return Needs(all="the loss of a span is over all cells of a row" if labelled else None)


class TokenHead:
    forward = asking(_labels, rows=True)


class QuestionAnsweringHead:
    forward = asking(_span, rows=True)


class SequenceHead:
    forward = asking(lambda given: None, rows=False)


def resized(theirs: Method, bias_of: Callable[[Any], tuple[nn.Module, str] | None]) -> Method:
    """Resize the bias of a masked-language head with the vocabulary, which upstream leaves as it was."""

    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings: nn.Embedding = theirs(self, *args, **kwargs)
        place = bias_of(self)
        if place is not None:
            owner, name = place
            bias, rows = getattr(owner, name), embeddings.weight.shape[0]
            fresh = bias.new_zeros(max(rows - len(bias), 0))
            setattr(owner, name, nn.Parameter(torch.cat((bias.detach()[:rows], fresh)), bias.requires_grad))
        return embeddings

    return resize_token_embeddings


class DebertaForMaskedLM(TokenHead):
    @around
    def get_output_embeddings(theirs: Method) -> Method:
        # Upstream names a layer of the original head here, and would resize it with the vocabulary.
        return lambda self: theirs(self) if self.legacy else None

    @around
    def resize_token_embeddings(theirs: Method) -> Method:
        return resized(theirs, lambda self: None if self.legacy else (self.lm_predictions.lm_head, "bias"))


class EsmForMaskedLM(TokenHead):
    @around
    def resize_token_embeddings(theirs: Method) -> Method:
        return resized(theirs, lambda self: (self.lm_head, "bias"))

    def predict_contacts(self: Any, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """See `outplace.EsmModel.predict_contacts`."""
        return self.esm.predict_contacts(tokens, attention_mask)  # type: ignore[no-any-return]


# Blocks of both generations of DeBERTa


class SelfOutput(blocks.SelfOutput):
    pass


class Intermediate:
    activation = alias("intermediate_act_fn")


class Output(blocks.Output):
    pass


class Embeddings(blocks.Embeddings):
    @around
    def forward(theirs: Method) -> Method:
        def forward(
            self: Any,
            input_ids: Tensor | None = None,
            token_type_ids: Tensor | None = None,
            position_ids: Tensor | None = None,
            mask: Tensor | None = None,
            inputs_embeds: Tensor | None = None,
        ) -> Tensor:
            mask = masks.token_mask(two_dimensional(mask))
            return blocks.Embeddings.forward(
                self, input_ids, token_type_ids, position_ids, mask, inputs_embeds
            )

        return forward


class Attention(blocks.Attention):
    forward = in_context(blocks.Attention.forward)


class Layer(blocks.Layer):
    forward = in_context(blocks.Layer.forward)


class Encoder(blocks.Encoder):
    run_layers = blocks.Encoder.forward

    @property
    def keep_positions(self: Any) -> bool:
        told: bool | None = self.__dict__.get("_keep_positions")
        return self.keeps_by_default(self.rel_embeddings.embedding_dim, terms=2) if told is None else told

    @keep_positions.setter
    def keep_positions(self: Any, keep: bool) -> None:
        self.__dict__["_keep_positions"] = keep

    @around
    def forward(theirs: Method) -> Method:
        def forward(
            self: Any,
            hidden_states: Tensor,
            attention_mask: Tensor | None,
            output_hidden_states: bool = True,
            output_attentions: bool = False,
            query_states: Tensor | None = None,
            relative_pos: Tensor | None = None,
            return_dict: bool = True,
            *,
            plans: blocks.Plans | None = None,
            sequences: Sequences | None = None,
        ) -> Any:
            mask = two_dimensional(attention_mask)
            if query_states is not None or relative_pos is not None or (mask is not None and mask.ndim == 4):
                return theirs(
                    self,
                    hidden_states,
                    attention_mask,
                    output_hidden_states,
                    output_attentions,
                    query_states,
                    relative_pos,
                    return_dict,
                )
            if plans is None:
                batch, length, _ = hidden_states.shape
                mask = masks.as_bool(mask, batch, length)
                pairs = mask is not None and mask.ndim == 3
                config = Settings(self.layer[0].attention.config)
                device, dtype = hidden_states.device, hidden_states.dtype
                plans = choose(config, batch, length, device, output_attentions, dtype, pairs)  # type: ignore[arg-type]
            states, attentions = self.run_layers(
                hidden_states, mask, plans, output_attentions, output_hidden_states, sequences
            )
            output = modeling_outputs.BaseModelOutput(
                last_hidden_state=states[-1],
                hidden_states=states if output_hidden_states else None,
                attentions=attentions if output_attentions else None,
            )
            return output if return_dict else output.to_tuple()

        return forward


# DeBERTa


class DebertaLayerNorm(deberta.DebertaLayerNorm):
    eps = alias("variance_epsilon")


class SelfAttention:
    """What both generations call otherwise than we do."""

    head_dim = alias("attention_head_size")

    c2p = computed(lambda self: "c2p" in self.pos_att_type)

    p2c = computed(lambda self: "p2c" in self.pos_att_type)


class DebertaSelfAttention(SelfAttention, deberta.DisentangledSelfAttention):
    forward = in_context(deberta.DisentangledSelfAttention.forward)

    num_heads = alias("num_attention_heads")

    scale = computed(lambda self: math.sqrt(self.head_dim * (1 + len(self.pos_att_type))))


class DebertaEncoder(Encoder, deberta.DebertaEncoder):
    span = alias("max_relative_positions")


# DeBERTa-V2 and V3


class DebertaV2SelfAttention(SelfAttention, deberta_v2.DisentangledSelfAttention):
    forward = in_context(deberta_v2.DisentangledSelfAttention.forward)

    scale = computed(lambda self: math.sqrt(self.head_dim * (1 + self.c2p + self.p2c)))


class ConvLayer(deberta_v2.ConvLayer):
    activation = computed(lambda self: ACT2FN[self.conv_act])

    @around
    def forward(theirs: Method) -> Method:
        def forward(
            self: Any,
            hidden_states: Tensor,
            residual_states: Tensor,
            input_mask: Tensor | None,
            sequences: Sequences | None = None,
        ) -> Tensor:
            mask = None if input_mask is None else input_mask.bool()
            return deberta_v2.ConvLayer.forward(self, hidden_states, residual_states, mask, sequences)

        return forward


class DebertaV2Encoder(Encoder, deberta_v2.DebertaV2Encoder):
    clamp_relative_positions = False

    span = computed(
        lambda self: self.position_buckets if self.position_buckets > 0 else self.max_relative_positions
    )

    max_distance = alias("max_relative_positions")


# ESM


def alone(ours: Method) -> Any:
    """As `in_context`, but return states alone, as upstream's blocks do, where no weights are asked for."""

    def states_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        states, weights = ours(self, *args, **kwargs)
        return states if weights is None else (states, weights)

    return in_context(states_alone)


class EsmRotaryEmbedding:
    forward = in_context(lambda self, position_ids, context: esm.RotaryEmbedding.forward(self, position_ids))


class EsmEmbeddings(esm.EsmEmbeddings):
    pass


class EsmSelfAttention:
    forward = in_context(esm.EsmSelfAttention.forward)
    heads = esm.EsmSelfAttention.heads

    head_dim = alias("attention_head_size")


class EsmResidual(esm.Residual):
    pass


class EsmAttention:
    forward = alone(esm.EsmAttention.forward)


class EsmIntermediate:
    activation = staticmethod(F.gelu)
    forward = esm.EsmIntermediate.forward


class EsmLayer:
    forward = alone(esm.EsmLayer.forward)


class EsmEncoder:
    @around
    def forward(theirs: Method) -> Method:
        def forward(
            self: Any,
            *args: Any,
            context: esm.AttentionContext | None = None,
            output_hidden_states: bool | None = None,
            **kwargs: Any,
        ) -> Any:
            if context is None:
                if output_hidden_states is not None:
                    kwargs = kwargs | {"output_hidden_states": output_hidden_states}
                return theirs(self, *args, **kwargs)
            states, attentions = esm.EsmEncoder.forward(
                self, *args, context=context, output_hidden_states=bool(output_hidden_states)
            )
            return modeling_outputs.BaseModelOutputWithCrossAttentions(
                last_hidden_state=states[-1],
                hidden_states=states if output_hidden_states else None,
                attentions=attentions if context.output_attentions else None,
            )

        return forward


class EsmContactPredictionHead:
    forward = esm.EsmContactPredictionHead.forward

    eos_token_id = alias("eos_idx")


GRAFTS: dict[str, dict[str, type]] = {
    "deberta": {
        "DebertaLayerNorm": DebertaLayerNorm,
        "DebertaEmbeddings": Embeddings,
        "DisentangledSelfAttention": DebertaSelfAttention,
        "DebertaSelfOutput": SelfOutput,
        "DebertaAttention": Attention,
        "DebertaIntermediate": Intermediate,
        "DebertaOutput": Output,
        "DebertaLayer": Layer,
        "DebertaEncoder": DebertaEncoder,
        "DebertaPreTrainedModel": DebertaPreTrainedModel,
        "DebertaModel": DebertaModel,
        "DebertaForMaskedLM": DebertaForMaskedLM,
        "DebertaForSequenceClassification": SequenceHead,
        "DebertaForTokenClassification": TokenHead,
        "DebertaForQuestionAnswering": QuestionAnsweringHead,
    },
    "deberta-v2": {
        "DebertaV2Embeddings": Embeddings,
        "DisentangledSelfAttention": DebertaV2SelfAttention,
        "DebertaV2SelfOutput": SelfOutput,
        "DebertaV2Attention": Attention,
        "DebertaV2Intermediate": Intermediate,
        "DebertaV2Output": Output,
        "DebertaV2Layer": Layer,
        "ConvLayer": ConvLayer,
        "DebertaV2Encoder": DebertaV2Encoder,
        "DebertaV2PreTrainedModel": DebertaV2PreTrainedModel,
        "DebertaV2Model": DebertaModel,
        "DebertaV2ForMaskedLM": DebertaForMaskedLM,
        "DebertaV2ForSequenceClassification": SequenceHead,
        "DebertaV2ForTokenClassification": TokenHead,
        "DebertaV2ForQuestionAnswering": QuestionAnsweringHead,
        "DebertaV2ForMultipleChoice": SequenceHead,
    },
    "esm": {
        "EsmEmbeddings": EsmEmbeddings,
        "EsmRotaryEmbedding": EsmRotaryEmbedding,
        "EsmSelfAttention": EsmSelfAttention,
        "EsmSelfOutput": EsmResidual,
        "EsmAttention": EsmAttention,
        "EsmIntermediate": EsmIntermediate,
        "EsmOutput": EsmResidual,
        "EsmLayer": EsmLayer,
        "EsmEncoder": EsmEncoder,
        "EsmContactPredictionHead": EsmContactPredictionHead,
        "EsmPreTrainedModel": PreTrainedModel,
        "EsmModel": EsmModel,
        "EsmForMaskedLM": EsmForMaskedLM,
        "EsmForSequenceClassification": SequenceHead,
        "EsmForTokenClassification": TokenHead,
    },
}
"""By `model_type`: what each class of upstream's modeling file takes over."""

BACKBONES = ("DebertaModel", "DebertaV2Model", "EsmModel")
OLDER_NAMES = {"EsmRotaryEmbedding": "RotaryEmbedding"}
"""What transformers 4 calls a class."""
