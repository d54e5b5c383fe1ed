"""What holds of the Triton kernels, on a CUDA device or under Triton's interpreter.

`test_triton.py` runs this file in a process of its own, since Triton decides when it is imported.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from outplace.models.attention import fused, masks
from outplace.models.attention.disentangled import eager_attention, log_bucket, slots
from outplace.models.attention.fused import Blocks, triton_attention
from outplace.models.attention.slots import SlotTable
from torch import Tensor
from torch.func import vmap

import outplace

INTERPRETED = fused.is_interpreted()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HEADS, BATCH, SCALE = 2, 2, 7.0


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, tiles that short sequences have several of, and that are not square."""
    if INTERPRETED:
        for blocks, tile in ((fused.FORWARD, Blocks(64, 32, 4, 1)), (fused.BACKWARD, Blocks(32, 64, 4, 1))):
            for key in blocks:
                monkeypatch.setitem(blocks, key, tile)


@pytest.fixture(autouse=True, scope="session")
def multiply_bfloat16() -> None:
    """Triton 3.9's interpreter holds bfloat16 as the bits of integers, and multiplies those."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot


def table(length: int, span: int, buckets: bool) -> SlotTable:
    distance = torch.arange(1 - length, length, device=DEVICE)
    return SlotTable.of(slots(log_bucket(distance, span, 2 * span) if buckets else distance, span), 2 * span)


def tensors(shape: tuple[int, ...], rows: int, terms: str) -> list[Tensor | None]:
    """Query, key and value of a shape, and the position tables of the terms; float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape] * 3 + [(HEADS, rows, shape[-1]) if x in terms else None for x in ("c2p", "p2c")]
    return [
        None if x is None else torch.randn(x, generator=generator, dtype=torch.float64).to(DEVICE)
        for x in shapes
    ]


