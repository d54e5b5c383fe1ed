"""The masked-language heads of DeBERTa: which one a checkpoint carries, and the enhanced mask decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

import outplace

FAMILIES = ["Deberta", "DebertaV2"]


def published(family: str, folder: Path) -> Any:
    """A checkpoint as Microsoft publishes them: the original's head, and no `legacy` in the config.

    Upstream's model with that head, which it builds only when told, is the answer.
    """
    config = getattr(transformers, f"{family}Config")(**tiny.CONFIGS[family], legacy=False)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForMaskedLM")(config).eval()
    theirs.lm_predictions.lm_head.bias.data.normal_()
    theirs.save_pretrained(folder)
    text = (folder / "config.json").read_text()
    assert '"legacy": false' in text
    (folder / "config.json").write_text(text.replace('"legacy": false', '"legacy": true'))
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_head_is_found_and_predicts(family: str, tmp_path: Path) -> None:
    theirs = published(family, tmp_path)
    cls = getattr(outplace, f"{family}ForMaskedLM")
    model = cls.from_pretrained(tmp_path, strict=True)
    assert model.config.legacy is False
    assert torch.equal(model(tiny.ids()).logits, theirs(tiny.ids()).logits)
    # Saved again, upstream finds the head too.
    model.save_pretrained(tmp_path / "saved")
    back = getattr(transformers, f"{family}ForMaskedLM").from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(back(tiny.ids()).logits, theirs(tiny.ids()).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("legacy", [True, False])
def test_each_head_loads_into_the_other_where_asked(family: str, legacy: bool, tmp_path: Path) -> None:
    model = tiny.model(f"{family}ForMaskedLM", legacy=not legacy)
    for name, parameter in model.named_parameters():
        if "predictions" in name and name.endswith("bias"):
            parameter.normal_()
    model.save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path, legacy=legacy, strict=True)
    assert other.config.legacy is legacy
    assert torch.allclose(other(tiny.ids()).logits, model(tiny.ids()).logits, atol=1e-6)


@torch.no_grad()
def test_a_checkpoint_with_both_heads_gives_the_one_of_its_config(tmp_path: Path) -> None:
    tiny.model("DebertaForMaskedLM").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"lm_predictions.lm_head.bias": torch.ones(61)}, path)
    model = outplace.DebertaForMaskedLM.from_pretrained(tmp_path)
    assert model.config.legacy is True
    assert model.load_report.missing == []


def decoder_model(family: str, **fields: Any) -> Any:
    fields = {"position_biased_input": False, "enhanced_mask_decoder": True, "legacy": False} | fields
    return tiny.model(f"{family}ForMaskedLM", **fields)


@torch.no_grad()
@pytest.mark.parametrize(
    "mask", [None, torch.tensor([[1] * 12, [1] * 8 + [0] * 4, [1] * 12])], ids=["full", "padded"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_enhanced_mask_decoder_is_the_originals_formula(family: str, mask: Any) -> None:
    """z = positions + states below the last layer, which runs twice: queries from z, the rest from below."""
    model = decoder_model(family)
    base, ids = model.deberta, tiny.ids()
    below = base(ids, mask, output_hidden_states=True).hidden_states[-2]
    z = below + base.embeddings.position_embeddings.weight[None, :12]
    plan = base.attention_plan(3, 12)
    rel_embeddings, context = base.encoder.shared(below, None if mask is None else mask.bool(), plan, False)
    last = base.encoder.layer[-1]
    for _ in range(2):
        attended, _ = last.attention.self(below, rel_embeddings, z, context)
        attended = last.attention.output(attended, z)
        z = last.output(last.intermediate(attended), attended)
    head = model.lm_predictions.lm_head
    states = head.LayerNorm(torch.nn.functional.gelu(head.dense(z)))
    expected = states @ base.embeddings.word_embeddings.weight.t() + head.bias
    assert torch.allclose(model(ids, mask).logits, expected, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_of_the_decoder_see_absolute_positions(family: str) -> None:
    model, ids = decoder_model(family), tiny.ids()
    shifted = model(ids, position_ids=torch.arange(12).flip(0)[None]).logits
    assert not torch.allclose(model(ids).logits, shifted)
    plain = tiny.model(f"{family}ForMaskedLM", position_biased_input=False, legacy=False)
    assert torch.equal(plain(ids).logits, plain(ids, position_ids=torch.arange(12).flip(0)[None]).logits)


def test_the_decoder_takes_its_positions_from_a_checkpoint_and_trains(tmp_path: Path) -> None:
    model = decoder_model("DebertaV2")
    model.save_pretrained(tmp_path)
    again = outplace.DebertaV2ForMaskedLM.from_pretrained(tmp_path, strict=True)
    assert again.config.enhanced_mask_decoder
    assert torch.equal(model(tiny.ids()).logits, again(tiny.ids()).logits)
    # Without the decoder the same checkpoint's positions are known to be idle.
    off = outplace.DebertaV2ForMaskedLM.from_pretrained(tmp_path, enhanced_mask_decoder=False, strict=True)
    assert off.load_report.ignored == ["deberta.embeddings.position_embeddings.weight"]
    again(tiny.ids(), labels=tiny.ids()).loss.backward()
    assert all(p.grad is not None for p in again.parameters())
