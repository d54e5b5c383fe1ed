"""PEFT on every family: adapters learn, merge, travel through files and between upstream and here.

Where PEFT itself rules something out, the test says so and asserts that it does.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import outplace

peft = pytest.importorskip("peft", reason="PEFT is optional")
transformers = pytest.importorskip("transformers", reason="the upstream classes come from transformers")

TASKS = {
    "Model": "FEATURE_EXTRACTION",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
NAMES = [name for name in tiny.CLASSES if name.removeprefix(tiny.family(name)) in TASKS]
CLASSIFIERS = [name for name in NAMES if name.endswith("ForSequenceClassification")]
HEADS = ("classifier", "qa_outputs")
"""What PEFT trains in full, without being asked, where the task has labels."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def task(name: str) -> str:
    return TASKS[name.removeprefix(tiny.family(name))]


def lora(name: str, **options: Any) -> Any:
    """LoRA on PEFT's default modules, or, for ESM, of which PEFT knows none, on those to pass."""
    if tiny.family(name) == "Esm":
        options = {"target_modules": ["query", "key", "value"]} | options
    return peft.LoraConfig(task_type=task(name), **options)


def ia3(name: str) -> Any:
    options: dict[str, Any] = {}
    if tiny.family(name) == "Esm":
        feedforward = ["intermediate.dense"]
        options = {"target_modules": ["key", "value", *feedforward], "feedforward_modules": feedforward}
    return peft.IA3Config(task_type=task(name), **options)


ADAPTERS = {"LoRA": lora, "DoRA": lambda name: lora(name, use_dora=True), "IA3": ia3}


def adapted(name: str, adapter: Any, **fields: Any) -> Any:
    """A tiny model with an adapter of seeded parameters, none of them zero: its effect can be seen."""
    model = peft.get_peft_model(tiny.model(name, **fields), adapter)
    stir(model)
    return model


def stir(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator)


def upstream(ours: Any) -> Any:
    """The model of transformers of the same class, configuration and parameters."""
    name = type(ours).__name__
    config = getattr(transformers, f"{tiny.family(name)}Config")(**ours.config.to_dict())
    theirs = getattr(transformers, name)(config)
    theirs.load_state_dict(ours.state_dict())
    return theirs.eval()


def tensors(model: Any, name: str, **more: Any) -> tuple[Tensor, ...]:
    """Everything that the model makes of the inputs without labels."""
    inputs = {k: v for k, v in tiny.inputs(name).items() if k in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return tuple(model.eval()(**inputs, **more).to_tuple())


def equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], **tolerance: float) -> bool:
    return len(found) == len(expected) and all(
        torch.allclose(x, y, **tolerance) for x, y in zip(found, expected, strict=True)
    )


def objective(model: Any, name: str) -> Tensor:
    """The loss, or for a model without a head one feature of its states, which can be pushed down."""
    output = model(**tiny.inputs(name))
    return output[0] if output[0].ndim == 0 else output[0][..., 0].mean()


