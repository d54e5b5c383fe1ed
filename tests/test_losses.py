"""Losses: the right values, fixed shapes, and nothing written anywhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from outplace.models import losses
from torch import Tensor

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3], [-3.0, 1.0, 0.0]])


def classifier(family: str, **fields: Any) -> Any:
    return tiny.model(f"{family}ForSequenceClassification", **fields)


@given(st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=3, max_size=3))
def test_cross_entropy_is_the_mean_over_what_is_not_ignored(labels: list[int]) -> None:
    kept = [-F.log_softmax(LOGITS[i], -1)[label] for i, label in enumerate(labels) if label >= 0]
    expected = sum(kept) / len(kept) if kept else torch.tensor(0.0)
    assert torch.allclose(losses.cross_entropy(LOGITS, torch.tensor(labels)), torch.as_tensor(expected))


@pytest.mark.parametrize("name", [name for name in tiny.CLASSES if not name.endswith("Model")])
def test_a_batch_without_any_label_gives_zero_that_can_be_backpropagated(name: str) -> None:
    model, inputs = tiny.model(name), tiny.inputs(name)
    length = inputs["input_ids"].shape[-1]
    ignored = {
        key: length if key.endswith("positions") else -100
        for key in inputs
        if key.endswith(("labels", "positions"))
    }
    inputs |= {key: torch.full_like(inputs[key], value) for key, value in ignored.items()}
    output = model(**inputs)
    assert output.loss.item() == 0
    assert output.loss.shape == ()
    output.loss.backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


LABELS = {
    "indices": torch.tensor([0, 2, 1]),
    "some ignored": torch.tensor([0, -100, 1]),
    "soft": torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
    "multi-hot": torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]]),
}


@pytest.mark.parametrize(
    ("family", "problem_type", "labels"),
    [
        ("DebertaV2", None, "indices"),
        ("DebertaV2", None, "some ignored"),
        ("DebertaV2", None, "soft"),
        ("DebertaV2", None, "multi-hot"),
        ("DebertaV2", "single_label_classification", "indices"),
        ("DebertaV2", "multi_label_classification", "soft"),
        ("DebertaV2", "regression", "soft"),
        ("Esm", None, "indices"),
        ("Esm", None, "soft"),
        ("Esm", "single_label_classification", "some ignored"),
        ("Esm", "multi_label_classification", "soft"),
        ("Esm", "regression", "soft"),
    ],
)
def test_sequence_losses_equal_upstreams(family: str, problem_type: str | None, labels: str) -> None:
    fields = {"num_labels": 3, "problem_type": problem_type}
    ours = classifier(family, **fields)
    config = getattr(transformers, f"{family}Config")(**tiny.CONFIGS[family], **fields)
    theirs = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    theirs.load_state_dict(ours.state_dict())
    inputs = {"input_ids": tiny.ids(), "labels": LABELS[labels]}
    assert torch.allclose(ours(**inputs).loss, theirs(**inputs).loss, rtol=1e-6)


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
@pytest.mark.parametrize(
    "labels", [torch.tensor([1, 2, 3]), torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)]
)
def test_one_label_is_regression_and_integers_are_cast(family: str, labels: Tensor) -> None:
    output = classifier(family, num_labels=1)(tiny.ids(), labels=labels)
    assert output.logits.shape == (3, 1)
    assert torch.allclose(output.loss, ((output.logits - labels.view(3, 1).float()) ** 2).mean())


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_class_indices_may_stand_in_a_column(family: str) -> None:
    model = classifier(family, num_labels=3)
    flat, column = (model(tiny.ids(), labels=LABELS["indices"].view(shape)).loss for shape in ((3,), (3, 1)))
    assert torch.equal(flat, column)


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_multi_hot_integers_are_cast_where_the_problem_type_says_so(family: str) -> None:
    model = classifier(family, num_labels=3, problem_type="multi_label_classification")
    output = model(tiny.ids(), labels=LABELS["multi-hot"])
    assert torch.allclose(
        output.loss, F.binary_cross_entropy_with_logits(output.logits, LABELS["multi-hot"].float())
    )


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_labels_never_change_the_logits_or_the_config(family: str) -> None:
    for fields, kinds in (({"num_labels": 3}, ("indices", "soft")), ({"num_labels": 1}, ("indices",))):
        model = classifier(family, **fields)
        before = copy.deepcopy(vars(model.config))
        plain = model(tiny.ids()).logits
        for kind in kinds:
            assert torch.equal(model(tiny.ids(), labels=LABELS[kind]).logits, plain)
        assert vars(model.config) == before


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_labels_of_the_wrong_shape_are_an_error_with_both_shapes(family: str) -> None:
    model = classifier(family, num_labels=3, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 3\)"):
        model(tiny.ids(), labels=LABELS["indices"])
    with pytest.raises(ValueError, match=r"\(3, 3\).*one class index"):
        classifier("Esm", num_labels=3)(tiny.ids(), labels=LABELS["multi-hot"])


@settings(max_examples=30)
@given(
    st.lists(st.integers(-5, 30), min_size=3, max_size=3),
    st.lists(st.integers(-5, 30), min_size=3, max_size=3),
)
def test_span_loss_equals_upstreams_for_any_position(start: list[int], end: list[int]) -> None:
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    found = losses.span_loss(logits[0], logits[1], torch.tensor(start), torch.tensor(end))
    both = []
    for scores, positions in zip(logits, (start, end), strict=True):
        kept = [(i, max(p, 0)) for i, p in enumerate(positions) if p < 12]
        log = F.log_softmax(scores, -1)
        both.append(-sum(log[i, p] for i, p in kept) / max(len(kept), 1))
    assert torch.allclose(found, torch.as_tensor((both[0] + both[1]) / 2), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [name for name in tiny.CLASSES if not name.endswith("Model")])
def test_losses_are_computed_in_at_least_float32(name: str, dtype: torch.dtype) -> None:
    output = tiny.model(name).to(dtype)(**tiny.inputs(name))
    assert output.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(output.loss)
