"""ESM-2, and ESM-1b and ESM-1v by the same classes."""

from .config import EsmConfig
from .modeling import (
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmForTokenClassification,
    EsmModel,
    EsmPreTrainedModel,
)
from .tokenizer import EsmTokenizer

__all__ = [
    "EsmConfig",
    "EsmForMaskedLM",
    "EsmForSequenceClassification",
    "EsmForTokenClassification",
    "EsmModel",
    "EsmPreTrainedModel",
    "EsmTokenizer",
]
