"""The published shapes, with random weights: saved by upstream, loaded by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import outplace

from .compare import outputs_apart

_V2 = {
    "relative_attention": True,
    "position_buckets": 256,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "max_position_embeddings": 512,
    "vocab_size": 128100,
}
_ESM = {
    "vocab_size": 33,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "emb_layer_norm_before": False,
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def shape(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-base": (
        "Deberta",
        shape(768, 12, 12, 3072)
        | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    ),
    "deberta-v2-xlarge, two layers": (
        "DebertaV2",
        shape(1536, 2, 24, 6144) | _V2 | {"conv_kernel_size": 3, "conv_act": "gelu"},
    ),
    "deberta-v3-small": ("DebertaV2", shape(768, 6, 12, 3072) | _V2),
    "esm2_t6_8M": ("Esm", shape(320, 6, 20, 1280) | _ESM),
    "esm2_t12_35M": ("Esm", shape(480, 12, 20, 1920) | _ESM),
}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_saved_by_upstream_equals_it_here(name: str, tmp_path: Path) -> None:
    family, fields = PUBLISHED[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    theirs = getattr(transformers, f"{family}ForMaskedLM")(config).eval()
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours = getattr(outplace, f"{family}ForMaskedLM").from_pretrained(
        tmp_path, strict=True, attn_implementation="eager"
    )
    for length in (64, 600) if name != "deberta-v2-xlarge, two layers" else (64,):
        ids = torch.randint(4, fields.get("vocab_size", 50265), (2, length))
        mask = torch.ones_like(ids)
        mask[1, length // 2 :] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}
        assert outputs_apart(ours(**inputs), theirs(**inputs)) <= 2e-6


def goldens() -> list[dict[str, Any]]:
    return json.loads((Path(__file__).parent / "goldens.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.hub
@torch.no_grad()
@pytest.mark.parametrize("golden", goldens(), ids=lambda golden: f"{golden['checkpoint']}-{golden['class']}")
def test_published_checkpoints_give_the_published_numbers(golden: dict[str, Any]) -> None:
    model = getattr(outplace, golden["class"]).from_pretrained(golden["checkpoint"], dtype="float32")
    ids = torch.tensor(golden["input_ids"])
    # The numbers were made without inferring padding from the ids.
    mask = torch.tensor(golden["attention_mask"] or torch.ones_like(ids).tolist())
    output = model(ids, mask)[0]
    rows, columns = (slice(*golden[part]) for part in ("rows", "columns"))
    assert torch.allclose(output[:, rows, columns], torch.tensor(golden["expected"]), rtol=1e-4, atol=1e-4)
