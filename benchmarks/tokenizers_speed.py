"""Seconds to tokenize a batch, here and in transformers, side by side.

`python benchmarks/tokenizers_speed.py` prints a table; `--out` writes the figures as JSON. The vocabularies
are trained on the spot; the texts are of many languages, and proteins, padded, and cut to 128 tokens,
which cuts some. Each figure is the median of interleaved repeats.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data"
OPTIONS: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 128}
RESIDUES = "LAGVSERTIDPKQNFYMHWC"


def texts() -> dict[str, list[str]]:
    """Batches of 256 texts."""
    lines = (DATA / "texts.txt").read_text(encoding="utf-8").splitlines()
    english = [lines[0][i % 60 :] for i in range(256)]
    mixed = [lines[i % len(lines)] for i in range(256)]
    proteins = [RESIDUES[i % 20 :] * (2 + i % 9) for i in range(256)]
    sentences = [text[60:110] for text in english]
    return {"sentences": sentences, "English": english, "twelve languages": mixed, "proteins": proteins}


def save_vocabularies(folder: Path) -> None:
    """`v1`, `v2` and `esm` in a folder, as upstream's tokenizers load them."""
    import sentencepiece
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    import outplace

    lines = (DATA / "texts.txt").read_text(encoding="utf-8").splitlines()
    for name in ("v1", "v2", "esm"):
        (folder / name).mkdir()
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    backend.train_from_iterator(
        lines, BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
    )
    backend.model.save(str(folder / "v1"))
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=420,
        normalization_rule_name="nmt_nfkc",
        pad_id=0,
        pad_piece="[PAD]",
        bos_id=1,
        bos_piece="[CLS]",
        eos_id=2,
        eos_piece="[SEP]",
        unk_id=3,
        unk_piece="[UNK]",
        minloglevel=2,
    )
    (folder / "v2" / "spm.model").write_bytes(written.getvalue())
    outplace.EsmTokenizer().save_pretrained(folder / "esm")


def measure(repeats: int) -> list[dict[str, Any]]:
    import transformers

    import outplace

    rows = []
    batches = texts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_vocabularies(folder)
        for kind, cls, batch in (
            ("v1", "DebertaTokenizer", "sentences"),
            ("v1", "DebertaTokenizer", "English"),
            ("v1", "DebertaTokenizer", "twelve languages"),
            ("v2", "DebertaV2Tokenizer", "sentences"),
            ("v2", "DebertaV2Tokenizer", "English"),
            ("v2", "DebertaV2Tokenizer", "twelve languages"),
            ("esm", "EsmTokenizer", "proteins"),
        ):
            sides = {
                library.__name__: getattr(library, cls).from_pretrained(folder / kind)
                for library in (transformers, outplace)
            }
            seconds: dict[str, list[float]] = {library: [] for library in sides}
            for _ in range(repeats + 1):
                for library, tokenizer in sides.items():
                    begin = time.perf_counter()
                    tokenizer(batches[batch], **OPTIONS)
                    seconds[library].append(time.perf_counter() - begin)
            medians = {library: statistics.median(found[1:]) for library, found in seconds.items()}
            ratio = medians["outplace"] / medians["transformers"]
            rows.append({"tokenizer": cls, "texts": batch, "seconds": medians, "ours / upstream": ratio})
    return rows


def main() -> None:
    import tokenizers
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = measure(arguments.repeats)
    print("| tokenizer | texts | transformers, ms | outplace, ms | ours / upstream |")
    print("| --- | --- | ---: | ---: | ---: |")
    for row in rows:
        ours, theirs = (1000 * row["seconds"][library] for library in ("outplace", "transformers"))
        ratio = row["ours / upstream"]
        print(f"| {row['tokenizer']} | {row['texts']} | {theirs:.1f} | {ours:.1f} | {ratio:.2f} |")
    if arguments.out is not None:
        versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
        found = {"versions": versions, "cpus": os.cpu_count(), "repeats": arguments.repeats, "rows": rows}
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
