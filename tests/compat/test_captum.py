"""Attributions with Captum."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

attr = pytest.importorskip("captum.attr", reason="attributes: pip install 'outplace[compat]'")


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_integrated_gradients_through_inputs_embeds_add_up(family: str) -> None:
    name = f"{family}ForSequenceClassification"
    model, inputs = tiny.model(name).double(), tiny.inputs(name)
    lookup, mask = model.get_input_embeddings(), inputs["attention_mask"]

    def score(embeddings: Tensor, mask: Tensor) -> Tensor:
        return model(inputs_embeds=embeddings, attention_mask=mask).logits[:, 1]

    embeddings = lookup(inputs["input_ids"]).detach()
    baseline = lookup(torch.full_like(inputs["input_ids"], 3)).detach()
    attributions, delta = attr.IntegratedGradients(score).attribute(
        embeddings, baseline, additional_forward_args=(mask,), n_steps=200, return_convergence_delta=True
    )
    change = score(embeddings, mask) - score(baseline, mask)
    assert delta.abs().max() < 0.02 * change.abs().max()
    assert (attributions[mask == 0] == 0).all(), "padding has a part in a logit"
