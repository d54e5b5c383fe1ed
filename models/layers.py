"""Blocks that more than one family is built of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "linear": identity,
    "mish": F.mish,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""Names that a configuration's `hidden_act`, `pooler_hidden_act` and `conv_act` may take."""


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for arithmetic that half precision is too coarse for; float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Checkpointing:
    """How activations are recomputed in backward instead of kept.

    Args:
        attention_only: whether each layer's attention alone is recomputed, whose weights are what grows
            with the square of the length; whole layers are otherwise.
        use_reentrant, options: as `torch.utils.checkpoint.checkpoint`'s.
    """

    attention_only: bool
    use_reentrant: bool
    options: dict[str, Any]

    def run(self, module: nn.Module, *tensors: Tensor | None, **context: Any) -> Any:
        """`module(*tensors, **context)`, recomputed in backward.

        What needs gradients must be among `tensors`: reentrant checkpointing cuts the graph there, and
        does not see the rest.
        """
        needs_input = self.use_reentrant and any(p.requires_grad for p in module.parameters())
        if needs_input and not any(x is not None and x.requires_grad for x in tensors):
            # Reentrant checkpointing gives parameters no gradient unless an input needs one.
            first, *rest = tensors
            assert first is not None
            tensors = (first.detach().requires_grad_(), *rest)
        return checkpoint(
            partial(module, **context), *tensors, use_reentrant=self.use_reentrant, **self.options
        )


def run(
    checkpointing: Checkpointing | None, module: nn.Module, *tensors: Tensor | None, **context: Any
) -> Any:
    """`module(*tensors, **context)`, kept or recomputed."""
    if checkpointing is None:
        return module(*tensors, **context)
    return checkpointing.run(module, *tensors, **context)


class LayerStack(nn.ModuleList):
    """An encoder's layers, and how their activations are recomputed in training."""

    checkpointing: Checkpointing | None = None

    @property
    def of_layers(self) -> Checkpointing | None:
        """How whole layers are recomputed now, if they are."""
        return self._active(attention_only=False)

    @property
    def of_attention(self) -> Checkpointing | None:
        """How attention by itself is recomputed now, if it is."""
        return self._active(attention_only=True)

    def _active(self, attention_only: bool) -> Checkpointing | None:
        found = self.checkpointing if self.training and torch.is_grad_enabled() else None
        return found if found is not None and found.attention_only is attention_only else None


def of_layers(layers: nn.ModuleList) -> Checkpointing | None:
    """Return how whole layers are recomputed now, if they are; a list that is not ours recomputes nothing."""
    return layers.of_layers if isinstance(layers, LayerStack) else None


def of_attention(layers: nn.ModuleList) -> Checkpointing | None:
    """Return how attention by itself is recomputed now, if it is."""
    return layers.of_attention if isinstance(layers, LayerStack) else None


def with_weights(output: Tensor | tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    """Return a layer's states and attention weights; a layer may return states alone."""
    if isinstance(output, tuple):
        assert output[0] is not None
        return output[0], output[1] if len(output) > 1 else None
    return output, None


def check_length(length: int, limit: int, what: str) -> None:
    """Refuse a sequence that an absolute position table has no row for.

    Raises:
        ValueError: with both numbers.
    """
    if length > limit:
        raise ValueError(
            f"the sequence has {length} tokens, but {what} holds {limit} positions; "
            f"truncate or split the input to at most {limit} tokens"
        )
