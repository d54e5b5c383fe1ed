"""Disentangled attention by blocks: eager's numbers, in both directions, whatever the blocks."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outplace.benchmarks.memory import Ledger
from outplace.models.attention import blockwise, masks
from outplace.models.attention import slots as slot_tables
from outplace.models.attention.blockwise import blockwise_attention
from outplace.models.attention.disentangled import eager_attention, log_bucket, sdpa_attention, slots
from outplace.models.attention.dropout import COLUMNS, Noise
from outplace.models.attention.slots import SlotTable
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import outplace

HEADS, BATCH = 3, 2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that short sequences have several, of one head and of two."""
    monkeypatch.setattr(blockwise, "QUERIES", 8)
    monkeypatch.setattr(blockwise, "BLOCK", 400)
    for module in (blockwise, slot_tables):
        monkeypatch.setattr(module, "TILE", 2)


def table(length: int, span: int, buckets: bool) -> SlotTable:
    distance = torch.arange(1 - length, length)
    return SlotTable.of(slots(log_bucket(distance, span, 2 * span) if buckets else distance, span), 2 * span)


def tensors(length: int, width: int, slots: SlotTable, terms: str, seed: int = 0) -> list[Tensor | None]:
    """Query, key, value, and the position tables of the terms, in float64, as leaves."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, width, generator=generator, dtype=torch.float64).requires_grad_()

    content = [leaf(BATCH, HEADS, length) for _ in range(3)]
    return content + [leaf(HEADS, slots.rows) if term in terms else None for term in ("c2p", "p2c")]


def a_mask(kind: str, length: int) -> Tensor | None:
    """Padding on the right of one sequence, a sequence of padding alone, or pairs with an empty row."""
    real = torch.ones(BATCH, length, dtype=torch.bool)
    if kind == "none":
        return None
    if kind == "padded":
        return real & (torch.arange(length) < torch.tensor([[length], [max(length // 2, 1)]]))
    if kind == "all padding":
        return real & torch.tensor([[True], [False]])
    pairs = torch.rand(BATCH, length, length, generator=torch.Generator().manual_seed(1)) < 0.6
    return pairs & (torch.arange(length) > 0)[:, None]


def apart(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """Largest difference over the largest magnitude of each."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
    assert all(a is not None and a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs if a is not None)


def with_gradients(context: Tensor, inputs: list[Tensor | None]) -> list[Tensor | None]:
    """The context, and the gradients of an objective that weighs it unevenly."""
    weights = torch.linspace(-1, 1, context.numel(), dtype=context.dtype).view(context.shape)
    present = [x for x in inputs if x is not None]
    found = iter(torch.autograd.grad((context * weights).sum(), present))
    return [context.detach(), *(None if x is None else next(found) for x in inputs)]


@settings(max_examples=60)
@given(
    length=st.integers(1, 40),
    width=st.sampled_from([16, 32, 64, 128]),
    span=st.integers(3, 24),
    buckets=st.booleans(),
    terms=st.sampled_from(["", "c2p", "p2c", "c2p p2c"]),
    mask=st.sampled_from(["none", "padded", "all padding", "pairs"]),
    path=st.sampled_from([blockwise_attention, sdpa_attention]),
)
def test_outputs_and_gradients_equal_eager_ones_in_float64(
    length: int, width: int, span: int, buckets: bool, terms: str, mask: str, path: Any
) -> None:
    places, given_mask = table(length, span, buckets), a_mask(mask, length)
    inputs = tensors(length, width, places, terms)
    pairs, scale = (places.pairs(), masks.pair_mask(given_mask)), 7.0
    expected, _ = eager_attention(*inputs, *pairs, scale, 0.0)
    if path is blockwise_attention:
        found = blockwise_attention(*inputs, places, given_mask, scale, 0.0).transpose(1, 2)
    else:
        found = sdpa_attention(*inputs, *pairs, scale, 0.0)
    assert apart(with_gradients(found, inputs), with_gradients(expected, inputs)) <= 1e-11


@settings(max_examples=30)
@given(
    length=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    mask=st.sampled_from(["none", "padded", "all padding", "pairs"]),
    seed=st.integers(0, 100),
)
def test_lower_precision_is_as_near_to_float64_as_eager_is(
    length: int, dtype: torch.dtype, mask: str, seed: int
) -> None:
    places, given_mask = table(length, 6, buckets=True), a_mask(mask, length)
    exact = tensors(length, 16, places, "c2p p2c", seed)
    low = [x.detach().to(dtype).requires_grad_() for x in exact if x is not None]
    pairs = places.pairs(), masks.pair_mask(given_mask)
    target = with_gradients(eager_attention(*exact, *pairs, 7.0, 0.0)[0], exact)
    eager = with_gradients(eager_attention(*low, *pairs, 7.0, 0.0)[0], low)
    found = with_gradients(blockwise_attention(*low, places, given_mask, 7.0, 0.0).transpose(1, 2), low)
    assert all(x is not None and x.dtype == dtype for x in found)
    assert apart(found, target) <= 3 * apart(eager, target) + 8 * torch.finfo(dtype).eps


