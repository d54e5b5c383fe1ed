"""The main job on real proteins, in under two minutes: embed, fill masks, fine-tune."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from outplace.weights import nano
from safetensors import safe_open
from torch import Tensor

import outplace
from outplace.fasta import read_fasta

# NumPy is none of the requirements, which torch remarks on.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

PROTEINS = Path(__file__).parents[1] / "benchmarks" / "nano" / "data" / "some_proteins.fasta"
HELD_OUT = Path(__file__).parent / "held_out.fasta"


def embed() -> None:
    print(f"1. Embed {PROTEINS.name} with nano: one vector a protein")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "embeddings.safetensors"
        command = [sys.executable, "-m", "outplace.cli", "embed", str(PROTEINS), "-o", str(out)]
        subprocess.run(command, check=True)
        with safe_open(out, "pt") as file:
            names = [record.name for record in read_fasta(PROTEINS)]
            vectors = torch.stack([file.get_tensor(name) for name in names])
    near = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    near = near.masked_fill(torch.eye(len(names), dtype=torch.bool), -1)
    first, second = divmod(int(near.argmax()), len(names))
    print(
        f"   {len(names)} vectors of {vectors.shape[1]}; nearest pair: {names[first]} and {names[second]}\n"
    )


@torch.no_grad()
def fill(tokenizer: outplace.EsmTokenizer) -> None:
    print("2. Fill masked residues of a protein that was held out of nano's training")
    model = outplace.EsmForMaskedLM.from_pretrained(nano.path())
    (record,) = read_fasta(HELD_OUT)
    ids = tokenizer(record.sequence, return_tensors="pt")["input_ids"]
    places = torch.arange(5, ids.shape[1] - 1, 10)
    masked = ids.index_fill(1, places, tokenizer.mask_token_id)
    probabilities = model(masked).logits[0, places].softmax(-1)
    truth = ids[0, places]
    chance = probabilities.gather(-1, truth[:, None])[:, 0]
    guesses = probabilities.topk(3).indices
    print(f"   {record.name}, {len(record.sequence)} residues, {len(places)} masked")
    for place, true, p, guess in list(zip(places.tolist(), truth, chance, guesses, strict=True))[:8]:
        shown = " ".join(tokenizer.convert_ids_to_tokens(guess.tolist()))
        print(f"   residue {place:>3}: true {tokenizer.decode([int(true)])} (p = {p:.3f}), predicted {shown}")
    hits = (guesses == truth[:, None]).any(-1).sum()
    perplexity = chance.log().mean().neg().exp()
    print(f"   true residue among the first three: {hits} of {len(places)}; perplexity {perplexity:.1f}\n")


def families(tokenizer: outplace.EsmTokenizer) -> tuple[dict[str, Tensor], Tensor]:
    """Windows of two proteins, told apart by which they come from."""
    first, second, *_ = sorted(read_fasta(PROTEINS), key=lambda record: -len(record.sequence))
    windows, labels = [], []
    for label, record in enumerate((first, second)):
        for start in range(0, len(record.sequence) - 40, 12):
            windows.append(record.sequence[start : start + 40])
            labels.append(label)
    return tokenizer(windows, padding=True, return_tensors="pt"), torch.tensor(labels)


def fine_tune(model: Any, batch: dict[str, Tensor], labels: Tensor, steps: int = 20) -> None:
    """Frozen embeddings, gradient checkpointing: what upstream's in-place operations used to break."""
    model.get_input_embeddings().requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"   {type(model).__name__}: loss {losses[0]:.3f} before, {losses[-1]:.3f} after {steps} steps")


def main() -> None:
    torch.manual_seed(0)
    tokenizer = outplace.EsmTokenizer.from_pretrained(nano.path())
    embed()
    fill(tokenizer)
    print(
        "3. Fine-tune on 40-residue windows of two proteins, embeddings frozen, with gradient checkpointing"
    )
    batch, labels = families(tokenizer)
    fine_tune(outplace.EsmForSequenceClassification.from_pretrained(nano.path()), batch, labels)
    config = outplace.DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        relative_attention=True,
        pos_att_type="c2p|p2c",
        position_buckets=16,
        max_relative_positions=64,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    fine_tune(outplace.DebertaV2ForSequenceClassification(config), batch, labels)


if __name__ == "__main__":
    main()
