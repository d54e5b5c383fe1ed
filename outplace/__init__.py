"""DeBERTa, DeBERTa-V2/V3 and ESM-2 in PyTorch, written purely out-of-place.

Importing this package imports nothing else: each public name is fetched on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "outplace.auditor": ("AuditReport", "audit"),
    "outplace.automatic": ("load", "load_tokenizer"),
    "outplace.interop": ("from_transformers",),
    "outplace.models.deberta": (
        "DebertaConfig",
        "DebertaForMaskedLM",
        "DebertaForQuestionAnswering",
        "DebertaForSequenceClassification",
        "DebertaForTokenClassification",
        "DebertaModel",
        "DebertaPreTrainedModel",
        "DebertaTokenizer",
    ),
    "outplace.models.deberta_v2": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        "DebertaV2ForMultipleChoice",
        "DebertaV2ForQuestionAnswering",
        "DebertaV2ForSequenceClassification",
        "DebertaV2ForTokenClassification",
        "DebertaV2Model",
        "DebertaV2PreTrainedModel",
        "DebertaV2Tokenizer",
    ),
    "outplace.models.attention.plan": ("AttentionPlan",),
    "outplace.models.esm": (
        "EsmConfig",
        "EsmForMaskedLM",
        "EsmForSequenceClassification",
        "EsmForTokenClassification",
        "EsmModel",
        "EsmPreTrainedModel",
        "EsmTokenizer",
    ),
    "outplace.parallel": ("tensor_parallel_plan",),
    "outplace.quantization": ("quantize",),
    "outplace.weights": ("CheckpointError", "LoadReport"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from .auditor import AuditReport as AuditReport
    from .auditor import audit as audit
    from .automatic import load as load
    from .automatic import load_tokenizer as load_tokenizer
    from .interop import from_transformers as from_transformers
    from .models.attention.plan import AttentionPlan as AttentionPlan
    from .models.deberta import DebertaConfig as DebertaConfig
    from .models.deberta import DebertaForMaskedLM as DebertaForMaskedLM
    from .models.deberta import DebertaForQuestionAnswering as DebertaForQuestionAnswering
    from .models.deberta import DebertaForSequenceClassification as DebertaForSequenceClassification
    from .models.deberta import DebertaForTokenClassification as DebertaForTokenClassification
    from .models.deberta import DebertaModel as DebertaModel
    from .models.deberta import DebertaPreTrainedModel as DebertaPreTrainedModel
    from .models.deberta import DebertaTokenizer as DebertaTokenizer
    from .models.deberta_v2 import DebertaV2Config as DebertaV2Config
    from .models.deberta_v2 import DebertaV2ForMaskedLM as DebertaV2ForMaskedLM
    from .models.deberta_v2 import DebertaV2ForMultipleChoice as DebertaV2ForMultipleChoice
    from .models.deberta_v2 import DebertaV2ForQuestionAnswering as DebertaV2ForQuestionAnswering
    from .models.deberta_v2 import DebertaV2ForSequenceClassification as DebertaV2ForSequenceClassification
    from .models.deberta_v2 import DebertaV2ForTokenClassification as DebertaV2ForTokenClassification
    from .models.deberta_v2 import DebertaV2Model as DebertaV2Model
    from .models.deberta_v2 import DebertaV2PreTrainedModel as DebertaV2PreTrainedModel
    from .models.deberta_v2 import DebertaV2Tokenizer as DebertaV2Tokenizer
    from .models.esm import EsmConfig as EsmConfig
    from .models.esm import EsmForMaskedLM as EsmForMaskedLM
    from .models.esm import EsmForSequenceClassification as EsmForSequenceClassification
    from .models.esm import EsmForTokenClassification as EsmForTokenClassification
    from .models.esm import EsmModel as EsmModel
    from .models.esm import EsmPreTrainedModel as EsmPreTrainedModel
    from .models.esm import EsmTokenizer as EsmTokenizer
    from .parallel import tensor_parallel_plan as tensor_parallel_plan
    from .quantization import quantize as quantize
    from .weights import CheckpointError as CheckpointError
    from .weights import LoadReport as LoadReport

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'outplace' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
