"""Which attention a forward pass takes, decided in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from . import runs_plainly, transform_is_active

if TYPE_CHECKING:
    from ..config import PretrainedConfig

Path = Literal["eager", "sdpa", "blockwise"]

BLOCKWISE_LENGTH = 256
"""From how many tokens on blocks are faster than a matrix of all pairs, on a CPU."""


@dataclass(frozen=True)
class AttentionPlan:
    """The attention that a forward pass takes, and why.

    Args:
        path: "eager", "sdpa" or "blockwise".
        reason: a phrase for people.
    """

    path: Path
    reason: str


def choose(
    config: PretrainedConfig, batch: int, length: int, device: torch.device, output_attentions: bool
) -> AttentionPlan:
    """The attention of a forward pass over `batch` sequences of `length` tokens.

    Raises:
        ValueError: `config.attn_implementation` names a path that cannot do it; the message says why.
    """
    asked = config.attn_implementation
    if asked == "auto":
        return _best(config, batch, length, device, output_attentions)
    obstacle = None
    if asked != "eager" and output_attentions:
        obstacle = (
            f"output_attentions needs attn_implementation 'eager' or 'auto': {asked!r} forms no weights"
        )
    elif asked == "blockwise" and not runs_plainly(device):
        obstacle = (
            "attn_implementation 'blockwise' cannot be traced, compiled, exported or transformed; "
            "use 'auto', 'eager' or 'sdpa'"
        )
    if obstacle is not None:
        raise ValueError(obstacle)
    assert asked != "triton"  # refused by every configuration
    return AttentionPlan(asked, f"attn_implementation is {asked!r}")


def _best(
    config: PretrainedConfig, batch: int, length: int, device: torch.device, output_attentions: bool
) -> AttentionPlan:
    if output_attentions:
        return AttentionPlan("eager", "attention weights are asked for")
    refused = config.refused_attention()
    if "blockwise" in refused and "sdpa" in refused:
        return AttentionPlan("eager", refused["blockwise"])
    if "blockwise" in refused:
        if transform_is_active():
            return AttentionPlan("eager", "fused attention has no forward mode and no torch.func transforms")
        return AttentionPlan("sdpa", "torch fuses it")
    if not runs_plainly(device):
        return AttentionPlan("eager", "it is traced, compiled, exported or transformed")
    if device.type != "cpu":
        return AttentionPlan("eager", f"blocks are measured on CPUs only, not on {device.type}")
    if length < BLOCKWISE_LENGTH:
        return AttentionPlan("eager", f"{length} tokens are fewer than {BLOCKWISE_LENGTH}")
    return AttentionPlan("blockwise", f"{length} tokens are {BLOCKWISE_LENGTH} or more")
