"""`transformers.pipeline` and Sentence Transformers, handed our models."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

transformers = pytest.importorskip("transformers", reason="has the pipelines")
TEXTS = ["a b c d e", "b b"]


@pytest.fixture
def tokenizer() -> Any:
    """One token a word, in the vocabulary of the tiny models."""
    special = ["<pad>", "<cls>", "<eos>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *"abcdefgh", "<mask>"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.fixture(params=list(tiny.CONFIGS))
def family(request: pytest.FixtureRequest, tokenizer: Any) -> str:
    return request.param


def model_for(family: str, head: str, tokenizer: Any) -> Any:
    special = {"pad_token_id": 0, "mask_token_id": tokenizer.mask_token_id} if family == "Esm" else {}
    return tiny.model(f"{family}{head}", vocab_size=len(tokenizer), **special)


@pytest.mark.parametrize("batched", [False, True])
def test_text_classification(family: str, tokenizer: Any, batched: bool) -> None:
    model = model_for(family, "ForSequenceClassification", tokenizer)
    expected = [model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0] for text in TEXTS]
    classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    found = classify(TEXTS, batch_size=2) if batched else classify(TEXTS)
    for row, scores in zip(found, expected, strict=True):
        by_label = {entry["label"]: entry["score"] for entry in row}
        assert by_label == pytest.approx({f"LABEL_{i}": p.item() for i, p in enumerate(scores)}, abs=1e-5)


def test_fill_mask(family: str, tokenizer: Any) -> None:
    model = model_for(family, "ForMaskedLM", tokenizer)
    fill = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
    text = "a b <mask> d"
    best = model(**tokenizer(text, return_tensors="pt"))["logits"][0, 2].argmax().item()
    assert fill(text, top_k=1)[0]["token"] == best


def test_sentence_embeddings(family: str, tokenizer: Any) -> None:
    reason = "embeds sentences: pip install 'outplace[compat]'"
    library = pytest.importorskip("sentence_transformers", reason=reason)
    from sentence_transformers.base.modules import InputModule
    from sentence_transformers.sentence_transformer.modules import Pooling

    class Encoder(InputModule):  # type: ignore[misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.tokenizer = model, tokenizer

        def preprocess(self, inputs: list[str], prompt: str | None = None, **options: Any) -> Any:
            return self.tokenizer(inputs, padding=True, return_tensors="pt")

        def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
            states = self.model(features["input_ids"], features["attention_mask"]).last_hidden_state
            return features | {"token_embeddings": states}

        def save(self, output_path: str, *args: Any, **options: Any) -> None:
            self.model.save_pretrained(output_path)

    model = model_for(family, "Model", tokenizer)
    embed = library.SentenceTransformer(modules=[Encoder(model), Pooling(32)], device="cpu")
    for text, found in zip(TEXTS, embed.encode(TEXTS), strict=True):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(torch.from_numpy(found), states[0].mean(0), rtol=1e-4, atol=1e-5)
