"""Forward passes that can be captured as a CUDA graph, and one that is."""

from __future__ import annotations

import pytest
import tiny
import torch
from outplace.models.attention import fused

from outplace.graphs import capture, reading_no_values

FAMILIES = pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])


def model_of(family: str, path: str) -> torch.nn.Module:
    fields = {"talking_head": False} if family == "Deberta" else {}
    return tiny.model(f"{family}Model", attn_implementation=path, **fields).eval()


def refuse(*_: object) -> None:
    raise AssertionError("a value is read")


@FAMILIES
@pytest.mark.parametrize("path", ["eager", "sdpa"])
def test_nothing_of_a_tensor_is_read(family: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_of(family, path), tiny.inputs(f"{family}Model", batch=2)
    with torch.no_grad():
        expected = model(**inputs, pack=False).last_hidden_state
        with reading_no_values(model, inputs["input_ids"].shape[1]), monkeypatch.context() as patched:
            for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
                patched.setattr(torch.Tensor, name, refuse)
            patched.setattr(torch, "equal", refuse)
            states = model(**inputs, pack=False).last_hidden_state
        assert torch.equal(states, expected)
        # Afterwards other lengths are as before.
        shorter = inputs["input_ids"][:, :3]
        assert torch.equal(model(shorter)[0], model_of(family, path)(shorter)[0])


@FAMILIES
def test_what_cannot_be_captured_is_an_error(family: str) -> None:
    model, inputs = model_of(family, "eager"), tiny.inputs(f"{family}Model")
    with pytest.raises(ValueError, match="the model is on cpu"):
        capture(model, **inputs)
    with pytest.raises(ValueError, match="the same dropout"):
        capture(model.train(), **inputs)


@pytest.mark.cuda
@FAMILIES
@pytest.mark.parametrize("path", ["eager", "triton"])
def test_a_replay_equals_eager(family: str, path: str) -> None:
    cuda = torch.device("cuda")
    model = model_of(family, path).to(cuda)
    if path == "triton" and fused.missing(model.config.head_dim, torch.float32, cuda):
        pytest.skip("no Triton here")
    inputs = {name: x.to(cuda) for name, x in tiny.inputs(f"{family}Model", batch=2).items()}
    graph, output = capture(model, **inputs)
    inputs["input_ids"].copy_(inputs["input_ids"].flip(1))
    graph.replay()
    with torch.no_grad():
        expected = model_of(family, "eager").to(cuda)(**inputs, pack=False).last_hidden_state
    assert torch.allclose(output.last_hidden_state, expected, atol=1e-5)
