"""The embedded checkpoint: small, whole, and better than guessing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from outplace.weights import nano

import outplace

TRAINING = Path(__file__).parents[1] / "benchmarks" / "nano"


@pytest.fixture(scope="module")
def model() -> outplace.EsmForMaskedLM:
    return outplace.EsmForMaskedLM.from_pretrained(nano.path(), strict=True)


def test_it_is_small_and_of_esm2s_form(model: outplace.EsmForMaskedLM) -> None:
    assert (nano.path() / "model.safetensors").stat().st_size <= 2_000_000
    config = model.config
    assert (config.position_embedding_type, config.token_dropout, config.vocab_size) == ("rotary", True, 33)
    assert (config.pad_token_id, config.mask_token_id, config.layer_norm_eps) == (1, 32, 1e-5)


@torch.no_grad()
def test_upstream_loads_it_with_equal_logits(model: outplace.EsmForMaskedLM) -> None:
    theirs = transformers.EsmForMaskedLM.from_pretrained(nano.path()).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(nano.path())
    batch = tokenizer(["MKTAYIAKQR<mask>ISFVKSHFSRQ", "LAGVS"], padding=True, return_tensors="pt")
    expected, found = theirs(**batch).logits, model(**batch).logits
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("held_out", "every", "margin"),
    [("homologues", 8, 0.8), ("strangers", 1, 1.0)],
)
def test_on_held_out_proteins_it_beats_the_background_by_the_stated_margin(
    model: outplace.EsmForMaskedLM, monkeypatch: pytest.MonkeyPatch, held_out: str, every: int, margin: float
) -> None:
    monkeypatch.syspath_prepend(str(TRAINING))
    import train

    split = train.load_split()
    assert not set(split.train) & (set(split.homologues) | set(split.strangers))
    some = getattr(split, held_out)[::every]
    tokenizer = outplace.EsmTokenizer.from_pretrained(nano.path())
    found, background = train.perplexities(model, tokenizer, some, train.frequencies(split.train), draws=3)
    assert found < margin * background
    del sys.modules["train"]


def test_the_card_states_the_measured_figures() -> None:
    results = json.loads((TRAINING / "results.json").read_text())
    card = (nano.path() / "README.md").read_text()
    for name in ("homologues", "strangers"):
        cells = [f"{results[name][key]:.2f}" for key in ("nano", "background")]
        assert f"| {results[name]['proteins']} | {' | '.join(cells)} |" in card
