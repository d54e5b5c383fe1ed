"""Programs that know nothing of this project, run plainly and under `outplace.transformers.install()`.

    python -m outplace.benchmarks.programs NAME FAMILY [--plain]

Each is a small use of a tool as its users write it, and returns numbers. They must be the same both times,
to 2e-5 in float32; where upstream itself fails, its error is printed. A program imports its tool itself, so
that one file serves environments that hold different tools.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from outplace import transformers as under

FAMILIES = ("Deberta", "DebertaV2", "Esm")
DEBERTAS = FAMILIES[:2]
TOLERANCE = 2e-5
PADDING = {"Deberta": 0, "DebertaV2": 0, "Esm": 1}
TEXTS = ["w1 w2 w3 w4 w5", "w6 w7", "w8 w9 w1 w2 w3 w4 w5 w6"]

Numbers = list[Tensor]
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[str], Numbers]]] = {}
"""By name: the families that a program is of, and the program."""


def program(families: tuple[str, ...] = FAMILIES) -> Callable[..., Any]:
    """Put a function of the family on the list."""

    def register(function: Callable[[str], Numbers]) -> Callable[[str], Numbers]:
        PROGRAMS[function.__name__] = families, function
        return function

    return register


# What programs are given: a tiny checkpoint in a folder, as from the Hub


def tokenizer(family: str) -> Any:
    """Return a fast tokenizer of words; the padding token's id is the family's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(26)), "[E]", "[F]", "[MASK]"]
    if PADDING[family] == 1:
        words[:2] = reversed(words[:2])
    ids = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, ids[word]) for word in ("[CLS]", "[SEP]")],
    )
    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "cls", "sep", "unk", "mask")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def checkpoint(family: str, head: str, folder: str | Path, **fields: Any) -> str:
    """Save a seeded tiny model and its tokenizer as plain upstream does; return the folder's name."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    shape |= {"vocab_size": 33, "pad_token_id": PADDING[family], "max_position_embeddings": 128}
    shape |= {"initializer_range": 0.2}
    if family == "Esm":
        shape |= {"mask_token_id": 32, "position_embedding_type": "rotary", "token_dropout": True}
    else:
        shape |= {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape | fields)
    getattr(transformers, f"{family}{head}")(config).save_pretrained(folder)
    tokenizer(family).save_pretrained(folder)
    return str(folder)


def piped(task: str, family: str, head: str, *inputs: Any, options: Any = None, **fields: Any) -> Any:
    """Return what a pipeline, built by name of a folder, makes of the inputs."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = transformers.pipeline(task, model=checkpoint(family, head, folder, **fields), device="cpu")
        return pipe(*inputs, **(options or {}))


def scores(found: Any) -> Numbers:
    """Return every score in what a pipeline returns."""
    if isinstance(found, dict):
        own = found.get("scores", found.get("score", []))
        return [torch.tensor(own)]
    return [x for part in found for x in scores(part)]


# Pipelines


@program()
def text_classification(family: str) -> Numbers:
    return scores(piped("text-classification", family, "ForSequenceClassification", TEXTS))


@program()
def token_classification(family: str) -> Numbers:
    options = {"aggregation_strategy": "simple"}
    return scores(piped("token-classification", family, "ForTokenClassification", TEXTS, options=options))


@program()
def zero_shot(family: str) -> Numbers:
    labels = {
        "label2id": {"entailment": 0, "contradiction": 1},
        "id2label": {0: "entailment", 1: "contradiction"},
    }
    given = TEXTS, ["w1", "w2 w3"]
    return scores(piped("zero-shot-classification", family, "ForSequenceClassification", *given, **labels))


@program(DEBERTAS)
def question_answering(family: str) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        name = checkpoint(family, "ForQuestionAnswering", folder)
        if "question-answering" in transformers.pipelines.SUPPORTED_TASKS:
            pipe = transformers.pipeline("question-answering", model=name, device="cpu")
            return scores(pipe(question="w1 w2", context=" ".join(TEXTS)))
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(name)
        words = transformers.AutoTokenizer.from_pretrained(name)
        with torch.no_grad():
            output = model(**words("w1 w2", " ".join(TEXTS), return_tensors="pt"))
        return [output.start_logits, output.end_logits]


