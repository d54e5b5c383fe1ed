"""`transformers.Trainer` and `accelerate` with the models as plain modules.

To both libraries our models are plain modules. What they then do otherwise, or refuse, is asserted here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.utils.data import DataLoader

import outplace

accelerate = pytest.importorskip("accelerate", reason="accelerate is optional, and Trainer needs it")
transformers = pytest.importorskip("transformers", reason="Trainer comes from transformers")

FAMILIES = ["Deberta", "DebertaV2", "Esm"]


class SavingTrainer(transformers.Trainer):
    """Saves through the model, which writes tied parameters once and its configuration beside them.

    Trainer itself gives the state of a plain module to safetensors, which refuses tied parameters.
    """

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model)
            model.save_pretrained(output_dir or self.args.output_dir)


def tokenizer(name: str) -> Any:
    """As much of a tokenizer as `DataCollatorWithPadding` asks for: the padding token's number is right."""
    tokenizers = pytest.importorskip("tokenizers", reason="the collator pads with a tokenizer")
    vocabulary = {"[A]": 0, "[B]": 1}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[A]")
    padding = "[B]" if tiny.family(name) == "Esm" else "[A]"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token=padding,
        model_input_names=["input_ids", "attention_mask"],
    )


def examples(name: str, count: int = 16) -> list[dict[str, Any]]:
    """Sequences of different lengths; the class is which of two tokens comes first."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(5, 12, (count,), generator=generator).tolist()
    rows = [torch.randint(4, 30, (length,), generator=generator).tolist() for length in lengths]
    if name.endswith("ForMaskedLM"):
        # The collator pads ids, not labels: one length.
        rows = [(row * 2)[:8] for row in rows]
        return [{"input_ids": row, "labels": row} for row in rows]
    return [{"input_ids": [4 + i % 2, *row], "label": i % 2} for i, row in enumerate(rows)]


def trainer(name: str, folder: Path, cls: type = SavingTrainer, **arguments: Any) -> Any:
    settings = {
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_steps": 6,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return cls(
        tiny.model(name),
        transformers.TrainingArguments(output_dir=str(folder), **settings | arguments),
        train_dataset=examples(name),
        eval_dataset=examples(name, 4),
        data_collator=transformers.DataCollatorWithPadding(tokenizer(name)),
    )


def losses(trained: Any) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMaskedLM"])
@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_run_ends_as_the_uninterrupted_one(family: str, head: str, tmp_path: Path) -> None:
    """Dropout is on: the resumed run draws the same random numbers."""
    name = family + head
    whole = trainer(name, tmp_path)
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0]
    resumed = trainer(name, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert losses(resumed) == losses(whole)
    found, expected = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    ties = resumed.model.ties()
    assert all(resumed.model.get_parameter(a) is resumed.model.get_parameter(b) for a, b in ties.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_the_trainer_load_here_and_upstream(family: str, tmp_path: Path) -> None:
    name = f"{family}ForMaskedLM"
    trained = trainer(name, tmp_path)
    trained.train()
    trained.save_model()
    inputs = {k: v for k, v in tiny.inputs(name).items() if k != "labels"}
    with torch.no_grad():
        expected = trained.model.eval()(**inputs).logits
        for package in (outplace, transformers):
            loaded = getattr(package, name).from_pretrained(tmp_path)
            assert torch.allclose(loaded.eval()(**inputs).logits, expected, atol=1e-5), package.__name__


@pytest.mark.parametrize("name", ["DebertaForMaskedLM", "DebertaV2ForMaskedLM", "EsmForMaskedLM"])
def test_trainer_alone_refuses_to_save_tied_parameters(name: str, tmp_path: Path) -> None:
    """A plain module's state goes to safetensors as it is: override `save_model`, as above."""
    with pytest.raises(RuntimeError, match="share memory"):
        trainer(name, tmp_path, cls=transformers.Trainer).train()


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_alone_saves_what_is_not_tied(family: str, tmp_path: Path) -> None:
    name = f"{family}ForSequenceClassification"
    trained = trainer(name, tmp_path, cls=transformers.Trainer)
    trained.train()
    trained.model.config.save_pretrained(tmp_path / "checkpoint-12")
    loaded = getattr(outplace, name).from_pretrained(tmp_path / "checkpoint-12", strict=True)
    found, expected = loaded.state_dict(), trained.model.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_evaluates_predicts_and_keeps_the_best(family: str, tmp_path: Path) -> None:
    trained = trainer(
        f"{family}ForSequenceClassification",
        tmp_path,
        eval_strategy="steps",
        eval_steps=6,
        load_best_model_at_end=True,
        gradient_checkpointing=True,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
    )
    assert trained.label_names == ["labels"]
    # Upstream's models take `num_items_in_batch` through `**kwargs`; ours have none, so Trainer
    # averages over accumulated batches itself.
    assert not trained.model_accepts_loss_kwargs
    trained.train()
    assert trained.model.is_gradient_checkpointing
    assert losses(trained)[-1] < losses(trained)[0]
    best = min(entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry)
    assert trained.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-5)
    assert trained.predict(trained.eval_dataset).predictions.shape == (4, 2)
    assert trained.state.total_flos > 0


