"""The task heads of both generations of DeBERTa.

Every `forward` takes the arguments of the model without a head (see `blocks.Backbone.forward`) and labels.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import Pack
from ..layers import ACTIVATIONS
from ..losses import cross_entropy, deberta_sequence_loss, span_loss
from ..outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from ..packing import Layout, Needs
from .blocks import Backbone, DisentangledModel
from .config import DisentangledConfig


class WithHead(DisentangledModel):
    """A backbone, and room for a head."""

    backbone: ClassVar[type[Backbone]]
    config: DisentangledConfig

    def __init__(self, config: DisentangledConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.deberta = self.backbone(self.config)

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        cu_seqlens: Tensor | None,
        pack: Pack | None,
        needs: Needs | None = None,
    ) -> tuple[Layout, Tensor, BaseModelOutput]:
        """How the tokens lie, and the backbone's last states and outputs, which lie so."""
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
        outputs: BaseModelOutput = self.deberta(
            layout.row(input_ids),
            layout.attention_mask,
            layout.row(token_type_ids),
            layout.position_ids,
            layout.row(inputs_embeds),
            output_attentions,
            output_hidden_states,
            return_dict=True,
            cu_seqlens=layout.cu_seqlens,
            pack=False,
        )
        assert outputs.last_hidden_state is not None
        return layout, outputs.last_hidden_state, outputs


class PredictionTransform(nn.Module):
    """First half of the upstream masked-language head: dense, activation, norm."""

    def __init__(self, config: DisentangledConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden_states)))  # type: ignore[no-any-return]


class LegacyPredictions(nn.Module):
    """Upstream's masked-language head. Its decoder shares `bias`, and the embeddings' weight where tied."""

    def __init__(self, config: DisentangledConfig) -> None:
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.transform = PredictionTransform(config, width)
        self.decoder = nn.Linear(width, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))  # type: ignore[no-any-return]


class LegacyHead(nn.Module):
    """The module that gives `LegacyPredictions` its place in the checkpoint, `cls.predictions`."""

    def __init__(self, config: DisentangledConfig) -> None:
        super().__init__()
        self.predictions = LegacyPredictions(config)


class LMHead(PredictionTransform):
    """The original masked-language head: the embeddings themselves decode, plus a bias."""

    def __init__(self, config: DisentangledConfig) -> None:
        super().__init__(config, config.embedding_size or config.hidden_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def decode(self, hidden_states: Tensor, word_embeddings: Tensor) -> Tensor:
        """[B, L, E] and the embedding table [V, E] to [B, L, V]."""
        return self(hidden_states) @ word_embeddings.t() + self.bias  # type: ignore[no-any-return]


class LMPredictions(nn.Module):
    """The module that gives `LMHead` its place in the checkpoint, `lm_predictions.lm_head`."""

    def __init__(self, config: DisentangledConfig) -> None:
        super().__init__()
        self.lm_head = LMHead(config)


class ForMaskedLM(WithHead):
    """Masked-language model: logits over the vocabulary at each token.

    `config.legacy` says which head is built. `from_pretrained` builds the one that the checkpoint
    carries unless told: the published checkpoints carry the original's, which upstream, building its
    own by default, leaves unread. With `config.enhanced_mask_decoder` the head reads the decoder's
    states instead of the encoder's last (`blocks.Encoder.enhanced_mask_decoder`).
    """

    def __init__(self, config: DisentangledConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        if self.config.legacy:
            self.cls = LegacyHead(self.config)
        else:
            self.lm_predictions = LMPredictions(self.config)
        self.post_init()

    @classmethod
    def config_overrides_for(cls, keys: set[str]) -> dict[str, Any]:
        carried = {key.split(".")[0] for key in keys} & {"cls", "lm_predictions"}
        return {"legacy": "cls" in carried} if len(carried) == 1 else {}

    def vocabulary_parameters(self) -> list[str]:
        prefix = "cls.predictions" if self.config.legacy else "lm_predictions.lm_head"
        decoder = [f"{prefix}.decoder.weight", f"{prefix}.decoder.bias"] if self.config.legacy else []
        return [*super().vocabulary_parameters(), f"{prefix}.bias", *decoder]

    def ties(self) -> dict[str, str]:
        if not self.config.legacy:
            return {}
        ties = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
        if self.config.tie_word_embeddings:
            ties["cls.predictions.decoder.weight"] = "deberta.embeddings.word_embeddings.weight"
        return ties

    def reads_positions(self) -> bool:
        return self.config.enhanced_mask_decoder or super().reads_positions()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.cls.predictions.decoder if self.config.legacy else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        use_cache: bool | None = None,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """`labels`: [B, L] token ids, -100 where no prediction is asked for."""
        output_hidden_states = self.option("output_hidden_states", output_hidden_states)
        decoder = self.config.enhanced_mask_decoder
        layout, last, outputs = self.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states or decoder,
            cu_seqlens,
            pack,
            Needs(labels),
        )
        if decoder:
            assert outputs.hidden_states is not None
            last = self.deberta.enhanced_mask_decoder(outputs.hidden_states[-2], layout)
        if self.config.legacy:
            logits = self.cls.predictions(last)
        else:
            logits = self.lm_predictions.lm_head.decode(last, self.deberta.embeddings.word_embeddings.weight)
        output = MaskedLMOutput(
            loss=None if labels is None else cross_entropy(logits, layout.labels(labels)),
            logits=layout.padded(logits),
            hidden_states=layout.all_padded(outputs.hidden_states) if output_hidden_states else None,
            attentions=outputs.attentions,
        )
        return self.returned(output, return_dict)


class ContextPooler(nn.Module):
    """The first token's state through dropout, dense and activation: [B, L, E] to [B, E]."""

    def __init__(self, config: DisentangledConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.pooler_dropout)
        self.activation = ACTIVATIONS[config.pooler_hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(self.dropout(hidden_states[:, 0])))


class WithPooler(WithHead):
    """A classifier on the pooled first token."""

    def __init__(self, config: DisentangledConfig, attn_implementation: str | None, classes: int) -> None:
        super().__init__(config, attn_implementation)
        self.pooler = ContextPooler(self.config)
        self.classifier = nn.Linear(self.config.hidden_size, classes)
        dropout = self.config.cls_dropout
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob if dropout is None else dropout)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.pooler(hidden_states)))  # type: ignore[no-any-return]


