"""Every class exported to ONNX, and run at sizes it was not exported at."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

reason = "exports to ONNX: pip install 'outplace[compat]'"
onnxruntime = pytest.importorskip("onnxruntime", reason=reason)
pytest.importorskip("onnxscript", reason=reason)


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_onnxruntime_gives_the_same_outputs_at_any_size(name: str, tmp_path: Path) -> None:
    model, file = tiny.model(name), tmp_path / "model.onnx"

    def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
        found = tiny.inputs(name, batch=batch, length=length)
        return {key: found[key] for key in ("input_ids", "attention_mask")}

    last = inputs(3, 12)["input_ids"].ndim - 1
    axes = {0: torch.export.Dim("batch"), last: torch.export.Dim("length")}
    torch.onnx.export(
        model,
        kwargs=inputs(3, 12),
        f=file,
        dynamo=True,
        dynamic_shapes={"input_ids": axes, "attention_mask": axes},
        verbose=False,
    )
    runtime = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch, length in ((3, 12), (2, 5), (5, 23)):
        given = inputs(batch, length)
        with torch.no_grad():
            expected = [x for x in model(**given).to_tuple() if isinstance(x, torch.Tensor)]
        found = runtime.run(None, {key: x.numpy() for key, x in given.items()})
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(x), y, rtol=1e-4, atol=1e-5)