@program()
def fill_mask(family: str) -> Numbers:
    return scores(piped("fill-mask", family, "ForMaskedLM", "w1 w2 [MASK] w4"))


@program()
def feature_extraction(family: str) -> Numbers:
    return [torch.tensor(x) for x in piped("feature-extraction", family, "Model", TEXTS)]


# Loading


@program()
def device_map(family: str) -> Numbers:
    """`device_map="auto"` over the CPU and the disk: the numbers of the whole model in memory."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as offload:
        name = checkpoint(family, "ForSequenceClassification", folder)
        room = int(0.8 * Path(folder, "model.safetensors").stat().st_size)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, device_map="auto", max_memory={"cpu": room}, offload_folder=offload
        )
        assert set(model.hf_device_map.values()) == {"cpu", "disk"}, model.hf_device_map
        whole = type(model).from_pretrained(name)
        batch = tokenizer(family)(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            found, expected = model(**batch).logits, whole(**batch).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        return [found]


@program()
def torchao(family: str) -> Numbers:
    """Weights in int8 by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig

    with tempfile.TemporaryDirectory() as folder:
        name = checkpoint(family, "ForSequenceClassification", folder)
        settings = transformers.TorchAoConfig(Int8WeightOnlyConfig())
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, quantization_config=settings, dtype=torch.float32
        )
        assert type(model.base_model.encoder.layer[0].intermediate.dense.weight) is not torch.nn.Parameter
        with torch.no_grad():
            return [model(**tokenizer(family)(TEXTS, padding=True, return_tensors="pt")).logits]


# Other people's models around these


@program()
def sentence_transformer(family: str) -> Numbers:
    """`SentenceTransformer(name)`: a training step, then `encode`."""
    from sentence_transformers import InputExample, SentenceTransformer, losses

    with tempfile.TemporaryDirectory() as folder:
        name = checkpoint(family, "Model", folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = SentenceTransformer(name, device="cpu")
        before = torch.tensor(model.encode(TEXTS))
        loss = losses.CosineSimilarityLoss(model)
        examples = [InputExample(texts=TEXTS[:2], label=0.3), InputExample(texts=TEXTS[1:], label=0.8)]
        features, labels = model.smart_batching_collate(examples)
        value = loss(features, labels)
        step(model, value)
        return [before, value.detach(), torch.tensor(model.encode(TEXTS))]


@program()
def cross_encoder(family: str) -> Numbers:
    """`CrossEncoder(name)`: a training step, then `predict`."""
    from sentence_transformers import CrossEncoder

    with tempfile.TemporaryDirectory() as folder:
        fields = {"num_labels": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = CrossEncoder(checkpoint(family, "ForSequenceClassification", folder, **fields), device="cpu")
        pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2])]
        before = torch.tensor(model.predict(pairs))
        batch = model.tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
        value = model.model(**batch, labels=torch.tensor([0.0, 1.0])).loss
        step(model.model, value)
        return [before, value.detach(), torch.tensor(model.predict(pairs))]


def step(model: Any, loss: Tensor) -> None:
    """Take a step of gradient descent."""
    loss.backward()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer.step()
    optimizer.zero_grad()


