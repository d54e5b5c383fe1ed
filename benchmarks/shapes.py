"""The published models' configurations, less what neither time nor memory depends on."""

from __future__ import annotations

from typing import Any

DEBERTA = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
V3 = DEBERTA | {
    "vocab_size": 128100,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu"}
ESM = {
    "vocab_size": 33,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "max_position_embeddings": 1026,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "emb_layer_norm_before": False,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def shape(width: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-base": ("Deberta", DEBERTA | shape(768, 12, 12) | {"vocab_size": 50265}),
    "deberta-large": ("Deberta", DEBERTA | shape(1024, 24, 16) | {"vocab_size": 50265}),
    "deberta-v3-xsmall": ("DebertaV2", V3 | shape(384, 12, 6)),
    "deberta-v3-small": ("DebertaV2", V3 | shape(768, 6, 12)),
    "deberta-v3-base": ("DebertaV2", V3 | shape(768, 12, 12)),
    "deberta-v3-large": ("DebertaV2", V3 | shape(1024, 24, 16)),
    "mdeberta-v3-base": ("DebertaV2", V3 | shape(768, 12, 12) | {"vocab_size": 251000}),
    "deberta-v2-xlarge": ("DebertaV2", V3 | shape(1536, 24, 24) | CONVOLUTION),
    "deberta-v2-xxlarge": ("DebertaV2", V3 | shape(1536, 48, 24) | CONVOLUTION),
    "esm2_t6_8M_UR50D": ("Esm", ESM | shape(320, 6, 20)),
    "esm2_t12_35M_UR50D": ("Esm", ESM | shape(480, 12, 20)),
    "esm2_t30_150M_UR50D": ("Esm", ESM | shape(640, 30, 20)),
    "esm2_t33_650M_UR50D": ("Esm", ESM | shape(1280, 33, 20)),
    "esm2_t36_3B_UR50D": ("Esm", ESM | shape(2560, 36, 40)),
    "esm2_t48_15B_UR50D": ("Esm", ESM | shape(5120, 48, 40)),
}
"""The family and the configuration, by the repository's name."""
