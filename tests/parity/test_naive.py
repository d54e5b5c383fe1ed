"""Attention in float64 against the formula itself, one query and one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from outplace.models.attention import masks
from outplace.models.attention.plan import Path
from outplace.models.deberta.blocks import AttentionContext
from outplace.models.esm.modeling import AttentionContext as EsmContext
from torch import Tensor, nn

import outplace

PATHS: tuple[Path, ...] = ("eager", "sdpa", "blockwise")  # the Triton kernels have no float64
LENGTH, SPAN = 11, 4
TERMS = [[], ["c2p"], ["p2c"], ["c2p", "p2c"]]
REAL = torch.tensor([[1] * LENGTH, [0, 0] + [1] * (LENGTH - 2), [1] * (LENGTH - 3) + [0] * 3]).bool()


SHAPE = {
    "vocab_size": 9,
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
RELATIVE = SHAPE | {"relative_attention": True, "max_relative_positions": SPAN}


def seeded(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
    return module.double().eval()


def states(rows: int = LENGTH) -> Tensor:
    return torch.randn(3, rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def attend(
    score: Callable[[int, int, int, int], float], value: Tensor, allowed: Callable[[int, int, int], bool]
) -> Tensor:
    """softmax over keys of score(b, h, i, j), weighting value [B, H, L, D], in plain loops."""
    batch, heads, length, width = value.shape
    out = torch.zeros(batch, length, heads * width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                keys = [j for j in range(length) if allowed(b, i, j)]
                # A query that may attend to nothing attends to all alike.
                scores = {j: score(b, h, i, j) for j in keys} or dict.fromkeys(range(length), 0.0)
                top = max(scores.values())
                total = sum(math.exp(s - top) for s in scores.values())
                for j, s in scores.items():
                    out[b, i, h * width : (h + 1) * width] += math.exp(s - top) / total * value[b, h, j]
    return out


def bucket(distance: int, buckets: int, limit: int, clamp: bool) -> int:
    if clamp:
        distance = max(1 - limit, min(limit - 1, distance))
    middle = buckets // 2
    if abs(distance) <= middle:
        return distance
    steps = math.log(abs(distance) / middle) / math.log((limit - 1) / middle) * (middle - 1)
    return int(math.copysign(math.ceil(steps - 1e-9) + middle, distance))


def slot(distance: int, span: int) -> int:
    return max(0, min(2 * span - 1, distance + span))


@torch.no_grad()
@pytest.mark.parametrize(("path", "talking_head"), [("eager", True), *((path, False) for path in PATHS)])
@pytest.mark.parametrize("terms", TERMS, ids="|".join)
def test_deberta_attention_is_the_formula(terms: list[str], path: Path, talking_head: bool) -> None:
    config = outplace.DebertaConfig(**RELATIVE, pos_att_type=terms, talking_head=talking_head)
    model = seeded(outplace.DebertaModel(config))
    encoder, attention = model.encoder, model.encoder.layer[0].attention.self
    hidden, width = states(), 6
    slots = encoder.slots(LENGTH, hidden.device)
    context = AttentionContext(path, REAL, slots)
    found, _ = attention(hidden, encoder.relative_embeddings(slots), None, context)

    heads = (hidden @ attention.in_proj.weight.t()).view(3, LENGTH, 2, 3, width).permute(3, 0, 2, 1, 4)
    query = heads[0] + attention.q_bias.view(2, 1, width)
    key, value = heads[1], heads[2] + attention.v_bias.view(2, 1, width)
    table = encoder.rel_embeddings.weight
    scale = math.sqrt(width * (1 + len(terms)))

    def one(b: int, h: int, i: int, j: int) -> float:
        row = table[slot(i - j, SPAN)]
        part = slice(h * width, (h + 1) * width)
        total = query[b, h, i] @ key[b, h, j]
        if "c2p" in terms:
            total = total + query[b, h, i] @ (attention.pos_proj.weight[part] @ row)
        if "p2c" in terms:
            total = total + key[b, h, j] @ (
                attention.pos_q_proj.weight[part] @ row + attention.pos_q_proj.bias[part]
            )
        return float(total) / scale

    def allowed(b: int, i: int, j: int) -> bool:
        return bool(REAL[b, i] and REAL[b, j])

    if not talking_head:
        expected = attend(one, value, allowed)
    else:
        expected = talk(
            one, value, allowed, attention.head_logits_proj.weight, attention.head_weights_proj.weight
        )
    assert (found - expected).abs().max() <= 1e-12


def talk(
    one: Callable[[int, int, int, int], float],
    value: Tensor,
    allowed: Callable[[int, int, int], bool],
    before: Tensor,
    after: Tensor,
) -> Tensor:
    """`attend` with the heads' scores mixed by `before`, and their weights by `after`."""
    batch, heads, length, width = value.shape
    identity = torch.eye(length, dtype=torch.float64)[None, None].expand(batch, heads, -1, -1)

    def mixed(b: int, h: int, i: int, j: int) -> float:
        return sum(float(before[h, g]) * one(b, g, i, j) for g in range(heads))

    flat = attend(mixed, identity, allowed)  # values that are one-hot give the weights themselves
    weights = flat.view(batch, length, heads, length).permute(0, 2, 1, 3)
    weights = torch.einsum("hg,bgij->bhij", after, weights)
    return (weights @ value).transpose(1, 2).reshape(batch, length, heads * width)


