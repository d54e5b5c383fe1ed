"""Compilation and export: whole graphs, dynamic shapes, equal outputs."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.export import Dim


def mask_of(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["attention_mask"]


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_it_compiles_whole_with_labels_and_dynamic_shapes(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model = tiny.model(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for batch, length in ((3, 12), (2, 17), (4, 25), (5, 9)):
        inputs = tiny.inputs(name, batch, length)
        expected, found = model(**inputs), compiled(**inputs)
        assert all(torch.equal(a, b) for a, b in zip(found.to_tuple(), expected.to_tuple(), strict=True))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_gradients_through_the_compiler_equal_eager_ones(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = tiny.model(name), tiny.inputs(name)

    def gradients(run: Any) -> dict[str, Tensor]:
        model.zero_grad()
        first = run(**inputs)[0]
        (first if first.ndim == 0 else first.sin().mean()).backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    expected = gradients(model)
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for key, gradient in expected.items():
        assert torch.allclose(found[key], gradient, rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_it_exports_with_dynamic_batch_and_length(name: str, strict: bool) -> None:
    model = tiny.model(name)
    given = {key: x for key, x in tiny.inputs(name).items() if key in ("input_ids", "attention_mask")}
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=30)
    dims = {0: batch, given["input_ids"].ndim - 1: length}
    program = torch.export.export(model, (), given, dynamic_shapes=dict.fromkeys(given, dims), strict=strict)
    run = program.module()
    for shape in ((3, 12), (2, 17), (5, 9)):
        inputs = {key: x for key, x in tiny.inputs(name, *shape).items() if key in given}
        expected, found = model(**inputs), run(**inputs)
        assert torch.allclose(found[0], expected[0], atol=1e-6)


@pytest.mark.parametrize("path", ["auto", "sdpa"])
@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_long_sequences_compile_and_export_where_blocks_would_serve(family: str, path: str) -> None:
    torch._dynamo.reset()
    fields = {"max_position_embeddings": 512} | ({"talking_head": False} if family == "Deberta" else {})
    model = tiny.model(f"{family}Model", **fields, attn_implementation=path)
    inputs = tiny.inputs(f"{family}Model", 2, 260)
    expected = model(**inputs)[0]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(**inputs)[0], expected, atol=1e-5)
    exported = torch.export.export(model, (), inputs).module()
    assert torch.allclose(exported(**inputs)[0], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_the_default_backend_trains_and_predicts_as_eager_at_any_length(family: str) -> None:
    torch._dynamo.reset()
    name = f"{family}ForMaskedLM"
    model = tiny.model(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for batch, length in ((3, 12), (2, 17), (4, 25)):
        inputs = tiny.inputs(name, batch, length)
        expected, found = model(**inputs), compiled(**inputs)
        assert torch.allclose(found.logits, expected.logits, atol=1e-5)
        (gradient,) = torch.autograd.grad(found.loss, model.get_input_embeddings().weight)
        (wanted,) = torch.autograd.grad(expected.loss, model.get_input_embeddings().weight)
        assert torch.allclose(gradient, wanted, atol=1e-5)