class ForSequenceClassification(WithPooler):
    """Classifies, or scores, a text or a pair of texts; the labels never change the logits' shape."""

    def __init__(self, config: DisentangledConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation, classes=config.num_labels)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        use_cache: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """`labels`: see `losses.deberta_sequence_loss`."""
        layout, last, outputs = self.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            cu_seqlens,
            pack,
            Needs(first=True),
        )
        logits = self.classify(layout.first(last))
        output = SequenceClassifierOutput(
            loss=None if labels is None else deberta_sequence_loss(self.config, logits, labels),
            logits=logits,
            hidden_states=layout.all_padded(outputs.hidden_states),
            attentions=outputs.attentions,
        )
        return self.returned(output, return_dict)


class ForTokenClassification(WithHead):
    """Classifies each token."""

    def __init__(self, config: DisentangledConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        use_cache: bool | None = None,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """`labels`: [B, L] class indices, -100 where a token is not scored."""
        layout, last, outputs = self.encode(
            input_ids,
            attention_mask,
            token_type_ids,
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


class ForQuestionAnswering(WithHead):
    """Marks the first and last token of an answer."""

    def __init__(self, config: DisentangledConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation)
        self.qa_outputs = nn.Linear(self.config.hidden_size, self.config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        pack: Pack | None = None,
        use_cache: bool | None = None,
    ) -> QuestionAnsweringModelOutput | tuple[Any, ...]:
        """`start_positions`, `end_positions`: token indices [B] or [B, 1], ignored past the sequence.

        Where padding is not computed its logits are the lowest finite number. A loss is over all cells of
        a row, so with positions a padded batch is not packed; with `cu_seqlens` it is over each sequence.
        """
        labelled = start_positions is not None and end_positions is not None
        layout, last, outputs = self.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            cu_seqlens,
            pack,
            Needs(all="the loss of a span is over all cells of a row" if labelled else None),
        )
        both = self.qa_outputs(last)
        start_logits, end_logits = layout.padded(both, torch.finfo(both.dtype).min).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(start_logits, end_logits, start_positions, end_positions, layout.sequences)
        output = QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=layout.all_padded(outputs.hidden_states),
            attentions=outputs.attentions,
        )
        return self.returned(output, return_dict)


class ForMultipleChoice(WithPooler):
    """Picks one of several texts: every input has a dimension of choices after the batch."""

    def __init__(self, config: DisentangledConfig, attn_implementation: str | None = None) -> None:
        super().__init__(config, attn_implementation, classes=1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        pack: Pack | None = None,
        use_cache: bool | None = None,
    ) -> MultipleChoiceModelOutput | tuple[Any, ...]:
        """`input_ids` and the like: [B, choices, L]; `labels`: [B], which choice is right."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        choices = given.shape[1]

        def flat(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.flatten(0, 1)

        layout, last, outputs = self.encode(
            flat(input_ids),
            flat(attention_mask),
            flat(token_type_ids),
            flat(position_ids),
            flat(inputs_embeds),
            output_attentions,
            output_hidden_states,
            None,
            pack,
            Needs(first=True),
        )
        logits = self.classify(layout.first(last)).view(-1, choices)
        output = MultipleChoiceModelOutput(
            loss=None if labels is None else cross_entropy(logits, labels),
            logits=logits,
            hidden_states=layout.all_padded(outputs.hidden_states),
            attentions=outputs.attentions,
        )
        return self.returned(output, return_dict)