def a_mask(kind: str, length: int) -> Tensor | None:
    place, rows = torch.arange(length), torch.tensor([[0], [1]])
    found = {
        "none": None,
        "padded": (rows == 0) | (place < max(length // 2, 1)),
        "padded on the left": (rows == 0) | (place >= length // 2),
        "holes": (rows == 0) | (place % 3 > 0),
        "all padding": (rows == 0).expand(2, length).contiguous(),
    }[kind]
    return None if found is None else found.to(DEVICE)


def with_gradients(run: Any, inputs: list[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """What a function makes of the inputs, and the gradients of an objective that weighs it unevenly."""
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in inputs]
    context = run(*leaves)
    weights = torch.linspace(-1, 1, context.numel(), device=DEVICE).view(context.shape).to(dtype)
    present = [x for x in leaves if x is not None]
    return [context.detach(), *torch.autograd.grad((context * weights).sum(), present)]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference over the largest magnitude of each, or 0.1: gradients of a single key are zero."""
    assert all(a.shape == b.shape for a, b in zip(found, expected, strict=True))
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=0.1))
        for a, b in zip(found, expected, strict=True)
    )


def both(
    places: SlotTable, mask: Tensor | None, inputs: list[Tensor | None], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The kernels' results and eager's in a dtype, and eager's in float64."""

    def eager(*x: Any) -> Tensor:
        return eager_attention(*x, places.pairs(), masks.pair_mask(mask), SCALE, 0.0)[0].transpose(1, 2)

    found = with_gradients(lambda *x: triton_attention(*x, places, mask, SCALE, 0.0), inputs, dtype)
    return found, with_gradients(eager, inputs, dtype), with_gradients(eager, inputs, torch.float64)


@pytest.mark.parametrize(
    ("length", "width", "span", "buckets", "terms", "mask"),
    [
        (1, 16, 3, True, "c2p p2c", "none"),
        (7, 128, 4, False, "c2p p2c", "padded"),
        (64, 32, 8, True, "c2p p2c", "all padding"),
        (130, 64, 6, True, "c2p p2c", "padded"),
        (130, 16, 256, False, "c2p p2c", "holes"),
        (130, 16, 24, False, "c2p", "padded on the left"),
        (130, 16, 5, True, "p2c", "padded on the left"),
        (130, 48, 3, True, "", "padded"),
        (200, 64, 16, True, "c2p p2c", "none"),
    ],
)
def test_outputs_and_gradients_are_those_of_eager_attention(
    length: int, width: int, span: int, buckets: bool, terms: str, mask: str
) -> None:
    places = table(length, span, buckets)
    inputs = tensors((BATCH, HEADS, length, width), places.rows, terms)
    found, _, expected = both(places, a_mask(mask, length), inputs, torch.float32)
    assert apart(found, expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64])
def test_lower_precision_is_as_near_to_float64_as_eager_is(dtype: torch.dtype, width: int) -> None:
    places = table(64, 6, buckets=True)
    inputs = tensors((BATCH, HEADS, 64, width), places.rows, "c2p p2c")
    exact = [None if x is None else x.to(dtype).double() for x in inputs]
    found, eager, expected = both(places, a_mask("padded", 64), exact, dtype)
    assert all(x.dtype == dtype for x in found)
    assert apart(found, expected) <= apart(eager, expected) + 8 * torch.finfo(dtype).eps


def test_half_precision_does_not_overflow_where_the_score_is_in_range() -> None:
    places = table(8, 4, buckets=False)
    ones = torch.ones(1, HEADS, 8, 16, dtype=torch.float16, device=DEVICE)
    tables = [torch.full((HEADS, places.rows, 16), 100.0, dtype=torch.float16, device=DEVICE)] * 2
    value = ones * torch.arange(16, device=DEVICE).half()
    context = triton_attention(ones * 100, ones * 100, value, *tables, places, None, 16.0, 0.0)
    assert torch.equal(context, value.transpose(1, 2))


def test_far_tiles_look_no_slot_up() -> None:
    """Wrong slots for distances that only tiles of one slot have change nothing."""
    tiles = max(x.queries + x.keys for blocks in (fused.FORWARD, fused.BACKWARD) for x in blocks.values())
    length = 2 * tiles
    places = table(length, 3, buckets=True)
    inputs = tensors((1, 2, length, 16), places.rows, "c2p p2c")
    near = torch.arange(1 - length, length, device=DEVICE).abs() < 6 + tiles
    wrong = SlotTable(
        torch.where(near, places.by_distance, 2), places.first, places.rows, places.low, places.high
    )
    found, expected = (
        with_gradients(lambda *x: triton_attention(*x, s, None, SCALE, 0.0), inputs, torch.float32)  # noqa: B023
        for s in (wrong, places)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not near.all()


def test_heads_computed_apart_are_those_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    places = table(40, 4, buckets=True)
    inputs = tensors((BATCH, HEADS, 40, 16), places.rows, "c2p p2c")

    def run(*x: Any) -> Tensor:
        torch.manual_seed(0)
        return triton_attention(*x, places, None, SCALE, 0.2)

    together = with_gradients(run, inputs, torch.float32)
    monkeypatch.setattr(fused, "TABLE_BYTES", 1)
    assert apart(with_gradients(run, inputs, torch.float32), [x.double() for x in together]) <= 1e-6


def test_packed_sequences_are_those_one_by_one() -> None:
    ends = [0, 7, 7, 57, 130]
    places = table(80, 6, buckets=True)
    inputs = tensors((1, HEADS, 130, 32), places.rows, "c2p p2c")
    mask = torch.arange(130, device=DEVICE)[None] % 9 > 0
    starts = torch.tensor(ends, dtype=torch.int64, device=DEVICE)

    def one_by_one(*x: Any) -> Tensor:
        found = []
        for begin, end in pairwise(ends):
            content = (rows[:, :, begin:end] for rows in x[:3])
            pairs = places.pairs()[: end - begin, : end - begin]
            seen = masks.pair_mask(mask[:, begin:end])
            context, _ = eager_attention(*content, *x[3:], pairs, seen, SCALE, 0.0)
            found.append(context.transpose(1, 2))
        return torch.cat(found, 1)

    found = with_gradients(
        lambda *x: triton_attention(*x, places, mask, SCALE, 0.0, starts), inputs, torch.float32
    )
    assert apart(found, with_gradients(one_by_one, inputs, torch.float64)) <= 1e-5


@pytest.mark.parametrize("mask", ["none", "padded"])
def test_dropout_drops_its_share_and_the_same_in_backward(mask: str) -> None:
    """Of the identity as value, the context is the weights: they tell what was dropped."""
    length, rate, given = 60, 0.3, a_mask(mask, 60)
    places = table(length, 4, buckets=True)
    inputs = tensors((BATCH, HEADS, length, 64), places.rows, "c2p p2c")

    def run(*x: Any) -> Tensor:
        torch.manual_seed(0)
        return triton_attention(*x, places, given, SCALE, rate)

    identity = torch.eye(length, 64, device=DEVICE).expand(BATCH, HEADS, -1, -1)
    single = [None if x is None else x.float() for x in inputs]
    weights = run(*single[:2], identity, *single[3:])[..., :length].transpose(1, 2)  # [B, H, L, L]
    kept = (weights > 0).double()

    def dropped(query: Tensor, key: Tensor, value: Tensor, *tables: Any) -> Tensor:
        plain = eager_attention(
            query, key, value, *tables, places.pairs(), masks.pair_mask(given), SCALE, 0.0
        )[1]
        return (plain * kept / (1 - rate) @ value).transpose(1, 2)

    found = with_gradients(run, inputs, torch.float32)
    assert apart(found, with_gradients(dropped, inputs, torch.float64)) <= 1e-5
    parts = kept[:1].flatten(0, 1)  # the sequence without padding
    assert abs(float(parts.mean()) - (1 - rate)) < 4 * (rate * (1 - rate) / parts.numel()) ** 0.5
    correlation = ((parts[0] - 1 + rate) * (parts[1] - 1 + rate)).mean() / (rate * (1 - rate))
    assert abs(float(correlation)) < 4 / length


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_operator_keeps_torchs_rules(dropout: float) -> None:
    places = table(20, 4, buckets=True)
    content = [None if x is None else x.float() for x in tensors((40, HEADS, 16), places.rows, "c2p")]
    leaves = [None if x is None else x.requires_grad_() for x in content]
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=DEVICE)
    mask = torch.arange(40, device=DEVICE) < 35
    low, high = places.low - 19, places.high - 19
    arguments = (*leaves, places.by_distance.int(), starts, mask, 20, low, high, SCALE, dropout, 5)
    torch.library.opcheck(fused.attention, arguments)


def test_gradients_of_gradients_are_refused() -> None:
    places = table(8, 4, buckets=True)
    inputs = [x if x is None else x.float().requires_grad_() for x in tensors((1, HEADS, 8, 16), 8, "")]
    context = triton_attention(*inputs, places, None, SCALE, 0.0)
    (gradient,) = torch.autograd.grad(context.sum(), inputs[2:3], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


# Models

FIELDS: dict[str, Any] = {
    "Deberta": {"num_hidden_layers": 1, "talking_head": False},
    "DebertaV2": {"num_hidden_layers": 1, "share_att_key": True},
}


@pytest.fixture(params=["Deberta", "DebertaV2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model(family: str, path: str = "triton") -> Any:
    return tiny.model(f"{family}Model", **FIELDS[family], attn_implementation=path).to(DEVICE)


def inputs_of(family: str) -> dict[str, Tensor]:
    return {name: x.to(DEVICE) for name, x in tiny.inputs(f"{family}Model", batch=2).items()}


def test_a_model_equals_eager(family: str) -> None:
    results = []
    for x in (model(family), model(family, "eager").double()):
        states = x(**inputs_of(family)).last_hidden_state
        weights = torch.linspace(-1, 1, states.numel(), device=DEVICE).view(states.shape)
        gradients = torch.autograd.grad(
            (states * weights).sum(), list(x.parameters()), materialize_grads=True
        )
        results.append([states.detach(), *gradients])
    assert apart(*results) <= 1e-5


def test_checkpointing_changes_no_gradient(family: str) -> None:
    gradients = []
    for checkpointed in (False, True):
        x = model(family).train()
        if checkpointed:
            x.gradient_checkpointing_enable()
        torch.manual_seed(0)
        x(**inputs_of(family)).last_hidden_state.square().sum().backward()
        gradients.append([p.grad for p in x.parameters() if p.grad is not None])
    assert apart(gradients[1], [g.double() for g in gradients[0]]) <= 1e-6


def test_a_packed_batch_equals_the_padded_one(family: str) -> None:
    x, inputs = model(family), inputs_of(family)  # the second row ends in padding
    real = inputs["attention_mask"].bool()
    packed, padded = (x(**inputs, pack=pack).last_hidden_state[real] for pack in (True, False))
    assert apart([packed.detach()], [padded.detach().double()]) <= 1e-5


def test_a_model_under_autocast_gives_eagers_dtype(family: str) -> None:
    states = []
    for path in ("triton", "eager"):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            states.append(model(family, path)(**inputs_of(family)).last_hidden_state)
    assert states[0].dtype == states[1].dtype
    assert torch.allclose(*(x.float() for x in states), atol=0.1)


def test_the_auditor_finds_no_write(family: str) -> None:
    report = outplace.audit(model(family).train(), **inputs_of(family))
    assert report.clean, str(report)
    assert report.backward


def test_what_the_kernels_cannot_do_is_an_error(family: str) -> None:
    x, inputs = model(family), inputs_of(family)
    with pytest.raises(ValueError, match="'triton' forms no weights"):
        x(**inputs, output_attentions=True)
    pairs = inputs["attention_mask"][:, None] * inputs["attention_mask"][:, :, None]
    with pytest.raises(ValueError, match=r"its masks are \[B, L\]"):
        x(inputs["input_ids"], pairs)
    with pytest.raises(ValueError, match="cannot be traced, compiled, exported or transformed"):
        vmap(lambda ids: x(ids[None]).last_hidden_state)(inputs["input_ids"])
    with pytest.raises(ValueError, match=r"float32, bfloat16, float16, not in torch\.float64"):
        x.double()(**inputs)


def test_auto_takes_the_kernels_on_cuda_alone(family: str) -> None:
    plan = model(family, "auto").attention_plan(1, 9)
    assert plan.path == ("triton" if DEVICE.type == "cuda" else "eager")