@program(("DebertaV2",))
def gliner(family: str) -> Numbers:
    """A GLiNER built from a tiny configuration: what it finds, and a training step."""
    from gliner import GLiNER, GLiNERConfig

    with tempfile.TemporaryDirectory() as folder:
        name = checkpoint(family, "Model", folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        torch.manual_seed(0)
        settings = GLiNERConfig(model_name=name, hidden_size=64, max_width=3, dropout=0.0, fine_tune=True)
        model = GLiNER.from_config(settings, backbone_from_pretrained=True).eval()
        found = model.predict_entities(TEXTS[0], ["w7", "w8"], threshold=0.0)
        given = [
            {"tokenized_text": text.split(), "ner": [[0, 1, "w7"]], "ner_labels": ["w7", "w8"]}
            for text in TEXTS
        ]
        batch = next(
            iter(torch.utils.data.DataLoader(given, batch_size=3, collate_fn=gliner_collator(model)))
        )
        output = model.model(**{k: x for k, x in batch.items() if isinstance(x, Tensor)})
        step(model.model, output.loss)
        after = model.predict_entities(TEXTS[0], ["w7", "w8"], threshold=0.0)
        return [*scores(found), output.loss.detach(), *scores(after)]


def gliner_collator(model: Any) -> Any:
    from gliner.data_processing.collator import SpanDataCollator

    return SpanDataCollator(model.config, data_processor=model.data_processor, prepare_labels=True)


@program()
def setfit(family: str) -> Numbers:
    """SetFit: an epoch of few-shot training, then probabilities."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        name = checkpoint(family, "Model", folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = SetFitModel.from_pretrained(name, device="cpu")
        data = Dataset.from_dict({"text": TEXTS * 2, "label": [0, 1, 0, 0, 1, 0]})
        arguments = TrainingArguments(f"{folder}/out", batch_size=4, num_epochs=1, seed=0, report_to="none")
        Trainer(model=model, args=arguments, train_dataset=data).train()
        return [torch.as_tensor(model.predict_proba(TEXTS), dtype=torch.float32)]


@program()
def adapters(family: str) -> Numbers:
    """Adapters: a LoRA adapter added by the library's own plug-in interface, and a training step."""
    import adapters as library

    projections = {
        "Deberta": {"attn_qkv_proj": "self.in_proj"},
        "DebertaV2": {f"attn_{x[0]}_proj": f"self.{x}_proj" for x in ("query", "key", "value")},
        "Esm": {f"attn_{x[0]}_proj": f"self.{x}" for x in ("query", "key", "value")},
    }[family]
    interface = library.AdapterModelInterface(
        adapter_methods=["bottleneck", "lora", "reft", "invertible"],
        model_embeddings="embeddings.word_embeddings" if family == "Esm" else "embeddings",
        model_layers="encoder.layer",
        layer_self_attn="attention",
        layer_cross_attn=None,
        attn_o_proj="output.dense",
        layer_intermediate_proj="intermediate.dense",
        layer_output_proj="output.dense",
        **projections,
    )
    with tempfile.TemporaryDirectory() as folder:
        fields = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "embedding_size": 64}
        name = checkpoint(family, "ForSequenceClassification", folder, **fields)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(name)
    found: Numbers = []
    library.init(model, interface=interface)
    for method in ("lora", "seq_bn"):
        torch.manual_seed(0)
        model.add_adapter(method, config=method)
        model.train_adapter(method)
        model.train()
        batch = tokenizer(family)(TEXTS, padding=True, return_tensors="pt")
        loss = model(**batch, labels=torch.tensor([0, 1, 0])).loss
        step(model, loss)
        with torch.no_grad():
            found = [*found, loss.detach(), model.eval()(**batch).logits]
    return found


def compared(name: str, family: str) -> str:
    """Run a program plainly and under `install()`; return what became of it.

    Raises:
        AssertionError: the numbers differ, or only upstream gives any.
    """
    _, run = PROGRAMS[name]
    expected, error = None, ""
    try:
        expected = run(family)
    except (NotImplementedError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}".partition("\n")[0]
    with under.installed():
        found = run(family)
    if expected is None:
        return f"runs under install(), where upstream fails: {error}"
    assert len(found) == len(expected) > 0
    difference = max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True))
    assert difference <= TOLERANCE, f"the numbers differ by {difference:.1e}"
    return f"equal to {difference:.1e}"


def main() -> int:
    name, family, *options = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options == ["--plain"]:
        PROGRAMS[name][1](family)
    else:
        print(compared(name, family))
    return 0


if __name__ == "__main__":
    sys.exit(main())