def train(model: Any, name: str, steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        loss = objective(model.train(), name)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", NAMES)
def test_adapters_learn_and_the_rest_stays(name: str, adapter: str) -> None:
    model = peft.get_peft_model(tiny.model(name, **NO_DROPOUT), ADAPTERS[adapter](name))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = train(model, name)
    assert losses[-1] < losses[0]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("lora_" in n or "ia3_" in n for n in moved)
    assert all("lora_" in n or "ia3_" in n or "modules_to_save" in n for n in moved)
    assert any("modules_to_save" in n for n in moved) == (task(name) != "FEATURE_EXTRACTION")


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_default_target_modules_are_found_by_the_model_type(family: str) -> None:
    """PEFT looks them up under `config.model_type`, for our classes as for upstream's."""
    name = f"{family}ForSequenceClassification"
    base = tiny.model(name)
    theirs = peft.get_peft_model(upstream(base), lora(name))
    ours = peft.get_peft_model(base, lora(name))
    expected = {"Deberta": {"in_proj"}, "DebertaV2": {"query_proj", "value_proj"}}[family]
    assert ours.peft_config["default"].target_modules == expected
    found, upstreams = (
        {n for n, p in model.named_parameters() if p.requires_grad} for model in (ours, theirs)
    )
    assert found == upstreams


def test_esm_needs_its_target_modules_named() -> None:
    """PEFT 0.21 has no defaults for the model type "esm", neither for upstream's class nor for ours."""
    model = tiny.model("EsmForSequenceClassification")
    for base in (upstream(model), model):
        with pytest.raises(ValueError, match="specify `target_modules`"):
            peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS"))


@pytest.mark.parametrize("name", NAMES)
def test_all_linear_finds_the_layers_it_finds_upstream(name: str) -> None:
    """PEFT spares the head by itself for sequence classification only; elsewhere it is to be excluded.

    Of a masked-language head, PEFT spares the decoder for upstream's classes only.
    """
    spared = [] if task(name) in ("SEQ_CLS", "FEATURE_EXTRACTION") else list(HEADS)
    base = tiny.model(name)
    found, upstreams = (
        {n for n, _ in peft.get_peft_model(model, adapter).named_parameters() if "lora_" in n}
        for model in (base, upstream(base))
        for adapter in [lora(name, target_modules="all-linear", exclude_modules=spared or None)]
    )
    assert found == upstreams


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", [name for name in NAMES if task(name) == "TOKEN_CLS"])
def test_merged_model_gives_the_adapted_models_logits(name: str, adapter: str) -> None:
    model = adapted(name, ADAPTERS[adapter](name))
    expected = tensors(model, name)
    assert not equal(tensors(tiny.model(name), name), expected, atol=1e-4)
    merged = model.merge_and_unload()
    assert type(merged) is getattr(outplace, name)
    assert merged.state_dict().keys() == tiny.model(name).state_dict().keys()
    assert equal(tensors(merged, name), expected, atol=1e-5)


def test_ia3_cannot_be_merged_beside_a_head_of_several_layers() -> None:
    """PEFT 0.21 asks ESM's classification head for `weight` when it takes IA3 out, upstream's too."""
    name = "EsmForSequenceClassification"
    for base in (upstream(tiny.model(name)), tiny.model(name)):
        with pytest.raises(AttributeError, match="EsmClassificationHead"):
            peft.get_peft_model(base, ia3(name)).merge_and_unload()


@pytest.mark.parametrize("name", NAMES)
def test_saved_adapters_load_into_a_fresh_model(name: str, tmp_path: Path) -> None:
    parts = {"modules_to_save": ["classifier", "pooler"]} if name in CLASSIFIERS else {}
    model = adapted(name, lora(name, **parts))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model(name), tmp_path)
    assert equal(tensors(loaded, name), tensors(model, name), rtol=0, atol=0)
    if parts and tiny.family(name) != "Esm":
        pooler = loaded.get_base_model().pooler.modules_to_save["default"].dense.weight
        assert not torch.equal(pooler, tiny.model(name).pooler.dense.weight)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("direction", ["upstream to ours", "ours to upstream"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_adapters_travel_between_upstream_and_ours(
    name: str, direction: str, adapter: str, tmp_path: Path
) -> None:
    base = tiny.model(name, **NO_DROPOUT)
    theirs = upstream(base)
    source, target = (theirs, base) if direction.startswith("upstream") else (base, theirs)
    target = copy.deepcopy(target)
    trained = peft.get_peft_model(source, ADAPTERS[adapter](name))
    losses = train(trained, name)
    assert losses[-1] < losses[0]
    trained.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(target, tmp_path)
    assert equal(tensors(loaded, name), tensors(trained, name), atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_leaves_the_adapters_gradients_alone(name: str, use_reentrant: bool) -> None:
    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        model = adapted(name, lora(name, lora_dropout=0.1))
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            assert model.get_base_model().is_gradient_checkpointing
        torch.manual_seed(7)
        objective(model.train(), name).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, found = gradients(False), gradients(True)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert torch.allclose(gradient, expected[key], rtol=1e-5, atol=1e-7), key


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_script_that_fails_on_in_place_writes_runs(family: str) -> None:
    """Requiring gradients of the embeddings' output is an error where anything writes into it."""
    required = {"pad_token_id": 1, "mask_token_id": 32, "vocab_size": 33} if family == "Esm" else {}
    relative = {} if family == "Esm" else {"relative_attention": True}
    config = getattr(outplace, f"{family}Config")(
        hidden_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=37,
        **required,
        **relative,
    )
    name = f"{family}ForSequenceClassification"
    model = getattr(outplace, name)(config)
    peft_config = lora(name, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.1)
    model = peft.get_peft_model(model, peft_config)
    model.train()
    model.enable_input_require_grads()
    input_ids = torch.full((2, 10), 5, dtype=torch.long)
    outputs = model(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=torch.tensor([0, 1])
    )
    outputs.loss.backward()
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all(p.grad is not None for _, p in trainable)
    # LoRA's B starts at zero, so in the first step it alone has a gradient that is not.
    assert all(p.grad.any() for n, p in trainable if "lora_B" in n)


SOFT_PROMPTS = {"prompt": peft.PromptTuningConfig, "p-tuning": peft.PromptEncoderConfig}


@pytest.mark.parametrize("kind", SOFT_PROMPTS)
@pytest.mark.parametrize("name", [name for name in NAMES if task(name) != "TOKEN_CLS"])
def test_soft_prompts_learn_as_upstreams(name: str, kind: str, tmp_path: Path) -> None:
    """PEFT feeds the prompts through `inputs_embeds`, so the sequence is longer by their number.

    For ESM-2 upstream leaves out token dropout's factor where `inputs_embeds` are given, and we do not:
    prompts trained on one of the two do not serve the other, so here it is off.
    """
    no_factor = {"token_dropout": False} if tiny.family(name) == "Esm" else {}
    base = tiny.model(name, **NO_DROPOUT, **no_factor)
    theirs = upstream(base)
    adapter = SOFT_PROMPTS[kind](task_type=task(name), num_virtual_tokens=4)
    model = peft.get_peft_model(base, adapter)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = train(model, name)
    assert losses[-1] < losses[0]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("prompt_encoder" in n or "modules_to_save" in n for n in moved)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path)
    assert equal(tensors(loaded, name), tensors(model, name), atol=1e-5)


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_soft_prompts_have_no_labels_in_token_classification(family: str) -> None:
    """PEFT gives the prompts no labels for this task: an error with labels, with upstream's class too."""
    name = f"{family}ForTokenClassification"
    for base in (upstream(tiny.model(name)), tiny.model(name)):
        adapter = peft.PromptTuningConfig(task_type="TOKEN_CLS", num_virtual_tokens=4)
        model = peft.get_peft_model(base, adapter)
        with pytest.raises(ValueError, match="to match target batch_size"):
            model(**tiny.inputs(name))
        assert tensors(model, name)[0].shape[1] == 12 + 4


@pytest.mark.parametrize("name", NAMES)
def test_prefix_tuning_is_for_decoders(name: str) -> None:
    """It needs a cache of keys and values, which neither upstream's encoders nor ours have."""

    def run(base: Any) -> None:
        adapter = peft.PrefixTuningConfig(task_type=task(name), num_virtual_tokens=4)
        peft.get_peft_model(base, adapter)(**tiny.inputs(name))

    reason = "past.key.values|transformer_backbone_name|must match the size"
    for base in (upstream(tiny.model(name)), tiny.model(name)):
        with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError), match=reason):
            run(base)
