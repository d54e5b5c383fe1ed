"""Losses of fixed shape: no branch on a tensor's values, so they trace, compile, export and vmap.

Each is computed in at least float32. Where every label is ignored the loss is 0 and can be
backpropagated; upstream gives NaN, or a constant without a graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import PretrainedConfig
from .layers import at_least_float32
from .packing import Sequences

IGNORE = -100
"""The label that counts for nothing, as in `torch.nn.CrossEntropyLoss`."""


def cross_entropy(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Mean cross entropy over the labels that are not `ignore`.

    Args:
        logits: [..., classes].
        labels: class indices of any integer or float dtype, [...].
    """
    logits = logits.reshape(-1, logits.shape[-1]).to(at_least_float32(logits.dtype))
    labels = labels.reshape(-1).long()
    total = F.cross_entropy(logits, labels, ignore_index=ignore, reduction="sum")
    return total / (labels != ignore).sum().clamp(min=1)


def mean_squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error; integer labels are cast. logits [B, n], labels [B, n] or [B] where n is 1."""
    logits = logits.to(at_least_float32(logits.dtype))
    return F.mse_loss(logits, _as_targets(logits, labels))


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross entropy of each class by itself. logits, labels: [B, classes]."""
    logits = logits.to(at_least_float32(logits.dtype))
    return F.binary_cross_entropy_with_logits(logits, _as_targets(logits, labels))


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy against one distribution a row, mean over rows. logits, labels: [B, classes]."""
    log_probabilities = F.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)
    return -(log_probabilities * _as_targets(logits, labels)).sum(-1).mean()


def _as_targets(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.numel() != logits.numel():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: "
            "this loss wants one number for each logit"
        )
    return labels.reshape(logits.shape).to(at_least_float32(logits.dtype))


def by_problem_type(config: PretrainedConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that `config.problem_type` names; logits [B, num_labels]."""
    if config.problem_type == "regression":
        return mean_squared_error(logits, labels)
    if config.problem_type == "multi_label_classification":
        return binary_cross_entropy(logits, labels)
    _require_one_class_each(logits, labels)
    return cross_entropy(logits, labels)


def deberta_sequence_loss(config: PretrainedConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of DeBERTa's sequence classifiers, chosen as upstream chooses it.

    `problem_type` decides where it is set. Otherwise one label means regression; labels [B] or [B, 1]
    are class indices, of which negative ones are ignored; labels [B, num_labels], of any dtype, are
    one distribution a row (soft labels).
    """
    if config.problem_type is not None:
        return by_problem_type(config, logits, labels)
    if config.num_labels == 1:
        return mean_squared_error(logits, labels)
    if labels.ndim == 1 or labels.shape[-1] == 1:
        _require_one_class_each(logits, labels)
        return cross_entropy(logits, torch.where(labels < 0, IGNORE, labels))
    return soft_cross_entropy(logits, labels)


def esm_sequence_loss(config: PretrainedConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of ESM's sequence classifier, chosen as upstream chooses it.

    `problem_type` decides where it is set. Otherwise one label means regression; integer labels [B]
    are class indices; float labels [B, num_labels] are one yes or no a class. Upstream stores its
    first choice in the config; here each call decides by itself.
    """
    if config.problem_type is not None:
        return by_problem_type(config, logits, labels)
    if config.num_labels == 1:
        return mean_squared_error(logits, labels)
    if labels.is_floating_point():
        return binary_cross_entropy(logits, labels)
    _require_one_class_each(logits, labels)
    return cross_entropy(logits, labels)


def _require_one_class_each(logits: Tensor, labels: Tensor) -> None:
    if labels.numel() != logits.shape[0]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not give one class index to each of the "
            f"{logits.shape[0]} rows; for several classes a row set problem_type='multi_label_classification'"
        )


def span_loss(
    start_logits: Tensor, end_logits: Tensor, start: Tensor, end: Tensor, sequences: Sequences | None = None
) -> Tensor:
    """Mean of the cross entropies of a span's first and last token.

    A position past the sequence is ignored, a negative one counts as 0: upstream's clamp.

    Args:
        start_logits, end_logits: [B, L], or of `sequences` end to end [1, total].
        start, end: token indices [B] or [B, 1], in their sequence.
    """
    losses: list[Tensor] = []
    for logits, position in ((start_logits, start), (end_logits, end)):
        length = logits.shape[-1]
        position = position.reshape(-1).clamp(0, length)
        if sequences is not None:
            begins, ends = sequences.cu_seqlens[:-1], sequences.cu_seqlens[1:]
            own = sequences.indices() == torch.arange(begins.shape[0], device=logits.device)[:, None]
            logits = logits.masked_fill(~own, torch.finfo(logits.dtype).min)  # [B, total]
            position = torch.where(begins + position < ends, begins + position, length)
        losses = [*losses, cross_entropy(logits, position, ignore=length)]
    return (losses[0] + losses[1]) / 2
