"""Put quantised linears in the place of a model's own, from outside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeVar

import torch
from torch import nn

from .models.base import PretrainedModel

M = TypeVar("M", bound=PretrainedModel)
Kind = Literal["nf4", "fp4", "int8"]

TALKING_HEADS = (".head_logits_proj", ".head_weights_proj")
"""[H, H], and applied to [B, L, L, H]: too small for blocks of 64, and int8 takes no such input."""


def quantize(
    model: M,
    kind: Kind = "nf4",
    *,
    compute_dtype: torch.dtype | None = None,
    double_quantization: bool = True,
    skip: Collection[str] | None = None,
) -> M:
    """Replace the encoder's linears by `bitsandbytes`' quantised ones; needs the extra `quant`.

    The model itself is changed, and returned. Embeddings, norms, talking heads and everything outside
    the encoder (heads, poolers) keep their precision. It can then be given to
    `peft.prepare_model_for_kbit_training`.

    Args:
        kind: "nf4" or "fp4" (QLoRA, https://arxiv.org/abs/2305.14314), or "int8" (LLM.int8()).
        compute_dtype: of the products of 4-bit weights; the model's dtype unless given.
        double_quantization: whether the scales of 4-bit weights are quantised too.
        skip: names of modules to leave alone, or parts of them that follow a dot.

    Raises:
        ImportError: `bitsandbytes` is not installed; the message says how to install it.
        ValueError: another `kind`.
    """
    if kind not in ("nf4", "fp4", "int8"):
        raise ValueError(f"kind is {kind!r}; it must be 'nf4', 'fp4' or 'int8'")
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise ImportError("quantize needs bitsandbytes: pip install 'outplace[quant]'") from error
    left = (*(skip or ()), *TALKING_HEADS)
    encoder = model.base_model.get_submodule("encoder")
    for path, module in list(encoder.named_modules()):
        if type(module) is not nn.Linear or any(part in f".{path}" for part in left):
            continue
        shape = (module.in_features, module.out_features, module.bias is not None)
        if kind == "int8":
            new = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False)
            new.weight = bnb.nn.Int8Params(
                module.weight.detach(), requires_grad=False, has_fp16_weights=False
            )
        else:
            new = bnb.nn.Linear4bit(
                *shape,
                compute_dtype=compute_dtype or model.dtype,
                compress_statistics=double_quantization,
                quant_type=kind,
            )
            new.weight = bnb.nn.Params4bit(
                module.weight.detach(),
                requires_grad=False,
                compress_statistics=double_quantization,
                quant_type=kind,
            )
        new.bias = module.bias
        parent, _, name = path.rpartition(".")
        setattr(encoder.get_submodule(parent), name, new.to(module.weight.device).train(module.training))
    # What PEFT looks for before it prepares a model for training.
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind != "int8", kind == "int8"  # type: ignore[assignment]
    return model
