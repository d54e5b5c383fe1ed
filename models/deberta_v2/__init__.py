"""DeBERTa-V2 and DeBERTa-V3, which is V2's architecture."""

from .config import DebertaV2Config
from .modeling import (
    DebertaV2ForMaskedLM,
    DebertaV2ForMultipleChoice,
    DebertaV2ForQuestionAnswering,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    DebertaV2Model,
    DebertaV2PreTrainedModel,
)
from .tokenizer import DebertaV2Tokenizer

__all__ = [
    "DebertaV2Config",
    "DebertaV2ForMaskedLM",
    "DebertaV2ForMultipleChoice",
    "DebertaV2ForQuestionAnswering",
    "DebertaV2ForSequenceClassification",
    "DebertaV2ForTokenClassification",
    "DebertaV2Model",
    "DebertaV2PreTrainedModel",
    "DebertaV2Tokenizer",
]
