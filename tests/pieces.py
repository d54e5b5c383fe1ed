"""SentencePiece models trained on the spot, and texts that are hard for tokenizers."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

TEXTS = (Path(__file__).parent / "data" / "texts.txt").read_text(encoding="utf-8").splitlines()

KINDS: dict[str, dict[str, Any]] = {
    "nmt_nfkc": {},
    "byte fallback": {"vocab_size": 680, "byte_fallback": True},
    "identity": {"normalization_rule_name": "identity"},
    "symbols": {"user_defined_symbols": ["<u>", "ﬁx", "ight"], "control_symbols": ["<ctl>"]},
    "case folding": {"normalization_rule_name": "nmt_nfkc_cf"},
    "no space in front": {"add_dummy_prefix": False},
    "pieces over spaces": {"split_by_whitespace": False},
}

POOLS = (
    "ﬁ…½ＡＢｃ①\u00a0\u3000\u200b㎏ế각한가\u1161\u11a8﷽é\u0301\u0302\u0323ﾊﾟ",
    "abcdefghij   ",
    "\u200d👩🏽🏻❤️👨\ufe0f🇫🇷",
    "\t\n\x00\x01\x7f\u2028",
    "при これ日本語 م ن नि",
    "▁_-.,!?()[]<>{}\"'«»",
)


@dataclass(frozen=True)
class Trained:
    content: bytes
    processor: Any
    normalizer: Any


@cache
def train(kind: str) -> Trained:
    """A model of DeBERTa's special pieces (no mask), trained on texts of many languages."""
    options = {"vocab_size": 420, "normalization_rule_name": "nmt_nfkc", **KINDS[kind]}
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=written,
        pad_id=0,
        pad_piece="[PAD]",
        bos_id=1,
        bos_piece="[CLS]",
        eos_id=2,
        eos_piece="[SEP]",
        unk_id=3,
        unk_piece="[UNK]",
        minloglevel=2,
        num_threads=1,
        **options,
    )
    normalizer = sentencepiece.SentencePieceNormalizer(
        rule_name=options["normalization_rule_name"],
        add_dummy_prefix=False,
        escape_whitespaces=False,
        remove_extra_whitespaces=False,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return Trained(written.getvalue(), processor, normalizer)


def hard_texts(count: int, seed: int) -> list[str]:
    """Many scripts, emoji, control characters, marks that compose or do not, long words, and nothing."""
    rng = random.Random(seed)
    return [_hard_text(rng) for _ in range(count)]


def _hard_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(20)):
        kind = rng.random()
        if kind < 0.7:
            parts.append(rng.choice(rng.choice(POOLS)))
        elif kind < 0.9:
            line = rng.choice(TEXTS)
            begin = rng.randrange(len(line))
            parts.append(line[begin : begin + rng.randrange(30)])
        elif kind < 0.99:
            point = rng.randrange(1, 0x20000)
            parts.append(chr(point if not 0xD800 <= point < 0xE000 else 65))
        else:
            parts.append(rng.choice("aé日") * rng.randrange(1, 200))
    return "".join(parts)