def test_collator_pads_with_a_tokenizer_of_ours() -> None:
    tokenizer = outplace.EsmTokenizer()
    rows = [dict(tokenizer(protein)) | {"label": 0} for protein in ("MKT", "MKTAYIA")]
    batch = transformers.DataCollatorWithPadding(tokenizer)(rows)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 9)
    assert torch.equal(batch["input_ids"] != tokenizer.pad_token_id, batch["attention_mask"] == 1)
    assert tiny.model("EsmForSequenceClassification")(**batch).loss.isfinite()


def test_trainer_finds_the_labels_of_question_answering(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    found = transformers.Trainer(tiny.model("DebertaForQuestionAnswering"), arguments)
    assert found.label_names == ["start_positions", "end_positions"]


# accelerate


@pytest.mark.parametrize("name", [n for n in tiny.CLASSES if "For" in n])
def test_accelerators_loop_trains(name: str, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    inputs = tiny.inputs(name, batch=4)
    rows = [{key: value[i] for key, value in inputs.items()} for i in range(4)]
    model = tiny.model(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    found = []
    for _ in range(5):
        for batch in loader:
            loss = model(**batch).loss
            found.append(loss.item())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert found[-1] < found[0]
    accelerator.save_state(str(tmp_path))
    expected = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    accelerator.unwrap_model(model).save_pretrained(tmp_path)
    assert getattr(outplace, name).from_pretrained(tmp_path, strict=True).load_report is not None


OFFLOADED = [family + head for family in FAMILIES for head in ("ForSequenceClassification", "ForMaskedLM")]


def loss(name: str, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.inputs(name)).loss  # type: ignore[no-any-return]


def offloaded(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_model_computes_the_same(name: str, how: str, tmp_path: Path) -> None:
    """Parameters wait in memory or in files, and are there while the module that holds them runs."""
    options: dict[str, Any] = {"execution_device": torch.device("cpu")}
    if how == "disk_offload":
        options["offload_dir"] = str(tmp_path)
    model = getattr(accelerate, how)(tiny.model(name), **options)
    assert offloaded(model)
    assert torch.equal(loss(name, model), loss(name, tiny.model(name)))


@pytest.mark.parametrize("name", OFFLOADED)
def test_checkpoint_larger_than_memory_is_dispatched(name: str, tmp_path: Path) -> None:
    """The device map holds whole layers; what the memory it is given has no room for stays on disk."""
    saved = tiny.model(name)
    saved.save_pretrained(tmp_path)
    whole = [f"{tiny.family(name)}Layer"]
    with accelerate.init_empty_weights():
        empty = tiny.model(name)
    empty.tie_weights()
    room = int(0.6 * 4 * saved.num_parameters())
    device_map = accelerate.infer_auto_device_map(
        empty, max_memory={"cpu": room, "disk": 10**9}, no_split_module_classes=whole
    )
    assert set(device_map.values()) == {"cpu", "disk"}
    model = accelerate.load_checkpoint_and_dispatch(
        empty,
        str(tmp_path / "model.safetensors"),
        device_map=device_map,
        offload_folder=str(tmp_path / "offloaded"),
        no_split_module_classes=whole,
    )
    assert offloaded(model)
    assert torch.equal(loss(name, model), loss(name, saved))


@pytest.mark.parametrize("name", OFFLOADED)
def test_model_dispatched_to_the_cpu_stays_there(name: str) -> None:
    """A map to one device leaves the model as it is."""
    model = accelerate.dispatch_model(tiny.model(name), {"": "cpu"})
    assert not offloaded(model)
    assert torch.equal(loss(name, model), loss(name, tiny.model(name)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_map_to_nothing_but_disk_is_for_disk_offload(family: str, tmp_path: Path) -> None:
    """accelerate 1.15 writes no index for the map {"": "disk"}, whatever the model: use `disk_offload`."""
    name = f"{family}ForSequenceClassification"
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        accelerate.dispatch_model(tiny.model(name), {"": "disk"}, offload_dir=str(tmp_path))


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_upstreams_deberta_cannot_be_offloaded(family: str) -> None:
    """It reads the weight of its position table without calling it, so accelerate never brings it."""
    name = f"{family}ForSequenceClassification"
    theirs = getattr(transformers, name)(
        getattr(transformers, f"{family}Config")(**tiny.config(name).to_dict())
    )
    model = accelerate.cpu_offload(theirs.eval(), torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="meta"):
        loss(name, model)


def test_memory_savers_that_trainer_offers_and_we_do_not_are_refused() -> None:
    model = tiny.model("EsmForMaskedLM")
    with pytest.raises(ValueError, match="every_n_layers=2"):
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    with pytest.raises(ValueError, match="offload=True"):
        model.activation_checkpointing_enable(offload=True)
    assert not model.is_gradient_checkpointing
