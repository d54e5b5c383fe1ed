"""Under what conditions the lines that wrote in place upstream raise, or give wrong gradients.

Each historic line is put back by itself into a tiny model of ours, whose gradients of two steps are compared,
in every combination of conditions, with those of the same steps out-of-place.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import outplace

from .in_place import LINES, Line, in_place

Embedded = Literal["words", "leaf", "given"]
Linears = Literal["plain", "views", "nf4"]
EMBEDDED: dict[Embedded, str] = {
    "words": "embeddings trained",
    "leaf": "frozen embeddings whose output is made to require grad",
    "given": "frozen embeddings, `inputs_embeds` used twice",
}
LINEARS: dict[Linears, str] = {
    "plain": "linears plain",
    "views": "linears that return views",
    "nf4": "linears in 4 bits",
}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
DEBERTA = {"vocab_size": 40, "type_vocab_size": 2, "relative_attention": True, "pos_att_type": "c2p|p2c"}
ESM = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}
FIELDS: dict[str, dict[str, Any]] = {"Deberta": DEBERTA, "DebertaV2": DEBERTA, "Esm": ESM}


@dataclass(frozen=True)
class Variant:
    """How a step is made.

    Args:
        training: train or eval.
        dropout: of hidden states.
        reentrant: the kind of checkpointing of every layer, or None for none.
    """

    training: bool
    dropout: float
    reentrant: bool | None

    def __str__(self) -> str:
        if not self.training:
            return "eval"
        kinds = {None: "", False: ", checkpointing", True: ", reentrant checkpointing"}
        return f"train, dropout {self.dropout:g}{kinds[self.reentrant]}"


VARIANTS = (
    Variant(False, 0.0, None),
    *(Variant(True, *options) for options in itertools.product((0.0, 0.1), (None, False, True))),
)


class ViewLinear(nn.Linear):
    """A linear whose output is a view made in a function of its own, as those of 4-bit libraries are."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.weight)
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.flatten(0, -2) @ weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def build(family: str, line: Line, linears: Linears, dropout: float) -> Any:
    """A tiny model that goes through the line, and whose line meets what the embeddings are."""
    absolute = "position_embeddings" in line.historic
    fields = SHAPE | FIELDS[family] | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    if family == "Esm":
        # Token dropout makes a tensor of its own, to which positions are added.
        kind = "absolute" if absolute else "rotary"
        fields |= {"position_embedding_type": kind, "token_dropout": not absolute}
    else:
        # Positions are added before token types.
        fields |= {"position_biased_input": "token_type" not in line.historic}
    torch.manual_seed(0)
    model = getattr(outplace, f"{family}Model")(
        getattr(outplace, f"{family}Config")(**fields, attn_implementation="eager")
    )
    if linears == "nf4":
        return outplace.quantize(model, "nf4")
    if linears == "views":
        for module in model.encoder.modules():
            if type(module) is nn.Linear:
                module.__class__ = ViewLinear
    return model


def gradients(model: Any, variant: Variant, embedded: Embedded) -> dict[str, Tensor]:
    """Two steps' gradients by parameter's name."""
    model.train(variant.training)
    words = model.get_input_embeddings()
    if variant.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": variant.reentrant})
    if embedded != "words":
        model.embeddings.requires_grad_(False)
    if embedded == "leaf":
        model.enable_input_require_grads()
    ids = torch.tensor([[0, 5, 32, 7, 9, 2], [0, 8, 6, 32, 32, 2]])
    with torch.no_grad():
        inputs = {"inputs_embeds": words(ids).clone()} if embedded == "given" else {"input_ids": ids}
    weights = torch.linspace(-1, 1, ids.numel() * SHAPE["hidden_size"]).view(*ids.shape, -1)
    for step in range(2):
        torch.manual_seed(step)
        (model(**inputs).last_hidden_state * weights).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def verdict(line: Line, family: str, embedded: Embedded, linears: Linears, variant: Variant) -> str:
    """What becomes of a step: "fine", "wrong gradients", or "raises: " and the error."""
    expected = gradients(build(family, line, linears, variant.dropout), variant, embedded)
    with in_place([line]):
        try:
            found = gradients(build(family, line, linears, variant.dropout), variant, embedded)
        except RuntimeError as error:
            return "raises: " + str(error).partition(". ")[0].rstrip(".")
    same = expected.keys() == found.keys()
    alike = same and all(torch.allclose(found[name], expected[name], 1e-4, 1e-5) for name in expected)
    return "fine" if alike else "wrong gradients"


def tried() -> Iterator[dict[str, Any]]:
    """A row for each line, family, and kind of embeddings and linears: a verdict for each variant."""
    # A line goes to another process by its number: some are in modules, which cannot be sent.
    cases = [
        (number, *case)
        for number, line in enumerate(LINES)
        for case in itertools.product(line.families, EMBEDDED, LINEARS)
    ]
    # Tiny models leave a second thread idle.
    own = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), own, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(row, *zip(*cases, strict=True))


def row(number: int, family: str, embedded: Embedded, linears: Linears) -> dict[str, Any]:
    line = LINES[number]
    verdicts = {str(v): verdict(line, family, embedded, linears, v) for v in VARIANTS}
    return {
        "line": line.historic,
        "family": family,
        "embeddings": embedded,
        "linears": linears,
        "verdicts": verdicts,
    }
