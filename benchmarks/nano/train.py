"""Train `nano`, the ESM-2 checkpoint that ships with the package: `make nano`.

A working example on 477,000 parameters and three protein families, not a research model. Everything is
seeded. The figures that it prints are masked-residue perplexities on

* homologues: proteins of the three families, none above 50 % identity to any that was trained on;
* strangers: 16 proteins of other families (15 of UniRef50, and TEM-1 beta-lactamase), none trained on;

each against guessing the same residues by their frequencies in the training set. Neither is looked at before
training ends.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import outplace

DATA = Path(__file__).parent / "data"
FAMILIES = ("1a3a_1_A", "1xcr_1_A", "5ahw_1_A")
STRANGERS = ("some_proteins.fasta", "BLAT_ECOLX.fasta")
IDENTITY = 0.5
RESIDUES = "LAGVSERTIDPKQNFYMHWC"
SEED = 0
TRAINED_SHARE = 0.25
"""Share of residues that are targets in training: more than ESM-2's 15 %, as the proteins are few."""
DRAWN_SHARE = 0.2
"""Share of proteins replaced in training by draws from a random composition."""
SPREAD = 60.0
"""How near a random composition is to the training set's: the total of a Dirichlet distribution's counts."""

CONFIG = {
    "vocab_size": 33,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "hidden_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "intermediate_size": 320,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "emb_layer_norm_before": False,
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 1026,
}


@dataclass
class Split:
    """Sequences: to train on, homologues of those, and strangers to all."""

    train: list[str]
    homologues: list[str]
    strangers: list[str]


def read_alignment(path: Path) -> list[str]:
    """The rows of an a3m alignment, insertions in lower case and gaps kept."""
    with gzip.open(path, "rt") as file:
        return ["".join(block.split("\n")[1:]) for block in file.read().split(">")[1:]]


def read_proteins(path: Path) -> list[str]:
    return ["".join(block.split("\n")[1:]) for block in path.read_text().split(">")[1:]]


def identity(rows: list[str]) -> Tensor:
    """Share of equal residues among the columns that both of two aligned rows fill, [N, N]."""
    columns = ["".join(c for c in row if not c.islower()) for row in rows]
    codes = torch.tensor([[ord(c) for c in row] for row in columns], dtype=torch.uint8)
    filled = codes != ord("-")
    same = torch.stack([((codes == row) & filled).sum(1) for row in codes])
    both = torch.stack([(filled & (row != ord("-"))).sum(1) for row in codes])
    return same / both.clamp(min=1)


