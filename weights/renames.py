"""Keys of older and foreign checkpoints, and what they are called here.

The names here are upstream's current ones, so a current checkpoint needs no row. A row applies only
to a key that the model does not have itself; the first that matches wins. `name` None drops the key.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Rename(NamedTuple):
    """`pattern` is a regular expression searched for in the key, `name` what replaces the match."""

    pattern: str
    name: str | None


COMMON = (
    # The names of TensorFlow's LayerNorm; upstream 5.24 writes them again for ESM.
    Rename(r"\.gamma$", ".weight"),
    Rename(r"\.beta$", ".bias"),
    # A buffer of older versions: 0, 1, 2, ….
    Rename(r"(^|\.)position_ids$", None),
)

DEBERTA = (
    *COMMON,
    # Models without position-biased input use absolute positions in the enhanced mask decoder alone.
    Rename(r"(^|\.)embeddings\.position_embeddings\.weight$", None),
    # The original's masked-language head, in a model that has upstream's, and the reverse.
    Rename(r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
    Rename(r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
    Rename(r"^cls\.predictions\.transform\.(dense|LayerNorm)\.", r"lm_predictions.lm_head.\1."),
    Rename(r"^cls\.predictions\.bias$", "lm_predictions.lm_head.bias"),
)

DEBERTA_V2 = (
    *DEBERTA,
    # The head of V3's pre-training task, which no class here has.
    Rename(r"^mask_predictions\.", None),
)

ESM = (
    *COMMON,
    Rename(r"(^|\.)embeddings\.position_embeddings\.weight$", None),
    # Rotary frequencies once stood in every layer; upstream 5.24 saves them under a literal "*".
    Rename(
        r"(^|\.)encoder\.layer\.(\d+|\*)\.attention\.self\.rotary_embeddings\.inv_freq$",
        r"\1rotary_embeddings.inv_freq",
    ),
)


def find_target(key: str, names: Collection[str], prefix: str, renames: tuple[Rename, ...]) -> str | None:
    """The name among `names` that a checkpoint's key fills, or None.

    A base model's checkpoint fills a model with a head, and the reverse: `prefix` ("deberta.") is
    added or taken away where that finds a name.
    """
    for candidate in (key, *_renamed(key, renames)):
        for name in (candidate, prefix + candidate, candidate.removeprefix(prefix)):
            if name in names:
                return name
    return None


def is_dropped(key: str, renames: tuple[Rename, ...]) -> bool:
    """Whether the table says that a key fills nothing."""
    return any(row.name is None and re.search(row.pattern, key) for row in renames)


def _renamed(key: str, renames: tuple[Rename, ...]) -> list[str]:
    """`key` under each row that matches it."""
    return [
        re.sub(row.pattern, row.name, key)
        for row in renames
        if row.name is not None and re.search(row.pattern, key)
    ]
