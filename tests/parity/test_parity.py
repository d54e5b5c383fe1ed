"""Same weights, same inputs, upstream beside us: how far apart outputs and gradients are."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from .cases import LENGTHS, PADDINGS, Case, cases
from .compare import gradients, gradients_apart, outputs_apart, relative

CASES = cases()
BASE = [case for case in CASES if not case.head]
OUTPUTS, GRADIENTS, DOUBLE = 2e-6, 1e-5, 1e-12
INPUTS = [(padding, length) for padding in PADDINGS for length in LENGTHS]


def measure(case: Case) -> tuple[float, float]:
    """Largest relative difference of outputs and of gradients, in float32, over all inputs."""
    upstream = case.upstream()
    ours = case.ours(upstream)
    outputs, grads = 0.0, 0.0
    extras = {"output_hidden_states": True, "output_attentions": case.attention == "eager"}
    for padding, length in INPUTS:
        inputs = case.inputs(padding, length) | extras
        theirs, mine = upstream(**inputs), ours(**inputs)
        outputs = max(outputs, outputs_apart(mine, theirs))
        grads = max(grads, gradients_apart(gradients(ours, mine), gradients(upstream, theirs)))
    return outputs, grads


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_outputs_and_gradients_equal_upstream(case: Case) -> None:
    outputs, grads = measure(case)
    assert outputs <= OUTPUTS
    assert grads <= GRADIENTS


def stays_in_float64(case: Case) -> bool:
    """Where upstream does: V1's norm casts, so do rotary positions, token dropout and an inexact scale."""
    if case.family == "Esm":
        return case.variant.startswith("absolute") and not case.config.get("token_dropout")
    terms = case.config.get("pos_att_type", [])
    factor = 1 + ("c2p" in terms) + ("p2c" in terms)
    head_dim = case.config["hidden_size"] // case.config["num_attention_heads"]
    return case.family == "DebertaV2" and math.isqrt(head_dim * factor) ** 2 == head_dim * factor


@pytest.mark.parametrize("case", [case for case in BASE if stays_in_float64(case)], ids=str)
def test_float64_outputs_equal_upstream_where_it_stays_in_float64(case: Case) -> None:
    upstream = case.upstream()
    ours, upstream = case.ours(upstream).double(), upstream.double()
    for padding, length in INPUTS:
        inputs = case.inputs(padding, length)
        assert outputs_apart(ours(**inputs), upstream(**inputs)) <= DOUBLE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", BASE, ids=str)
def test_half_precision_is_as_near_to_float32_as_upstream(case: Case, dtype: torch.dtype) -> None:
    exact = case.upstream()
    low = copy.deepcopy(exact).to(dtype)
    ours = case.ours(exact).to(dtype)
    distance, upstream_distance = 0.0, 0.0
    for padding, length in INPUTS:
        inputs = case.inputs(padding, length)
        target = exact(**inputs).last_hidden_state
        output = ours(**inputs).last_hidden_state
        assert output.dtype == dtype
        distance = max(distance, relative(output, target))
        upstream_distance = max(upstream_distance, relative(low(**inputs).last_hidden_state, target))
    assert distance <= 2 * upstream_distance


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case.head], ids=str)
def test_tuple_outputs_equal_upstream(case: Case) -> None:
    upstream = case.upstream()
    ours = case.ours(upstream)
    inputs = case.inputs("right", LENGTHS[0])
    theirs, mine = upstream(**inputs, return_dict=False), ours(**inputs, return_dict=False)
    assert isinstance(mine, tuple)
    assert len(mine) == len(theirs)
    assert all(relative(a, b) <= OUTPUTS for a, b in zip(mine, theirs, strict=True))
