"""`quantize`, and training adapters on top of it (QLoRA)."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

import outplace

bnb = pytest.importorskip("bitsandbytes", reason="quantises: pip install 'outplace[quant]'")
peft = pytest.importorskip("peft", reason="trains adapters: pip install 'outplace[test]'")

KINDS = ["nf4", "fp4", "int8"]
HEADS = [f"{family}ForSequenceClassification" for family in tiny.CONFIGS]
# 4-bit weights come in blocks of 64: a width of 64 has whole ones.
WIDE = {"hidden_size": 64, "intermediate_size": 128}


def quantized(name: str, kind: Any, **fields: Any) -> Any:
    return outplace.quantize(tiny.model(name, **WIDE | fields), kind)


def linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_logits_stay_near(name: str, kind: Any) -> None:
    inputs = tiny.inputs(name)
    with torch.no_grad():
        expected = tiny.model(name, **WIDE)(**inputs).to_tuple()
        model = quantized(name, kind)
        found = model(**inputs).to_tuple()
    assert linears(model)
    for x, y in zip(found, expected, strict=True):
        error = (x - y).norm() / y.norm()
        assert error < (0.03 if kind == "int8" else 0.35), f"off by {error:.3f} of the norm"


@pytest.mark.parametrize("name", HEADS)
def test_only_the_encoders_linears_are_replaced(name: str) -> None:
    model = quantized(name, "nf4")
    encoder = model.base_model.encoder
    left = [path for path, m in encoder.named_modules() if type(m) is torch.nn.Linear]
    assert all(path.endswith(("head_logits_proj", "head_weights_proj")) for path in left), left
    assert linears(model) == linears(encoder)
    assert all(m.weight.dtype == torch.uint8 for m in linears(model))


def test_modules_named_in_skip_are_left_alone() -> None:
    model = outplace.quantize(tiny.model("EsmModel", **WIDE), "nf4", skip=[".value", ".output."])
    kept = [path for path, m in model.encoder.named_modules() if type(m) is torch.nn.Linear]
    assert kept
    assert all(".value" in path or ".output." in path for path in kept)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'int4'; it must be 'nf4', 'fp4' or 'int8'"):
        outplace.quantize(tiny.model("EsmModel"), "int4")


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HEADS)
def test_adapters_on_a_quantized_model_learn(name: str, kind: Any, reentrant: bool | None) -> None:
    """Dropout is off, as in the report of `MatMul4Bit` outputs that are views: nothing copies them."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = peft.prepare_model_for_kbit_training(
        quantized(name, kind, **off),
        use_gradient_checkpointing=reentrant is not None,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    assert model.is_gradient_checkpointing == (reentrant is not None)
    targets = {
        "Deberta": ["in_proj", "dense"],
        "DebertaV2": ["query_proj", "value_proj", "dense"],
        "Esm": ["query", "value", "dense"],
    }[tiny.family(name)]
    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.0, target_modules=targets)
    model = peft.get_peft_model(model, lora).train()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    inputs, losses = tiny.inputs(name), []
    for _ in range(8):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05, losses
    moved = {key for key, p in model.named_parameters() if not torch.equal(p, before[key])}
    assert any("encoder" in key and "lora_B" in key for key in moved)
    assert all("lora_" in key or "modules_to_save" in key for key in moved), moved
