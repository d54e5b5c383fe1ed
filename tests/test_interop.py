"""`from_transformers`: our model around upstream's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import nn

import outplace

transformers = pytest.importorskip("transformers", reason="compares with upstream")


def upstream(name: str, **fields: Any) -> Any:
    """Upstream's tiny model in eval mode."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{tiny.family(name)}Config")(**tiny.CONFIGS[tiny.family(name)] | fields)
    return getattr(transformers, name)(config).eval()


def assert_same_outputs(ours: Any, theirs: Any, name: str) -> None:
    inputs = tiny.inputs(name)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        found, expected = ours(**inputs).to_tuple(), theirs(**inputs).to_tuple()
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        if x.shape[: mask.ndim] == mask.shape:  # what stands at padding is nobody's
            x, y = x[mask], y[mask]
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_every_tensor_is_upstreams_own(name: str) -> None:
    theirs = upstream(name)
    ours = outplace.from_transformers(theirs)
    assert type(ours) is getattr(outplace, name)
    expected = theirs.state_dict()
    for key, tensor in ours.state_dict().items():
        assert tensor.data_ptr() == expected[key].data_ptr(), key
    assert {id(p) for p in ours.parameters()} == {id(p) for p in theirs.parameters()}


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_outputs_are_upstreams(name: str) -> None:
    theirs = upstream(name)
    assert_same_outputs(outplace.from_transformers(theirs), theirs, name)


@pytest.mark.parametrize("training", [False, True])
def test_the_training_flag_is_kept(training: bool) -> None:
    ours = outplace.from_transformers(upstream("DebertaV2ForMaskedLM").train(training))
    assert {module.training for module in ours.modules()} == {training}


def test_an_optimizer_step_on_ours_trains_upstreams() -> None:
    name = "DebertaForSequenceClassification"
    theirs = upstream(name)
    before = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    ours = outplace.from_transformers(theirs)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(**tiny.inputs(name)).loss.backward()
    optimizer.step()
    assert not torch.equal(theirs.classifier.weight, before["classifier.weight"])
    assert_same_outputs(ours, theirs, name)


def test_tied_weights_stay_tied() -> None:
    ours = outplace.from_transformers(upstream("EsmForMaskedLM"))
    assert ours.lm_head.decoder.weight is ours.get_input_embeddings().weight


@pytest.mark.parametrize("pooled", [False, True])
def test_an_esm_model_has_a_pooler_where_upstreams_has_one(pooled: bool) -> None:
    config = transformers.EsmConfig(**tiny.CONFIGS["Esm"])
    ours = outplace.from_transformers(transformers.EsmModel(config, add_pooling_layer=pooled))
    assert (ours.pooler is not None) == pooled


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("DebertaForSequenceClassification", ["in_proj", "dense"]),
        ("DebertaV2ForTokenClassification", ["query_proj", "value_proj", "dense"]),
        ("EsmForMaskedLM", ["query", "value", "word_embeddings"]),
    ],
)
def test_the_base_of_a_peft_model_brings_its_adapters(name: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft", reason="wraps upstream's model in adapters")
    lora = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=targets, init_lora_weights=False)
    wrapped = peft.get_peft_model(upstream(name), lora).eval()
    ours = outplace.from_transformers(wrapped)
    theirs = wrapped.get_base_model()
    assert any("lora_A" in key for key, _ in ours.named_parameters())
    expected = theirs.state_dict()
    assert {key: x.data_ptr() for key, x in ours.state_dict().items()} == {
        key: expected[key].data_ptr() for key in ours.state_dict()
    }
    assert_same_outputs(ours, wrapped, name)

    ours.train()(**tiny.inputs(name)).loss.backward()
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    adapters = [key for key in gradients if "lora_" in key]
    assert adapters
    # The last layer's pooling and the like may be out of a head's reach; encoders are not.
    assert all(gradients[key] is not None for key in adapters if "encoder" in key)
    assert all(gradient is None for key, gradient in gradients.items() if key not in adapters)


def test_a_class_without_a_counterpart_is_refused() -> None:
    bert = transformers.BertModel(transformers.BertConfig(**tiny.SHAPE, vocab_size=9))
    with pytest.raises(TypeError, match="BertModel has no counterpart"):
        outplace.from_transformers(bert)
    with pytest.raises(TypeError, match="Linear has no counterpart"):
        outplace.from_transformers(nn.Linear(2, 2))


def test_a_missing_layer_is_refused() -> None:
    theirs = upstream("EsmForMaskedLM")
    theirs.lm_head.dense = None
    with pytest.raises(ValueError, match=r"no module lm_head\.dense"):
        outplace.from_transformers(theirs)
