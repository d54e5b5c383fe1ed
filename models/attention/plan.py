"""Which attention a forward pass takes, decided in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from . import fused, runs_plainly, transform_is_active

if TYPE_CHECKING:
    from ..config import PretrainedConfig

Path = Literal["eager", "sdpa", "blockwise", "triton"]

BLOCKWISE_LENGTH = 256
"""From how many tokens on blocks are faster than a matrix of all pairs, on a CPU."""


@dataclass(frozen=True)
class AttentionPlan:
    """The attention that a forward pass takes, and why.

    Args:
        path: "eager", "sdpa", "blockwise" or "triton".
        reason: a phrase for people.
    """

    path: Path
    reason: str


def choose(
    config: PretrainedConfig,
    batch: int,
    length: int,
    device: torch.device,
    output_attentions: bool,
    dtype: torch.dtype = torch.float32,
    pairs: bool = False,
) -> AttentionPlan:
    """The attention of a forward pass over `batch` sequences of `length` tokens.

    Args:
        dtype: of the model.
        pairs: whether the mask is of pairs, [B, L, L].

    Raises:
        ValueError: `config.attn_implementation` names a path that cannot do it; the message says why.
    """
    asked = config.attn_implementation
    if asked == "auto":
        return _best(config, length, device, output_attentions, dtype, pairs)
    obstacle = None
    if asked != "eager" and output_attentions:
        obstacle = (
            f"output_attentions needs attn_implementation 'eager' or 'auto': {asked!r} forms no weights"
        )
    elif asked in ("blockwise", "triton") and not runs_plainly(device):
        obstacle = (
            f"attn_implementation {asked!r} cannot be traced, compiled, exported or transformed; "
            "use 'auto', 'eager' or 'sdpa'"
        )
    elif asked == "triton":
        why = _no_triton(config, device, dtype, pairs)
        obstacle = why and f"attn_implementation 'triton' cannot be taken: {why}"
    if obstacle is not None:
        raise ValueError(obstacle)
    return AttentionPlan(asked, f"attn_implementation is {asked!r}")


def _no_triton(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, pairs: bool) -> str | None:
    """Why the kernels cannot serve; None where they can."""
    if pairs:
        return "its masks are [B, L], and this one is [B, L, L]"
    return fused.missing(config.head_dim, dtype, device)


def _best(
    config: PretrainedConfig,
    length: int,
    device: torch.device,
    output_attentions: bool,
    dtype: torch.dtype,
    pairs: bool,
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
    if device.type == "cuda":
        why = _no_triton(config, device, dtype, pairs)
        if why is None:
            mask = "no mask or one [B, L]"
            return AttentionPlan("triton", f"Triton is there, heads are {config.head_dim} wide, {mask}")
        return AttentionPlan("eager", f"no Triton kernels: {why}")
    if device.type != "cpu":
        return AttentionPlan("eager", f"blocks are measured on CPUs only, not on {device.type}")
    if length < BLOCKWISE_LENGTH:
        return AttentionPlan("eager", f"{length} tokens are fewer than {BLOCKWISE_LENGTH}")
    return AttentionPlan("blockwise", f"{length} tokens are {BLOCKWISE_LENGTH} or more")
