"""Spread the layers of a model over several devices, from outside: the model itself is unchanged."""

from __future__ import annotations

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from .models.base import PretrainedModel
from .models.layers import LayerStack

COLUMNS = {
    "deberta-v2": ("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"),
    "esm": ("query", "key", "value"),
}
"""Projections of attention, for each `config.model_type`; their outputs are split, by heads."""


def tensor_parallel_plan(model: PretrainedModel) -> dict[str, ParallelStyle]:
    """What `torch.distributed.tensor.parallel.parallelize_module` is to do with each linear of the layers.

    Each rank keeps some of the heads and some of the feed-forward's inner features; the sums over
    ranks are two all-reduces a layer. Embeddings, norms and the head are whole on every rank, so the
    ranks must draw the same dropout: give them one seed. Attention weights are returned for a rank's
    own heads only, and `predict_contacts`, which reads those of all heads, does not work on shards.

    Args:
        model: a DeBERTa-V2, V3 or ESM model, whose number of heads the number of ranks divides.

    Returns:
        Style by module name, of the whole model.

    Raises:
        ValueError: a DeBERTa model, whose attention has parameters outside its linears.
    """
    columns = COLUMNS.get(model.config.model_type)
    if columns is None:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan: the attention of DeBERTa adds q_bias and "
            "v_bias, of all heads, outside any linear layer, and talking heads mix each head with all others"
        )
    split = (*(f".self.{name}" for name in columns), ".intermediate.dense")
    plan: dict[str, ParallelStyle] = {}
    for stack, layers in model.named_modules():
        if not isinstance(layers, LayerStack):
            continue
        for name, _ in layers.named_modules(prefix=stack):
            if name.endswith(split):
                plan[name] = ColwiseParallel()
            elif name.endswith(".output.dense"):
                plan[name] = RowwiseParallel()
    return plan
