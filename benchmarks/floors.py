"""What a cell cannot go below: the products it must form and the tensors it must hold."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from .cells import Cell
from .implementations import RANK, TARGETS
from .shapes import MODELS


@dataclass(frozen=True)
class Floor:
    """Lower bounds of a cell.

    Args:
        multiply_adds: of the matrix products that the mathematics has; elementwise work counts nothing.
        bytes: parameters, their gradients and their optimiser's state, and the larger of the gradients and
            of the activations, which never exist in full together.
    """

    multiply_adds: int
    bytes: int


def floor(cell: Cell, parameters: int) -> Floor:
    """Lower bounds of a cell.

    Of activations a layer keeps what a backward needs and cannot have from elsewhere without a product: its
    input, queries, keys, values, the context, the input of the feed-forward network and its inner states
    before the activation. With checkpointing a layer keeps its input, and one layer the rest. A forward pass
    alone needs a layer's input, its keys and its values. Scores need not exist.

    Args:
        parameters: how many the model has.
    """
    family, fields = MODELS[cell.model]
    width, inner, layers = (
        fields[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    tokens, size = cell.batch * cell.length, torch.finfo(getattr(torch, cell.dtype)).bits // 8
    products = tokens * (4 * width * width + 2 * width * inner + 2 * cell.length * width)
    if family != "Esm":
        # One row for each distance, or bucket, in use; projected twice and met by every query and key.
        rows = min(2 * cell.length - 1, 2 * fields.get("position_buckets", 512))
        products += 2 * rows * width * width + 2 * tokens * rows * width
    forward = layers * products
    whole = tokens * (6 * width + inner) * size
    row = tokens * width * size
    adapters = 2 * RANK * width * len(TARGETS[family]) * layers * (2 if family == "Deberta" else 1)
    trained = adapters if cell.mode in ("lora", "qlora") else parameters
    # Frozen weights need no gradient: one product in backward, not two.
    passes = {"infer": 1, "lora": 2, "qlora": 3, "train-checkpoint": 4}.get(cell.mode, 3)
    if cell.mode == "infer":
        return Floor(forward, parameters * size + 3 * row)
    checkpointed = cell.mode in ("train-checkpoint", "qlora")
    kept = layers * row + whole - row if checkpointed else layers * whole
    linears = layers * (4 * width * width + 2 * width * inner) if cell.mode == "qlora" else 0
    # Half a byte a weight and its share of the scales.
    weights = (parameters - linears) * size + linears // 2 + linears // 64
    return Floor(passes * forward, weights + 2 * trained * size + max(trained * size, kept))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Multiply-adds a second of a large matrix product here, the best of some."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        product = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
        del product
    return size**3 / best
