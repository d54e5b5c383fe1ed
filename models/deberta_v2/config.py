"""Configuration of DeBERTa-V2 and V3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..deberta.config import DisentangledConfig
from ..layers import ACTIVATIONS


@dataclass(kw_only=True)
class DebertaV2Config(DisentangledConfig):
    """Configuration of DeBERTa-V2 and V3; the defaults are those of deberta-v2-xlarge's shape.

    Args:
        position_buckets: log-spaced buckets on each side of zero; below 1 every distance up to
            `max_relative_positions` has its own slot.
        clamp_relative_positions: whether distances are clamped before they are bucketed, as the
            original does and upstream does not; see `attention.disentangled.log_bucket`.
        norm_rel_ebd: "layer_norm" to normalise the relative position table, or "none".
        share_att_key: whether the position table is projected by the content's own projections.
        conv_kernel_size: width of the convolution beside the first layer; 0 for none.
        attention_head_size: must be hidden_size / num_attention_heads where given.
    """

    model_type: ClassVar[str] = "deberta-v2"

    vocab_size: int = 128100
    hidden_size: int = 1536
    num_hidden_layers: int = 24
    num_attention_heads: int = 24
    intermediate_size: int = 6144
    position_buckets: int = -1
    clamp_relative_positions: bool = False
    norm_rel_ebd: str = "none"
    share_att_key: bool = False
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"
    attention_head_size: int | None = None

    def validate(self) -> None:
        super().validate()
        self._require(
            "attention_head_size",
            self.attention_head_size in (None, self.head_dim),
            f"but hidden_size / num_attention_heads is {self.head_dim}",
        )
        terms = {term.strip() for term in self.norm_rel_ebd.lower().split("|")}
        self._require("norm_rel_ebd", terms <= {"none", "layer_norm"}, "not 'layer_norm' or 'none'")
        self._require("conv_act", self.conv_act in ACTIVATIONS, f"not one of {sorted(ACTIVATIONS)}")
        if self.conv_kernel_size > 0:
            self._require(
                "conv_kernel_size", self.conv_kernel_size % 2 == 1, "but only an odd width keeps the length"
            )
            self._require(
                "conv_groups",
                self.conv_groups > 0 and self.hidden_size % self.conv_groups == 0,
                f"which does not divide hidden_size {self.hidden_size}",
            )
        if self.relative_attention and self.position_buckets > 0:
            # The logarithm needs a bucket of its own and room between the middle and the end.
            self._require("position_buckets", self.position_buckets > 1, "but the middle needs 2 of them")
            self._require(
                "position_buckets",
                self.relative_span - 1 > self.position_buckets // 2,
                f"which leaves no distance to share below {self.relative_span} relative positions",
            )

    @property
    def normalizes_relative_positions(self) -> bool:
        return "layer_norm" in self.norm_rel_ebd.lower()

    @property
    def slot_span(self) -> int:
        """Half the rows of the relative position table."""
        return self.position_buckets if self.position_buckets > 0 else self.relative_span