def load_split() -> Split:
    """One in ten of each family is held out, and what is too near to those is not trained on."""
    chooser = random.Random(SEED)
    split = Split([], [], [])
    for family in FAMILIES:
        rows = read_alignment(DATA / f"{family}.a3m.gz")
        held = chooser.sample(range(len(rows)), len(rows) // 10)
        near = (identity(rows)[:, held] > IDENTITY).any(1)
        proteins = [row.replace("-", "").upper() for row in rows]
        split.homologues += [proteins[i] for i in held]
        split.train += [protein for protein, close in zip(proteins, near.tolist(), strict=True) if not close]
    split.strangers = [protein for name in STRANGERS for protein in read_proteins(DATA / name)]
    return split


def frequencies(proteins: list[str]) -> dict[str, float]:
    """Share of each of the 20 residues, none of them zero."""
    counts = {residue: 1 + sum(protein.count(residue) for protein in proteins) for residue in RESIDUES}
    total = sum(counts.values())
    return {residue: count / total for residue, count in counts.items()}


def drawn(length: int, background: dict[str, float], chooser: random.Random) -> str:
    """A protein without order, of a random composition.

    Only the composition of its visible residues tells of the hidden ones, and that holds for strangers too.
    """
    composition = [chooser.gammavariate(SPREAD * share, 1.0) for share in background.values()]
    return "".join(chooser.choices(list(background), composition, k=length))


def masked(ids: Tensor, share: float, generator: torch.Generator, always: bool) -> tuple[Tensor, Tensor]:
    """Ids [B, L] with a share of the 20 residues replaced, and the labels of those, -100 elsewhere.

    All become masks where `always`; else 80 % do, 10 % another residue, 10 % stay, as ESM-2 was trained.
    """
    residues = (ids >= 4) & (ids < 4 + len(RESIDUES))
    chosen = residues & (torch.rand(ids.shape, generator=generator) < share)
    labels = torch.where(chosen, ids, -100)
    kind = torch.rand(ids.shape, generator=generator)
    other = torch.randint(4, 4 + len(RESIDUES), ids.shape, generator=generator)
    inputs = torch.where(chosen & (always | (kind < 0.8)), 32, ids)
    return torch.where(chosen & (kind >= 0.9) & torch.tensor(not always), other, inputs), labels


def batches(proteins: list[str], size: int, chooser: random.Random) -> Iterator[list[str]]:
    """Endless batches of proteins of like length."""
    while True:
        order = sorted(proteins, key=lambda protein: len(protein) + chooser.random() * 20)
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        chooser.shuffle(groups)
        yield from groups


@torch.no_grad()
def perplexities(
    model: outplace.EsmForMaskedLM,
    tokenizer: outplace.EsmTokenizer,
    proteins: list[str],
    background: dict[str, float],
    draws: int = 10,
) -> tuple[float, float]:
    """exp of the mean loss over the same masked residues, of the model and of the background.

    15 % of each protein's residues are masked, anew in each draw.
    """
    model.eval()
    generator = torch.Generator().manual_seed(SEED)
    log_frequencies = torch.tensor([background[residue] for residue in RESIDUES]).log()
    loss, guessed, count = 0.0, 0.0, 0
    for _ in range(draws):
        for start in range(0, len(proteins), 16):
            batch = tokenizer(proteins[start : start + 16], padding=True, return_tensors="pt")
            inputs, labels = masked(batch["input_ids"], 0.15, generator, always=True)
            targets = labels[labels >= 0]
            loss += model(inputs, batch["attention_mask"], labels=labels).loss.item() * len(targets)
            guessed -= log_frequencies[targets - 4].sum().item()
            count += len(targets)
    return math.exp(loss / count), math.exp(guessed / count)


def figures(
    model: outplace.EsmForMaskedLM, tokenizer: outplace.EsmTokenizer, split: Split
) -> dict[str, dict[str, float]]:
    """Perplexities of the model and of the background on what was not trained on; a uniform guess has 20."""
    background, found = frequencies(split.train), {}
    for name, proteins in (("homologues", split.homologues), ("strangers", split.strangers)):
        nano, guessed = perplexities(model, tokenizer, proteins, background)
        found[name] = {"proteins": len(proteins), "nano": round(nano, 2), "background": round(guessed, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "weights" / "nano")
    parser.add_argument("--results", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--steps", type=int, default=1600)
    args = parser.parse_args()
    # One thread: sums do not depend on the number of cores, and matrices this small gain little from more.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    split, tokenizer, chooser = load_split(), outplace.EsmTokenizer(), random.Random(SEED)
    sizes = {name: len(proteins) for name, proteins in vars(split).items()}
    print(f"proteins: {sizes}", flush=True)

    # Dropout in attention would keep it off its fast path, for half the speed.
    model = outplace.EsmForMaskedLM(outplace.EsmConfig(**CONFIG).replace(hidden_dropout_prob=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.98))
    warm = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            step / warm, 0.5 + 0.5 * math.cos(math.pi * max(step - warm, 0) / (args.steps - warm))
        ),
    )
    background, source = frequencies(split.train), batches(split.train, 32, chooser)
    generator, started = torch.Generator().manual_seed(SEED), time.perf_counter()
    for step in range(1, args.steps + 1):
        proteins = [
            drawn(len(protein), background, chooser) if chooser.random() < DRAWN_SHARE else protein
            for protein in next(source)
        ]
        batch = tokenizer(proteins, padding=True, return_tensors="pt")
        inputs, labels = masked(batch["input_ids"], TRAINED_SHARE, generator, always=False)
        loss = model.train()(inputs, batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    minutes = (time.perf_counter() - started) / 60

    results = figures(model, tokenizer, split)
    results["training"] = {
        "proteins": len(split.train),
        "steps": args.steps,
        "minutes": round(minutes, 1),
    }
    print(json.dumps(results, indent=2))
    model.config = outplace.EsmConfig(**CONFIG)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    if args.results:
        args.results.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
