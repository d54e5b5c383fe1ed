"""Small uses of other people's tools, each tried on upstream's classes and on ours by `compat.py`.

A probe raises where the tool does not work. Its docstring is what the table says about it.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DEBERTAS = ("Deberta", "DebertaV2")
FAMILIES = (*DEBERTAS, "Esm")
UNDER = "outplace.transformers"
"""The package that stands for upstream's classes on our blocks."""
LORA_TARGETS = {
    "Deberta": ["in_proj"],
    "DebertaV2": ["query_proj", "value_proj"],
    "Esm": ["query", "value"],
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Probe:
    tool: str
    distribution: str
    families: tuple[str, ...]
    run: Callable[[str, str], None]

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def what(self) -> str:
        return " ".join((self.run.__doc__ or "").split()).rstrip(".")


PROBES: list[Probe] = []


def probe(tool: str, distribution: str = "", families: tuple[str, ...] = FAMILIES) -> Callable[..., Any]:
    """Put a function of the package and the family on the list."""

    def register(function: Callable[[str, str], None]) -> Callable[[str, str], None]:
        PROBES.append(Probe(tool, distribution or tool.lower(), families, function))
        return function

    return register


def build(package: str, family: str, head: str = "ForSequenceClassification", **fields: Any) -> Any:
    """A seeded tiny model in eval mode."""
    models: Any = importlib.import_module(package)
    if package == UNDER:
        models.install()
        models = importlib.import_module("transformers")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if family == "Esm":
        special = {"pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
        shape |= {"vocab_size": 33, "token_dropout": True} | special
    else:
        relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
        shape |= {"vocab_size": 61, "type_vocab_size": 0} | relative
    torch.manual_seed(0)
    return getattr(models, f"{family}{head}")(getattr(models, f"{family}Config")(**shape | fields)).eval()


def batch(family: str, rows: int = 4, length: int = 10, *, labels: bool = True) -> dict[str, Tensor]:
    """Ids, a mask that hides the end of the first row, and a class for each row."""
    ids = torch.randint(4, 24, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    found = {"input_ids": torch.where(mask == 1, ids, int(family == "Esm")), "attention_mask": mask}
    return found | ({"labels": torch.arange(rows) % 2} if labels else {})


def train(model: Any, inputs: dict[str, Tensor], steps: int = 6, learning_rate: float = 1e-2) -> None:
    """A few steps, after which the loss must have fallen."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for _ in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    check(losses[-1] < losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")


def check(true: bool, message: str) -> None:
    """Raise as a tool would: the table shows both alike."""
    if not true:
        raise RuntimeError(message)


def with_lora(model: Any, family: str, targets: dict[str, list[str]] = LORA_TARGETS) -> Any:
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_dropout": 0.0, "target_modules": targets[family]}
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **options)).train()


# Adapters


@probe("PEFT")
def lora_input_gradients(package: str, family: str) -> None:
    """LoRA, with `enable_input_require_grads`"""
    model = with_lora(build(package, family), family)
    model.enable_input_require_grads()
    train(model, batch(family))


def _checkpointed_lora(package: str, family: str, reentrant: bool) -> None:
    model = with_lora(build(package, family), family)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    train(model, batch(family))
    gradients = [p.grad is not None for name, p in model.named_parameters() if "lora_B" in name]
    check(bool(gradients), "there are no adapters")


@probe("PEFT")
def lora_checkpointing(package: str, family: str) -> None:
    """LoRA, with gradient checkpointing"""
    _checkpointed_lora(package, family, reentrant=False)


@probe("PEFT")
def lora_reentrant_checkpointing(package: str, family: str) -> None:
    """LoRA, with reentrant gradient checkpointing"""
    _checkpointed_lora(package, family, reentrant=True)


@probe("bitsandbytes")
def qlora(package: str, family: str) -> None:
    """QLoRA: nf4, double quantisation, `prepare_model_for_kbit_training` with checkpointing"""
    from peft import prepare_model_for_kbit_training

    if package == "outplace":
        from outplace import quantize

        model = quantize(build(package, family), "nf4")
    else:
        from transformers import BitsAndBytesConfig

        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        four_bit = BitsAndBytesConfig(
            load_in_4bit=True, llm_int8_skip_modules=["classifier", "pooler"], **options
        )
        with tempfile.TemporaryDirectory() as folder:
            model = build(package, family)
            model.save_pretrained(folder)
            model = type(model).from_pretrained(folder, quantization_config=four_bit, device_map="cpu")
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    train(with_lora(model, family), batch(family))


# PyTorch


@probe("torch.utils.checkpoint", "torch")
def reentrant_checkpointing(package: str, family: str) -> None:
    """reentrant checkpointing of every layer: the gradients of a run without"""
    model = build(package, family, **NO_DROPOUT).train()
    model(**batch(family)).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model(**batch(family)).loss.backward()
    for name, parameter in model.named_parameters():
        if expected[name] is not None:
            check(parameter.grad is not None, f"{name} has no gradient")
            torch.testing.assert_close(parameter.grad, expected[name])


def _functional(model: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    def loss(weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, kwargs=inputs)["loss"]

    return {name: p.detach() for name, p in model.named_parameters()}, loss


@probe("torch.func", "torch")
def per_sample_gradients(package: str, family: str) -> None:
    """per-sample gradients by `vmap(grad)`, labels included"""
    weights, loss = _functional(build(package, family))
    inputs = batch(family)

    def one(weights: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        return loss(weights, {key: x.unsqueeze(0) for key, x in sample.items()})

    found = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(weights, inputs)
    mean = torch.func.grad(loss)(weights, inputs)
    for name, gradient in mean.items():
        torch.testing.assert_close(found[name].mean(0), gradient, rtol=1e-3, atol=1e-5)


@probe("torch.func", "torch")
def forward_mode(package: str, family: str) -> None:
    """`jvp` of the loss: equal to the gradient's product"""
    weights, loss = _functional(build(package, family))
    inputs, tangents = batch(family), {name: torch.ones_like(x) * 1e-2 for name, x in weights.items()}
    _, found = torch.func.jvp(lambda w: loss(w, inputs), (weights,), (tangents,))
    gradients = torch.func.grad(loss)(weights, inputs)
    expected = sum((gradients[name] * tangents[name]).sum() for name in weights)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@probe("torch.func", "torch")
def second_derivatives(package: str, family: str) -> None:
    """`hessian` of the loss in a layer's bias: symmetric"""
    weights, loss = _functional(build(package, family))
    inputs = batch(family)
    name = next(name for name in weights if name.endswith("layer.0.output.dense.bias"))
    found = torch.func.hessian(lambda bias: loss(weights | {name: bias}, inputs))(weights[name])
    check(bool(found.abs().max() > 0), "the hessian is zero")
    torch.testing.assert_close(found, found.T, rtol=1e-3, atol=1e-5)


@probe("torch.compile", "torch")
def compiled_training(package: str, family: str) -> None:
    """one graph (`fullgraph`, `dynamic`; `aot_eager`) of a training step, labels included"""
    model = build(package, family)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, length in ((4, 10), (3, 14)):
        inputs = batch(family, rows, length)
        loss = compiled(**inputs).loss
        loss.backward()
        torch.testing.assert_close(loss, model(**inputs).loss, rtol=1e-4, atol=1e-5)


def _axes() -> dict[str, dict[int, Any]]:
    axes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=4, max=64)}
    return {"input_ids": axes, "attention_mask": axes}


@probe("torch.export", "torch")
def export(package: str, family: str) -> None:
    """a graph of dynamic batch and length, run at other sizes"""
    model = build(package, family)
    inputs = batch(family, labels=False)
    exported = torch.export.export(model, (), inputs, dynamic_shapes=_axes(), strict=False).module()
    for rows, length in ((4, 10), (3, 17)):
        inputs = batch(family, rows, length, labels=False)
        torch.testing.assert_close(
            exported(**inputs)["logits"], model(**inputs)["logits"], rtol=1e-4, atol=1e-5
        )


@probe("ONNX", "onnxruntime")
def onnx(package: str, family: str) -> None:
    """export with dynamic batch and length, run in onnxruntime at other sizes"""
    import onnxruntime

    model = build(package, family)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        inputs = batch(family, labels=False)
        options = {"dynamo": True, "dynamic_shapes": _axes(), "verbose": False}
        torch.onnx.export(model, kwargs=inputs, f=file, output_names=["logits"], **options)
        runtime = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for rows, length in ((4, 10), (3, 17)):
        inputs = batch(family, rows, length, labels=False)
        (found,) = runtime.run(["logits"], {key: x.numpy() for key, x in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(found), model(**inputs).logits, rtol=1e-4, atol=1e-5)


def _distributed_rank(rank: int, package: str, family: str, file: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    model = nn.parallel.DistributedDataParallel(build(package, family).train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(**batch(family, length=8 + step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()


@probe("DistributedDataParallel", "torch")
def data_parallel(package: str, family: str) -> None:
    """two steps in two processes"""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (package, family, os.path.join(folder, "store"))
        torch.multiprocessing.start_processes(_distributed_rank, arguments, nprocs=2, start_method="spawn")


@probe("torch.autocast", "torch")
def autocast(package: str, family: str) -> None:
    """training in bfloat16"""
    model = build(package, family).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(family)).loss
    loss.backward()
    check(bool(loss.isfinite()), "the loss is not finite")


@probe("from_pretrained", "torch")
def bfloat16(package: str, family: str) -> None:
    """`from_pretrained(dtype=torch.bfloat16)`, and a forward pass near float32's"""
    model = build(package, family)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, dtype=torch.bfloat16)
        found = loaded(**batch(family)).logits
    check(found.dtype is torch.bfloat16, f"the logits are {found.dtype}")
    torch.testing.assert_close(found.float(), model(**batch(family)).logits, rtol=0.1, atol=0.05)


@probe("predict_contacts", "torch", ("Esm",))
def contacts(package: str, family: str) -> None:
    """contacts from a model with `attn_implementation="sdpa"`: eager's"""
    found = []
    for implementation in ("sdpa", "eager"):
        model = build(package, family, "Model", attn_implementation=implementation)
        inputs = batch(family, labels=False)
        found.append(model.predict_contacts(inputs["input_ids"], inputs["attention_mask"]))
    torch.testing.assert_close(*found)


# Privacy, attribution, training loops


def _private(model: Any, inputs: dict[str, Tensor], mode: str, step: Callable[..., None]) -> None:
    """An epoch of DP-SGD; `step(model, rows)` leaves per-sample gradients behind."""
    from opacus import PrivacyEngine

    columns, data = list(inputs), torch.utils.data.TensorDataset(*inputs.values())
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    for rows in loader:
        optimizer.zero_grad()
        step(private, dict(zip(columns, rows, strict=True)))
        optimizer.step()


def _backward(model: Any, rows: dict[str, Tensor]) -> None:
    model(**rows).loss.backward()


@probe("Opacus")
def private_training(package: str, family: str) -> None:
    """DP-SGD of all parameters, per-sample gradients by Opacus' hooks"""
    _private(build(package, family), batch(family, rows=8), "hooks", _backward)


@probe("Opacus")
def private_adapters(package: str, family: str) -> None:
    """DP-SGD of LoRA adapters, per-sample gradients by Opacus' hooks"""
    targets = {"Deberta": ["in_proj"], "DebertaV2": ["value_proj"], "Esm": ["query", "value"]}
    model = with_lora(build(package, family), family, targets)
    _private(model, batch(family, rows=8), "hooks", _backward)


@probe("Opacus")
def private_functional(package: str, family: str) -> None:
    """DP-SGD of all parameters, per-sample gradients by `vmap(grad)` (`grad_sample_mode="no_op"`)"""

    def step(private: Any, rows: dict[str, Tensor]) -> None:
        model = private._module
        weights, loss = _functional(model)

        def one(weights: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
            return loss(weights, {key: x.unsqueeze(0) for key, x in sample.items()})

        gradients = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(weights, rows)
        for name, parameter in model.named_parameters():
            parameter.grad_sample = gradients[name]

    _private(build(package, family, **NO_DROPOUT), batch(family, rows=8), "no_op", step)


@probe("Captum")
def integrated_gradients(package: str, family: str) -> None:
    """integrated gradients through `inputs_embeds`: they add up to the change of the logit"""
    from captum.attr import IntegratedGradients

    model, inputs = build(package, family), batch(family)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    mask = inputs["attention_mask"]

    def score(embeddings: Tensor, mask: Tensor) -> Tensor:
        return model(inputs_embeds=embeddings, attention_mask=mask).logits

    method = IntegratedGradients(score)
    options = {"additional_forward_args": (mask,), "n_steps": 100, "internal_batch_size": 64}
    baselines = model.get_input_embeddings()(torch.full_like(inputs["input_ids"], 3)).detach()
    attributions, delta = method.attribute(
        embeddings, baselines, target=1, return_convergence_delta=True, **options
    )
    check(bool(attributions.isfinite().all()), "attributions are not finite")
    change = (score(embeddings, mask) - score(baselines, mask))[:, 1].abs().max()
    check(bool(delta.abs().max() < 0.2 * change + 1e-3), f"off by {delta.abs().max():.4f} of {change:.4f}")


@probe("Trainer", "transformers")
def trainer(package: str, family: str) -> None:
    """two epochs with checkpointing, evaluation, and saved weights that load again"""
    from transformers import Trainer, TrainingArguments

    model, inputs = build(package, family), batch(family, rows=8)
    rows = [{key: x[i] for key, x in inputs.items()} for i in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        arguments = TrainingArguments(
            folder, num_train_epochs=2, per_device_train_batch_size=4, gradient_checkpointing=True, **options
        )
        loop = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        loop.train()
        found = loop.evaluate()["eval_loss"]
        loop.save_model(folder)
        model.config.save_pretrained(folder)  # written by itself only with a `PreTrainedModel`
        again = type(model).from_pretrained(folder)
        check(abs(again(**inputs).loss.item() - found) < 1e-4, "the saved model is another one")


def tokenizer(family: str) -> Any:
    """One token a letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (
        ["<cls>", "<pad>", "<eos>", "<unk>"] if family == "Esm" else ["<pad>", "<cls>", "<eos>", "<unk>"]
    )
    vocabulary = [*special, *"LAGVSERTIDPKQNFYMHWC", "<mask>"]
    ids = {token: i for i, token in enumerate(vocabulary)}
    if family == "Esm":
        ids["<mask>"] = 32
        ids |= {f"<{i}>": i for i in range(24, 32)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        cls_token="<cls>",
        eos_token="<eos>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"],
    )


def _classify(model: Any, family: str, **options: Any) -> None:
    from transformers import pipeline

    classify = pipeline("text-classification", model=model, tokenizer=tokenizer(family))
    found = classify(["M K T A Y", "G G"], **options)
    check([set(row) for row in found] == [{"label", "score"}] * 2, f"got {found}")


def _fill(model: Any, family: str) -> None:
    from transformers import pipeline

    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer(family))
    check(len(fill("M K <mask> A Y", top_k=3)) == 3, "not three proposals")


@probe("pipeline", "transformers")
def pipeline_classification(package: str, family: str) -> None:
    """`pipeline("text-classification", model=model, tokenizer=tokenizer)`, one text at a time"""
    _classify(build(package, family), family)


@probe("pipeline", "transformers")
def pipeline_batches(package: str, family: str) -> None:
    """the same with `batch_size=2`"""
    _classify(build(package, family), family, batch_size=2)


@probe("pipeline", "transformers")
def pipeline_fill_mask(package: str, family: str) -> None:
    """`pipeline("fill-mask", model=model, tokenizer=tokenizer)`"""
    _fill(build(package, family, "ForMaskedLM"), family)


@probe("Accelerate")
def accelerated_training(package: str, family: str) -> None:
    """`Accelerator.prepare`, training in bfloat16, `save_state` and `load_state`"""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = build(package, family).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.backward(model(**batch(family)).loss)
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)


@probe("Accelerate")
def offload(package: str, family: str) -> None:
    """`cpu_offload` and `disk_offload`: the same logits"""
    from accelerate import cpu_offload, disk_offload

    device = torch.device("cpu")
    expected = build(package, family)(**batch(family)).logits
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        in_memory = cpu_offload(build(package, family), execution_device=device)
        torch.testing.assert_close(in_memory(**batch(family)).logits, expected)
        on_disk = disk_offload(build(package, family), folder, execution_device=device)
        torch.testing.assert_close(on_disk(**batch(family)).logits, expected)


@probe("Sentence Transformers", "sentence-transformers")
def sentence_embeddings(package: str, family: str) -> None:
    """`encode`, the model in a module of one's own under mean pooling: the mean of its states"""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import InputModule
    from sentence_transformers.sentence_transformer.modules import Pooling

    class Encoder(InputModule):
        def __init__(self, model: nn.Module, tokenizer: Any) -> None:
            super().__init__()
            self.model, self.tokenizer = model, tokenizer

        def preprocess(self, inputs: list[str], prompt: str | None = None, **options: Any) -> Any:
            return self.tokenizer(inputs, padding=True, return_tensors="pt")

        def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
            states = self.model(features["input_ids"], features["attention_mask"]).last_hidden_state
            return features | {"token_embeddings": states}

        def save(self, output_path: str, *args: Any, **options: Any) -> None:
            self.model.save_pretrained(output_path)

    model, texts = build(package, family, "Model"), ["M K T A Y", "G G"]
    found = SentenceTransformer(
        modules=[Encoder(model, tokenizer(family)), Pooling(64)], device="cpu"
    ).encode(texts)
    for text, embedding in zip(texts, found, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(family)(text, return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(torch.from_numpy(embedding), states[0].mean(0), rtol=1e-3, atol=1e-4)