@torch.no_grad()
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("terms", TERMS, ids="|".join)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("buckets", "clamp"), [(-1, False), (4, False), (4, True)])
def test_deberta_v2_attention_is_the_formula(
    terms: list[str], path: Path, shared: bool, buckets: int, clamp: bool
) -> None:
    config = RELATIVE | {"max_relative_positions": SPAN if buckets < 1 else 8}
    config |= {"pos_att_type": terms, "share_att_key": shared, "position_buckets": buckets}
    model = seeded(
        outplace.DebertaV2Model(outplace.DebertaV2Config(**config, clamp_relative_positions=clamp))
    )
    encoder, attention = model.encoder, model.encoder.layer[0].attention.self
    hidden, width = states(), 6
    slots = encoder.slots(LENGTH, hidden.device)
    context = AttentionContext(path, REAL, slots)
    found, _ = attention(hidden, encoder.relative_embeddings(slots), None, context)

    def project(layer: nn.Linear, x: Tensor) -> Tensor:
        return (x @ layer.weight.t() + layer.bias).unflatten(-1, (2, width))

    query, key, value = (
        project(layer, hidden) for layer in (attention.query_proj, attention.key_proj, attention.value_proj)
    )
    span = buckets if buckets > 0 else SPAN
    table = encoder.rel_embeddings.weight
    assert len(table) == 2 * span
    scale = math.sqrt(width * (1 + len(terms)))
    pos_key = attention.key_proj if shared else getattr(attention, "pos_key_proj", None)
    pos_query = attention.query_proj if shared else getattr(attention, "pos_query_proj", None)

    def one(b: int, h: int, i: int, j: int) -> float:
        distance = bucket(i - j, buckets, 8, clamp) if buckets > 0 else i - j
        row = table[slot(distance, span)]
        total = query[b, i, h] @ key[b, j, h]
        if "c2p" in terms:
            total = total + query[b, i, h] @ project(pos_key, row)[h]
        if "p2c" in terms:
            total = total + key[b, j, h] @ project(pos_query, row)[h]
        return float(total) / scale

    expected = attend(one, value.transpose(1, 2), lambda b, i, j: bool(REAL[b, i] and REAL[b, j]))
    assert (found - expected).abs().max() <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("eager", [True, False])
def test_esm_attention_is_the_formula(eager: bool) -> None:
    config = outplace.EsmConfig(**SHAPE, position_embedding_type="rotary", pad_token_id=1)
    model = seeded(outplace.EsmModel(config))
    attention, hidden, width = model.encoder.layer[0].attention.self, states(), 6
    rotary = model.rotary_embeddings(torch.arange(LENGTH)[None])
    found, _ = attention(hidden, EsmContext(masks.key_mask(REAL), rotary, eager, False))
    frequency = [model.rotary_embeddings.inv_freq[d].item() for d in range(width // 2)]

    def project(layer: nn.Linear) -> Tensor:
        return (hidden @ layer.weight.t() + layer.bias).unflatten(-1, (2, width))

    query, key, value = (project(layer) for layer in (attention.query, attention.key, attention.value))

    def one(b: int, h: int, i: int, j: int) -> float:
        # Rotating both by their positions rotates one of them by the distance.
        total, half = 0.0, width // 2
        for d in range(half):
            q, k = complex(*query[b, i, h, [d, d + half]]), complex(*key[b, j, h, [d, d + half]])
            turn = complex(math.cos((i - j) * frequency[d]), math.sin((i - j) * frequency[d]))
            total += (q * turn * k.conjugate()).real
        return total / math.sqrt(width)

    expected = attend(one, value.transpose(1, 2), lambda b, i, j: bool(REAL[b, j]))
    assert (found - expected).abs().max() <= 1e-12