def test_half_precision_does_not_overflow_where_the_score_is_in_range() -> None:
    places = table(8, 4, buckets=False)
    ones = torch.ones(1, 1, 8, 16, dtype=torch.float16)
    big = [ones * 100, ones * 100, ones * torch.arange(16, dtype=torch.float16), None, None]
    context = blockwise_attention(*big, places, None, 16.0, 0.0)
    assert torch.equal(context, big[2].transpose(1, 2))


@pytest.mark.parametrize(("length", "span"), [(1, 3), (9, 3), (33, 3), (33, 5), (33, 64)])
def test_keys_in_the_alike_parts_have_one_slot_and_no_whole_tile_is_missed(length: int, span: int) -> None:
    places = table(length, span, buckets=True)
    of_pairs = places.pairs().flip(-1)  # keys backwards
    for start in range(0, length, 8):
        block = of_pairs[start : start + 8]
        a, b = places.alike(start, len(block))
        assert torch.equal(places.block(start, len(block), a, b - a), block[:, a:b])
        assert (block[:, :a] == 0).all()
        assert (block[:, b:] == places.rows - 1).all()
        low, high = ((block == slot).all(0).sum().item() for slot in (0, places.rows - 1))
        assert places.rows == 1 or (a, b) == (low // 2 * 2, min(-(-(length - high) // 2) * 2, length))
        tiles = -(-(b - a) // 2)
        windows = places.windows(start, len(block), a, tiles)
        for key in range(a, b):
            tile, j = divmod(key - a, 2)
            assert torch.equal(windows[tile, j : j + len(block)], block[:, key])


@pytest.mark.parametrize("span", [3, 8, 64])
def test_a_narrowed_table_reads_the_same_rows(span: int) -> None:
    distance = torch.arange(-19, 20)
    rows = slots(log_bucket(distance, span, 2 * span), span)
    narrow, whole = (SlotTable.of(rows, 2 * span, narrow) for narrow in (True, False))
    assert torch.equal(narrow.pairs() + narrow.first, whole.pairs())
    assert narrow.rows == len(rows.unique())
    assert (whole.first, whole.rows) == (0, 2 * span)


# Dropout


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    noise = Noise(0.3, seed=5)
    kept = noise.keep_mask(torch.empty(400, 501))
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert noise.share == pytest.approx(0.7, abs=2e-5)
    deviation = (0.7 * 0.3 / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - 0.7) < 4 * deviation


def test_dropped_entries_are_unrelated() -> None:
    """Neighbours along rows and columns, also of the random words, later masks, and other seeds."""
    first = Noise(0.5, seed=3)
    x = first.keep_mask(torch.empty(256, 512)) - 0.5
    word = 2 * COLUMNS // 512  # rows of x that a row of words fills
    others = [x.roll(1, 0), x.roll(1, 1), x.roll(2, 1), x.roll(word, 0), first.keep_mask(x) - 0.5]
    others += [Noise(0.5, seed=seed).keep_mask(x) - 0.5 for seed in (4, 3 + (71 << 40))]
    others += [x.roll((word, 1), (0, 1)), Noise(0.5, seed=4).keep_mask(x).roll((word, 2), (0, 1)) - 0.5]
    corners = 4 * x.roll(word, 0) * x.roll(2, 1) * x.roll((word, 2), (0, 1))
    for other in (*others, corners):
        assert abs(float((x * other).mean() / 0.25)) < 4 * x.numel() ** -0.5


def test_a_mask_is_the_same_for_the_same_seed_in_every_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        low, single = (
            Noise(0.4, seed=9).keep_mask(torch.empty(3, 7, dtype=d)) for d in (dtype, torch.float32)
        )
        assert low.dtype == dtype
        assert torch.equal(low.float(), single)


def test_attention_dropout_is_unbiased_and_fresh_at_each_call() -> None:
    places = table(16, 4, buckets=True)
    inputs = tensors(16, 16, places, "c2p p2c")
    torch.manual_seed(0)
    draws = torch.stack([blockwise_attention(*inputs, places, None, 7.0, 0.2) for _ in range(400)])
    plain = blockwise_attention(*inputs, places, None, 7.0, 0.0)
    error = draws.std(0) / 400**0.5
    assert ((draws.mean(0) - plain).abs() < 5 * error + 1e-9).all()
    assert not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize("mask", ["none", "padded", "all padding"])
def test_gradients_with_dropout_are_those_of_the_same_mask(mask: str) -> None:
    """Finite differences, each evaluation from one random state; second derivatives too."""
    places, given_mask = table(10, 3, buckets=True), a_mask(mask, 10)
    inputs = tensors(10, 4, places, "c2p p2c")

    def run(*arguments: Tensor) -> Tensor:
        torch.manual_seed(0)
        return blockwise_attention(*arguments, places, given_mask, 3.0, 0.3)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


# The plan, and the models on it

LONG = 260
V3 = {"position_buckets": 16, "max_relative_positions": 32, "share_att_key": True}
WIDE = {"max_position_embeddings": 512}


@pytest.fixture(params=["Deberta", "DebertaV2"])
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.param}Model"


def fields(name: str) -> dict[str, Any]:
    return WIDE | (V3 if name == "DebertaV2Model" else {"talking_head": False})


def both(name: str, path: str = "auto") -> tuple[Any, Any]:
    """A model on a path, and the same one spelt out."""
    return tuple(tiny.model(name, **fields(name), attn_implementation=path) for path in (path, "eager"))


def test_the_plan_says_what_is_taken_and_why(name: str) -> None:
    model, eager = both(name)
    assert model.attention_plan(1, LONG).path == "blockwise"
    assert model.attention_plan(1, 64) == outplace.AttentionPlan("eager", "64 tokens are fewer than 256")
    assert model.attention_plan(1, LONG, output_attentions=True).reason == "attention weights are asked for"
    assert eager.attention_plan(1, LONG).path == "eager"
    seen = []
    vmap(lambda x: (seen.append(model.attention_plan(1, LONG).path), x)[1])(torch.zeros(1))
    jvp(
        lambda x: (seen.append(model.attention_plan(1, LONG).path), x)[1], (torch.zeros(1),), (torch.ones(1),)
    )
    assert seen == ["eager", "eager"]


def test_nothing_looks_at_values_that_are_not_there(name: str) -> None:
    """On the meta device, under fake tensors, and where operators are recorded."""
    model, _ = both(name)
    ids = tiny.ids(1, LONG)
    recorded = make_fx(lambda x: model(x).last_hidden_state)(ids)
    assert torch.allclose(recorded(ids), model(ids).last_hidden_state, atol=1e-5)
    assert not any("as_strided" in str(node.target) for node in recorded.graph.nodes)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(ids)).last_hidden_state.shape == (1, LONG, 32)
    assert model.to("meta")(ids.to("meta")).last_hidden_state.is_meta


