"""A forward pass of DeBERTa as a CUDA graph: of short inputs, the time goes into starting kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .models.base import PretrainedModel
from .models.deberta.blocks import DisentangledModel, Encoder
from .models.outputs import ModelOutput


@contextmanager
def reading_no_values(model: PretrainedModel, length: int) -> Iterator[None]:
    """While this lasts, inference over `length` tokens with `pack=False` waits for no number of a tensor.

    The slot table of the length is made once, before; projected position tables are not kept, since whether
    they still hold is read from their values.
    """
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    kept = [encoder.keep_positions for encoder in encoders]
    if isinstance(model, DisentangledModel):
        model.keep_positions(False)
    tables = [encoder.slots(length, model.device) for encoder in encoders]
    for encoder, table in zip(encoders, tables, strict=True):
        encoder.__dict__["slots"] = lambda length, device, table=table: table
    try:
        yield
    finally:
        for encoder, keep in zip(encoders, kept, strict=True):
            del encoder.__dict__["slots"]
            encoder.keep_positions = keep


@torch.no_grad()
def capture(model: PretrainedModel, **inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Inference over inputs of one shape, as a CUDA graph.

    `graph.replay()` computes the output anew from what is in `inputs` then, and from the weights; new inputs
    are copied into these tensors by the caller. What is returned is written over by each replay.

    Args:
        inputs: of the model's forward pass, on its device; padding is computed too.

    Returns:
        The graph and the model's output, a `ModelOutput`.

    Raises:
        ValueError: the model trains, is not on a CUDA device, or has none of DeBERTa's attention.
    """
    if model.training:
        raise ValueError("a graph repeats the same dropout; call model.eval() first")
    if model.device.type != "cuda":
        raise ValueError(f"CUDA graphs are of CUDA devices, and the model is on {model.device}")
    if not isinstance(model, DisentangledModel):
        raise ValueError(f"{type(model).__name__} is no DeBERTa")
    first = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if first is None:
        raise ValueError("give input_ids or inputs_embeds")
    with reading_no_values(model, first.shape[1]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels are compiled and loaded, which a capture may not do
                model(**inputs, pack=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output: ModelOutput = model(**inputs, pack=False)
    return graph, output