def test_talking_heads_and_esm_have_no_blocks() -> None:
    talking = tiny.model("DebertaModel", **WIDE)
    assert "talking heads" in talking.attention_plan(1, LONG).reason
    assert tiny.model("EsmModel").attention_plan(1, LONG).path == "sdpa"
    assert tiny.model("EsmModel").attention_plan(1, LONG, output_attentions=True).path == "eager"


@pytest.mark.parametrize("path", ["sdpa", "blockwise"])
def test_a_path_that_was_asked_for_and_cannot_is_an_error(name: str, path: str) -> None:
    model, _ = both(name, path)
    ids = tiny.ids(1, LONG)
    with pytest.raises(ValueError, match=f"'{path}' forms no weights"):
        model(ids, output_attentions=True)
    if path == "blockwise":
        with pytest.raises(ValueError, match="cannot be traced, compiled, exported or transformed"):
            vmap(lambda x: model(x[None]).last_hidden_state)(ids)


@pytest.mark.parametrize("path", ["sdpa", "blockwise", "auto"])
@pytest.mark.parametrize("mask", ["none", "padded", "all padding", "pairs"])
def test_a_model_on_each_path_equals_eager(name: str, path: str, mask: str) -> None:
    model, eager = (x.double() for x in both(name, path))
    ids, given_mask = tiny.ids(BATCH, LONG), a_mask(mask, LONG)
    outputs = [x(ids, given_mask, pack=False).last_hidden_state for x in (model, eager)]
    found, expected = (
        with_gradients(output, list(x.parameters()))
        for output, x in zip(outputs, (model, eager), strict=True)
    )
    assert apart(found, expected) <= 1e-9


def test_joining_what_position_adds_holds_nothing_else() -> None:
    """The widest tensor of a block of a long text is made when its parts alone are alive."""
    length, queries = 2400, 64
    slots = table(length, 16, buckets=False)
    query, key, value, pos_key, pos_query = (
        None if x is None else x.detach() for x in tensors(length, 16, slots, "c2p p2c")
    )
    assert query is not None
    call = blockwise.Call(query, key, value, pos_key, pos_query, slots, None, 1.0, 0.0, 0)  # type: ignore[arg-type]
    keys = blockwise.Keys(call, 0, slice(0, 1))
    start = length // 2
    low, high = slots.alike(start, queries)
    assert 0 < low < high < length
    ledger = Ledger(nn.Identity())
    ledger.name("inputs", [query, keys.key, keys.pos_key, keys.tiles, slots.by_distance])
    before = ledger.total
    with ledger.watching():
        ledger.start()
        keys.position(query[0, :1, start : start + queries], start)
    of_a_key = queries * query.element_size()
    joined, differing = length * of_a_key, (high - low) * of_a_key
    assert ledger.highest - before < 2 * joined + differing
