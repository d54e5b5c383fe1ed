"""Packing: what is computed without padding is what is computed with it, in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from outplace.models import packing
from outplace.models.attention import blockwise, dense, plan
from torch import Tensor
from torch.export import Dim
from torch.func import vmap

import outplace
from outplace.auditor import audit

TOKEN_LEVEL = [
    name
    for name in tiny.CLASSES
    if name.endswith(("ForMaskedLM", "ForTokenClassification")) or name in ("DebertaModel", "DebertaV2Model")
]
FIRST_TOKEN = [
    name
    for name in tiny.CLASSES
    if name.endswith(("ForSequenceClassification", "ForMultipleChoice")) or name == "EsmModel"
]
SPANS = [name for name in tiny.CLASSES if name.endswith("ForQuestionAnswering")]
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "Deberta": {
        "": {},
        "no talking head": {"talking_head": False},
        "blockwise": {"talking_head": False, "attn_implementation": "blockwise"},
        "sdpa": {"talking_head": False, "attn_implementation": "sdpa"},
        "no relative attention": {"relative_attention": False},
    },
    "DebertaV2": {
        "": {},
        "blockwise": {"attn_implementation": "blockwise"},
        "sdpa": {"attn_implementation": "sdpa"},
        "shared keys, token types": {"share_att_key": True, "type_vocab_size": 2},
        "wide convolution": {"conv_kernel_size": 5, "conv_groups": 4},
        "no absolute positions": {"position_biased_input": False, "conv_kernel_size": 0},
    },
    "Esm": {
        "": {},
        "eager": {"attn_implementation": "eager"},
        "absolute": {"position_embedding_type": "absolute", "emb_layer_norm_before": True},
    },
}


def a_mask(rows: list[str]) -> Tensor:
    """The mask that its rows draw: `#` is a token, `.` padding."""
    length = max(map(len, rows))
    return torch.tensor([[c == "#" for c in row.ljust(length, ".")] for row in rows])


def inputs_of(name: str, mask: Tensor, labels: bool = True) -> dict[str, Tensor]:
    """Ids, a mask, and labels that are ignored on padding; some of the tokens of ESM are mask tokens."""
    batch, length = mask.shape
    ids = torch.randint(4, 33, mask.shape, generator=torch.Generator().manual_seed(length))
    found = {"input_ids": torch.where(mask, ids, int(tiny.family(name) == "Esm")), "attention_mask": mask}
    if tiny.family(name) == "DebertaV2":
        found["token_type_ids"] = ids % 2
    if name.endswith("ForMultipleChoice"):
        found = {key: x.unsqueeze(1) for key, x in found.items()}
    if not labels:
        return found
    if name.endswith("ForMaskedLM"):
        found["labels"] = torch.where(mask & (ids % 3 == 0), ids, -100)
    elif name.endswith("ForTokenClassification"):
        found["labels"] = torch.where(mask, ids % 2, -100)
    elif name.endswith("ForSequenceClassification"):
        found["labels"] = torch.arange(batch) % 2
    elif name.endswith("ForMultipleChoice"):
        found["labels"] = torch.zeros(batch, dtype=torch.long)
    return found


def measured(model: Any, mask: Tensor, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """What a pass returns, at real tokens where it is of tokens, and the gradients of an uneven objective."""
    output = model(**inputs, output_hidden_states=True, **options)
    found = {}
    for key, value in output.items():
        for i, x in enumerate(value if isinstance(value, tuple) else (value,)):
            assert x.shape[:1] in ((), mask.shape[:1])
            found[f"{key}{i}"] = x[mask] if x.shape[:2] == mask.shape else x
    weighed = [
        (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in found.values()
    ]
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(sum(weighed), list(parameters.values()), allow_unused=True)
    given = {key: g for key, g in zip(parameters, grads, strict=True) if g is not None}
    return {key: x.detach() for key, x in found.items()} | given


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over the larger of 1 and the largest magnitude."""
    assert found.keys() == expected.keys()
    return max(
        float((found[key] - x).abs().max() / x.abs().max().clamp(min=1))
        for key, x in expected.items()
        if x.numel()
    )


def was_packed(model: Any) -> Any:
    """A context that tells afterwards how many tokens each run of the first attention saw."""

    @contextlib.contextmanager
    def watching() -> Iterator[list[int]]:
        seen: list[int] = []
        attention = model.base_model.encoder.layer[0].attention.self
        original = attention.forward

        def forward(x: Tensor, *rest: Any, **named: Any) -> Any:
            seen.append(x.shape[:-1].numel())
            return original(x, *rest, **named)

        attention.forward = forward
        try:
            yield seen
        finally:
            del attention.forward

    return watching()


SHAPES = {
    "right": ["#######....", "###########", "##.........", "#######...."],
    "left": ["....#######", "###########", ".........##", "....#######"],
    "holes": ["#.###.#....", "###########", "#.#........", "######...##"],
    "all padding": ["#######....", "...........", "###"],
    "batch of one": ["####......."],
}
VARIANT_CASES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_outputs_losses_and_gradients_are_those_with_padding(name: str, shape: str) -> None:
    mask = a_mask(SHAPES[shape])
    model, inputs = tiny.model(name).double(), inputs_of(name, mask)
    with was_packed(model) as seen:
        found = measured(model, mask, inputs, pack=True)
    assert sum(seen) < mask.numel()
    assert apart(found, measured(model, mask, inputs, pack=False)) <= 1e-12


@pytest.mark.parametrize("shape", ["right", "batch of one"])
@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_heads_of_the_first_token_are_those_with_padding(name: str, shape: str) -> None:
    mask = a_mask(SHAPES[shape])
    model, inputs = tiny.model(name).double(), inputs_of(name, mask)
    with was_packed(model) as seen:
        found = measured(model, mask, inputs, pack=True)
    assert sum(seen) == mask.sum()
    assert apart(found, measured(model, mask, inputs, pack=False)) <= 1e-12


@pytest.mark.parametrize(("family", "variant"), VARIANT_CASES)
def test_every_path_and_kind_of_position_is_that_with_padding(family: str, variant: str) -> None:
    name = f"{family}ForMaskedLM"
    model = tiny.model(name, **VARIANTS[family][variant]).double()
    for shape in ("right", "left", "holes"):
        mask = a_mask(SHAPES[shape])
        inputs = inputs_of(name, mask)
        found = measured(model, mask, inputs, pack=True)
        assert apart(found, measured(model, mask, inputs, pack=False)) <= 1e-12


@settings(max_examples=25)
@given(
    rows=st.lists(st.text("#.", min_size=1, max_size=24), min_size=1, max_size=6),
    family=st.sampled_from(list(tiny.CONFIGS)),
)
def test_any_mask_gives_what_it_gives_with_padding(rows: list[str], family: str) -> None:
    mask = a_mask(rows)
    if not mask.any():
        return
    name = f"{family}ForTokenClassification"
    model, inputs = tiny.model(name).double(), inputs_of(name, mask)
    found = measured(model, mask, inputs, pack=True)
    assert apart(found, measured(model, mask, inputs, pack=False)) <= 1e-12


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_float32_is_that_with_padding_to_rounding(name: str) -> None:
    mask = a_mask(SHAPES["right"])
    model, inputs = tiny.model(name), inputs_of(name, mask)
    found = measured(model, mask, inputs, pack=True)
    assert apart(found, measured(model, mask, inputs, pack=False)) <= 1e-5


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_long_sequences_of_many_blocks_are_those_with_padding(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "QUERIES", 8)
    monkeypatch.setattr(plan, "BLOCKWISE_LENGTH", 12)
    name = f"{family}ForMaskedLM"
    mask = a_mask(["#" * 31, "#" * 9, "#" * 20, "#" * 13 + "." + "#" * 6])
    fields = {"talking_head": False} if family == "Deberta" else {}
    model, inputs = tiny.model(name, **fields).double(), inputs_of(name, mask)
    found = measured(model, mask, inputs, pack=True)
    assert apart(found, measured(model, mask, inputs, pack=False)) <= 1e-12


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_vectors_are_packed_as_ids_are(family: str) -> None:
    name, mask = f"{family}Model", a_mask(SHAPES["holes" if family != "Esm" else "right"])
    model = tiny.model(name).double()
    vectors = torch.randn(*mask.shape, 32, dtype=torch.float64, requires_grad=True)
    found, expected = (
        model(inputs_embeds=vectors, attention_mask=mask, pack=pack).last_hidden_state[mask]
        for pack in (True, False)
    )
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    of_found, of_expected = (torch.autograd.grad(x.sin().sum(), vectors)[0] for x in (found, expected))
    assert torch.allclose(of_found, of_expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_the_enhanced_mask_decoder_packs(family: str) -> None:
    fields = {"enhanced_mask_decoder": True, "position_biased_input": False}
    model = tiny.model(f"{family}ForMaskedLM", **fields).double()
    mask = a_mask(SHAPES["left"])
    inputs = inputs_of(f"{family}ForMaskedLM", mask)
    found = measured(model, mask, inputs, pack=True)
    assert apart(found, measured(model, mask, inputs, pack=False)) <= 1e-12


# What is returned for padding


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_padding_is_zero(name: str) -> None:
    mask = a_mask(SHAPES["holes"])
    output = tiny.model(name)(**inputs_of(name, mask), pack=True, output_hidden_states=True)
    per_token = [output.get("logits"), output.get("last_hidden_state"), *output.hidden_states]
    for x in per_token:
        assert x is None or (x[~mask] == 0).all()


@pytest.mark.parametrize("name", SPANS)
def test_no_answer_lies_in_padding(name: str) -> None:
    mask = a_mask(SHAPES["left"])
    model, inputs = tiny.model(name).double(), inputs_of(name, mask)
    found, expected = model(**inputs, pack=True), model(**inputs, pack=False)
    for a, b in ((found.start_logits, expected.start_logits), (found.end_logits, expected.end_logits)):
        assert torch.allclose(a[mask], b[mask], rtol=0, atol=1e-12)
        assert (a[~mask] == torch.finfo(a.dtype).min).all()


# When


def sparse(name: str, length: int = 64) -> dict[str, Tensor]:
    """A batch with so much padding that "auto" packs it."""
    mask = a_mask(["#" * length, *["#" * 8] * 7])
    return inputs_of(name, mask, labels=not name.endswith("ForQuestionAnswering"))


LONG = {"max_position_embeddings": 80}


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_auto_packs_what_has_padding_enough(name: str) -> None:
    model, inputs = tiny.model(name, **LONG), sparse(name)
    mask = inputs["attention_mask"]
    with was_packed(model) as seen:
        model(**inputs)
    assert seen == [int(mask.sum())]
    for changes in (
        {"attention_mask": torch.ones_like(mask)},
        {key: x[:4] for key, x in inputs.items()},  # less than packing.PADDING
    ):
        with was_packed(model) as seen:
            model(**inputs | changes)
        assert seen == [(inputs | changes)["attention_mask"].numel()]


@pytest.mark.parametrize("name", ["DebertaV2Model", "EsmModel"])
def test_auto_leaves_as_it_is_what_others_are_to_see_whole(name: str) -> None:
    inputs = sparse(name)
    padded = inputs["attention_mask"].numel()
    eager = tiny.model(name, attn_implementation="eager", **LONG)
    off, watched = tiny.model(name, pack=False, **LONG), tiny.model(name, **LONG)
    watched.encoder.layer[1].register_forward_hook(lambda *_: None)
    for model, options in (
        (eager, {}),
        (off, {}),
        (watched, {}),
        (tiny.model(name, **LONG), {"pack": False}),
        (tiny.model(name, **LONG), {"output_attentions": True}),
    ):
        with was_packed(model) as seen:
            model(**inputs, **options)
        assert seen == [padded], options


def test_inputs_that_require_grad_keep_no_batch_whole() -> None:
    model, inputs = tiny.model("EsmModel", **LONG), sparse("EsmModel")
    model.enable_input_require_grads()
    with was_packed(model) as seen:
        model(**inputs)
    assert seen == [int(inputs["attention_mask"].sum())]


@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_a_first_token_that_is_padding_is_read_with_padding(name: str) -> None:
    model, inputs = tiny.model(name, **LONG), sparse(name)
    flipped = {key: x.flip(-1) if x.ndim > 1 else x for key, x in inputs.items()}
    assert torch.equal(model(**flipped)[0], model(**flipped, pack=False)[0])
    with pytest.raises(ValueError, match=r"pack=True, but the first token of a row"):
        model(**flipped, pack=True)


def test_labels_and_mask_tokens_on_padding_count_as_they_do_with_padding() -> None:
    inputs = sparse("EsmForMaskedLM")
    labels = inputs["labels"].clone()
    labels[3, -1] = 5
    ids = inputs["input_ids"].clone()
    ids[3, -1] = 32
    model = tiny.model("EsmForMaskedLM")
    for changes in ({"labels": labels}, {"input_ids": ids}):
        changed = inputs | changes
        assert torch.equal(model(**changed).loss, model(**changed, pack=False).loss)
        with pytest.raises(ValueError, match=r"labels, or mask tokens, on padding"):
            model(**changed, pack=True)


@pytest.mark.parametrize("name", SPANS)
def test_a_span_is_trained_over_all_cells_of_a_row(name: str) -> None:
    model, inputs = tiny.model(name, **LONG), sparse(name)
    spans = {"start_positions": torch.arange(8), "end_positions": torch.arange(8)}
    assert torch.equal(model(**inputs, **spans).loss, model(**inputs, **spans, pack=False).loss)
    with pytest.raises(ValueError, match="pack=True, but the loss of a span is over all cells"):
        model(**inputs, **spans, pack=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_attentions": True}, "attention weights are asked for"),
        ({"attention_mask": torch.ones(2, 3, 3)}, r"attention_mask \[B, L, L\] has no padding"),
        ({"attention_mask": torch.zeros(2, 3)}, "there is no token at all"),
    ],
)
def test_what_cannot_be_packed_is_refused_with_its_reason(changes: dict[str, Any], message: str) -> None:
    inputs = {"input_ids": tiny.ids(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    model = tiny.model("DebertaV2Model")
    with pytest.raises(ValueError, match=f"pack=True, but {message}"):
        model(**inputs | changes, pack=True)
    model(**inputs | changes, pack="auto")


def test_transforms_and_the_meta_device_do_without() -> None:
    model, inputs = tiny.model("DebertaV2Model", **LONG), sparse("DebertaV2Model")
    rows = vmap(lambda ids, mask: model(ids[None], mask[None]).last_hidden_state[0], randomness="error")(
        inputs["input_ids"], inputs["attention_mask"]
    )
    expected = model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    mask = inputs["attention_mask"]
    assert torch.allclose(rows[mask], expected[mask], atol=1e-5)
    on_meta = model.to("meta")(**{key: x.to("meta") for key, x in inputs.items()})
    assert on_meta.last_hidden_state.shape == (8, 64, 32)


# Rows of one's own


def in_row(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask].unsqueeze(0)


def a_row(name: str, mask: Tensor) -> dict[str, Tensor]:
    """The inputs of a right-padded mask as a row, with labels laid likewise."""
    inputs = inputs_of(name, mask)
    lengths = mask.sum(-1).tolist()
    found = {key: in_row(x, mask) if x.shape == mask.shape else x for key, x in inputs.items()}
    del found["attention_mask"]
    return found | {"cu_seqlens": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)}


ROWS = [name for name in tiny.CLASSES if not name.endswith(("ForMultipleChoice", "ForQuestionAnswering"))]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_gives_what_the_padded_batch_gives(name: str) -> None:
    mask = a_mask(SHAPES["right"])
    model = tiny.model(name).double()
    row = a_row(name, mask)
    whole = torch.ones_like(row["input_ids"], dtype=torch.bool)
    found = model(**row, output_hidden_states=True)
    expected = model(**inputs_of(name, mask), pack=False, output_hidden_states=True)
    for key, value in expected.items():
        for x, y in zip(*(v if isinstance(v, tuple) else (v,) for v in (found[key], value)), strict=True):
            y = in_row(y, mask) if y.shape[:2] == mask.shape else y
            assert x.shape == y.shape
            assert torch.allclose(x, y, rtol=0, atol=1e-12), key
    if found.get("loss") is not None:
        gradients = torch.autograd.grad(found.loss, model.get_input_embeddings().weight)
        wanted = torch.autograd.grad(expected.loss, model.get_input_embeddings().weight)
        assert torch.allclose(*gradients, *wanted, rtol=0, atol=1e-12)
    weights = model(**row, output_attentions=True).attentions[0]
    owner = torch.repeat_interleave(torch.arange(len(mask)), mask.sum(-1))
    assert whole.sum() == len(owner)
    if name.startswith("Deberta") and "V2" not in name:
        return  # talking heads mix weights, and with them what is hidden
    assert (weights[..., owner[:, None] != owner[None, :]] == 0).all()


@pytest.mark.parametrize("name", SPANS)
def test_the_loss_of_spans_in_a_row_is_that_of_each_sequence_alone(name: str) -> None:
    mask = a_mask(SHAPES["right"])
    model, row = tiny.model(name).double(), a_row(name, mask)
    start, end = torch.tensor([1, 10, 0, 99]), torch.tensor([[6], [10], [-3], [2]])
    found = model(**row, start_positions=start, end_positions=end)
    assert found.start_logits.shape == (1, int(mask.sum()))
    sums, counts = [0.0, 0.0], [0, 0]
    for i, length in enumerate(mask.sum(-1).tolist()):
        alone = model(
            in_row(inputs_of(name, mask)["input_ids"][i : i + 1, :length], mask[i : i + 1, :length]),
            token_type_ids=(
                inputs_of(name, mask).get("token_type_ids")[i : i + 1, :length] if "V2" in name else None
            ),
        )
        for k, (logits, position) in enumerate(
            ((alone.start_logits, start[i]), (alone.end_logits, end[i, 0]))
        ):
            if position < length:
                sums[k] -= float(logits.detach().log_softmax(-1)[0, max(int(position), 0)])
                counts[k] += 1
    expected = (sums[0] / counts[0] + sums[1] / counts[1]) / 2
    assert abs(float(found.loss) - expected) <= 1e-12


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_masks_and_positions_of_ones_own_hold_in_a_row(family: str) -> None:
    mask = a_mask(SHAPES["holes"])
    name = f"{family}Model"
    model = tiny.model(name, **({"talking_head": False} if family == "Deberta" else {})).double()
    inputs = inputs_of(name, mask, labels=False)
    positions = torch.arange(mask.shape[1]).flip(0).expand(*mask.shape) + 2
    expected = model(**inputs, position_ids=positions).last_hidden_state
    row = {key: x.reshape(1, -1) for key, x in (inputs | {"position_ids": positions}).items()}
    bounds = torch.arange(0, mask.numel() + 1, mask.shape[1])
    found = model(**row, cu_seqlens=bounds).last_hidden_state
    assert torch.allclose(found.view_as(expected)[mask], expected[mask], rtol=0, atol=1e-12)


def test_an_empty_sequence_is_nothing_but_has_no_first_token() -> None:
    ids = tiny.ids(1, 6)
    bounds = torch.tensor([0, 0, 4, 4, 6, 6])
    for name in ("DebertaV2Model", "EsmForMaskedLM"):
        model = tiny.model(name)
        found = model(ids, cu_seqlens=bounds)[0]
        assert torch.allclose(found, model(ids, cu_seqlens=torch.tensor([0, 4, 6]))[0], atol=1e-6)
    for name in ("DebertaV2ForSequenceClassification", "EsmForSequenceClassification", "EsmModel"):
        with pytest.raises(ValueError, match="empty sequence"):
            tiny.model(name)(ids, cu_seqlens=bounds)


@pytest.mark.parametrize("width", [3, 5])
def test_the_convolution_does_not_see_the_next_sequence(width: int) -> None:
    model = tiny.model("DebertaV2Model", conv_kernel_size=width).double()
    ids, other = tiny.ids(1, 12), tiny.ids(1, 12).flip(-1)
    row = torch.cat((ids[:, :7], other[:, 7:]), 1)
    bounds = torch.tensor([0, 7, 12])
    assert torch.equal(model(ids, cu_seqlens=bounds)[0][:, :7], model(row, cu_seqlens=bounds)[0][:, :7])
    assert not torch.equal(model(ids)[0][:, :7], model(row)[0][:, :7])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (torch.tensor([1, 6]), "begins with 1; it must begin with 0"),
        (torch.tensor([0, 4, 3, 6]), "decreases from 4 to 3, at index 2"),
        (torch.tensor([0, 4]), "ends at 4, but the input has 6 tokens"),
        (torch.tensor([0, 7]), "ends at 7, but the input has 6 tokens"),
        (torch.tensor([0]), r"has shape \(1,\)"),
        (torch.tensor([[0, 6]]), r"has shape \(1, 2\)"),
        (torch.tensor([0.0, 6.0]), "is of torch.float32"),
    ],
)
@pytest.mark.parametrize("name", ["DebertaV2Model", "EsmForMaskedLM"])
def test_malformed_bounds_are_refused(name: str, bounds: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
        tiny.model(name)(tiny.ids(1, 6), cu_seqlens=bounds)


def test_a_row_is_one_row_with_a_mask_of_its_shape() -> None:
    model = tiny.model("DebertaV2Model")
    with pytest.raises(ValueError, match=r"must be one row, \[1, total\]; it has 2 rows"):
        model(tiny.ids(2, 6), cu_seqlens=torch.tensor([0, 12]))
    with pytest.raises(ValueError, match=r"with cu_seqlens it must be \(1, 6\)"):
        model(tiny.ids(1, 6), torch.ones(1, 6, 6), cu_seqlens=torch.tensor([0, 2, 6]))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("DebertaModel", {}),
        ("EsmModel", {"position_embedding_type": "absolute", "max_position_embeddings": 34}),
        ("DebertaForMaskedLM", {"enhanced_mask_decoder": True, "position_biased_input": False}),
    ],
)
def test_a_sequence_too_long_for_absolute_positions_is_told_both_numbers(
    name: str, fields: dict[str, Any]
) -> None:
    model = tiny.model(name, **fields)
    model(tiny.ids(1, 64), cu_seqlens=torch.tensor([0, 32, 64]))
    with pytest.raises(ValueError, match="has 33 tokens, but the absolute position table holds 32"):
        model(tiny.ids(1, 64), cu_seqlens=torch.tensor([0, 33, 64]))


# Together with the rest


@pytest.mark.parametrize("name", [*ROWS, *SPANS])
def test_a_row_compiles_and_exports_whole(name: str) -> None:
    torch._dynamo.reset()
    model = tiny.model(name, **LONG)
    row = {
        key: x
        for key, x in a_row(name, a_mask(SHAPES["right"])).items()
        if key in ("input_ids", "cu_seqlens")
    }
    longer = {"input_ids": tiny.ids(1, 40), "cu_seqlens": torch.tensor([0, 11, 20, 40], dtype=torch.int32)}
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    shapes = {"input_ids": {1: Dim("total", min=2, max=80)}, "cu_seqlens": {0: Dim("bounds", min=3, max=9)}}
    exported = torch.export.export(model, (), row, dynamic_shapes=shapes).module()
    for given_row in (row, longer):
        expected = model(**given_row)
        for run in (compiled, exported):
            found = run(**given_row)
            for key, x in expected.items():
                assert torch.allclose(found[key], x, atol=1e-5), key


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("attention_only", [True, False])
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_checkpointing_recomputes_packed_rows_dropout_included(
    family: str, attention_only: bool, reentrant: bool
) -> None:
    name = f"{family}ForMaskedLM"
    mask = a_mask(SHAPES["right"])
    inputs = inputs_of(name, mask)

    def gradients(model: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model.train()(**inputs, pack=True).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model = tiny.model(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant}, attention_only=attention_only)
    for found, expected in zip(gradients(model), gradients(tiny.model(name)), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_adapters_train_on_packed_rows(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    name = f"{family}ForTokenClassification"
    targets = {"Deberta": ["in_proj"], "DebertaV2": ["query_proj", "value_proj"], "Esm": ["query", "value"]}
    config = LoraConfig(target_modules=targets[family], init_lora_weights=False)
    model = get_peft_model(tiny.model(name).double(), config)
    model.enable_input_require_grads()
    mask = a_mask(SHAPES["right"])
    inputs = inputs_of(name, mask)
    gradients = []
    for pack in (True, False):
        model.zero_grad()
        model(**inputs, pack=pack).loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert any("lora_" in key for key in gradients[0])
    assert apart(*gradients) <= 1e-12


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_packed_passes_write_to_nothing(name: str) -> None:
    mask = a_mask(SHAPES["right"])
    report = audit(tiny.model(name).train(), **inputs_of(name, mask), pack=True)
    assert report.clean, str(report)


@pytest.mark.parametrize("name", ["DebertaV2ForMaskedLM", "EsmForMaskedLM"])
def test_a_row_of_ones_own_writes_to_nothing(name: str) -> None:
    report = audit(tiny.model(name).train(), **a_row(name, a_mask(SHAPES["right"])))
    assert report.clean, str(report)


def test_kept_position_tables_serve_sequences_of_any_length() -> None:
    model = tiny.model("DebertaV2Model", attn_implementation="blockwise").double()
    mask = a_mask(SHAPES["right"])
    inputs = inputs_of("DebertaV2Model", mask)
    expected = model(**inputs, pack=False).last_hidden_state[mask]
    with torch.no_grad():
        for _ in range(2):
            found = model(**inputs, pack=True).last_hidden_state[mask]
            assert model.kept_position_bytes > 0
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_the_kernel_for_sequences_of_any_length_is_given_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(
        q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, m: int, n: int, scale: float
    ) -> Tensor:
        assert a.dtype == b.dtype == torch.int32
        assert m == n == int(a.diff().max())
        parts = zip(*(x.split(a.diff().tolist()) for x in (q, k, v)), strict=True)
        return torch.cat(
            [
                torch.einsum("hqk,khd->qhd", torch.einsum("qhd,khd->hqk", x, y).mul(scale).softmax(-1), z)
                for x, y, z in parts
            ]
        )

    from torch.nn.attention import varlen

    mask = a_mask(SHAPES["right"])
    model, inputs = tiny.model("EsmModel").double(), inputs_of("EsmModel", mask)
    expected = model(**inputs, pack=False).last_hidden_state[mask]
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(dense, "varlen_serves", lambda *_: True)
    found = model(**inputs, pack=True).last_hidden_state[mask]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


# The option


def test_the_option_is_saved_where_it_is_no_default_and_upstream_loads_it(tmp_path: Any) -> None:
    for pack in (True, False, "auto"):
        model = tiny.model("EsmForMaskedLM", pack=pack)
        model.save_pretrained(tmp_path)
        assert ("pack" in (tmp_path / "config.json").read_text()) == (pack != "auto")
        again = outplace.EsmForMaskedLM.from_pretrained(tmp_path)
        assert again.config.pack == pack
        upstream = transformers.EsmForMaskedLM.from_pretrained(tmp_path).eval()
        ids = tiny.ids()
        assert torch.allclose(upstream(ids, torch.ones_like(ids)).logits, again(ids).logits, atol=1e-5)
    assert outplace.EsmForMaskedLM.from_pretrained(tmp_path, pack=True).config.pack is True
    with pytest.raises(ValueError, match="pack is 'always'"):
        tiny.config("EsmModel", pack="always")


def test_what_is_packed_stands_in_order_of_length() -> None:
    row = packing.find_row(a_mask(["###", "#", "##.", ".##"]), first=False, counted=[], asked=True)
    assert isinstance(row, packing.Row)
    assert row.cells.tolist() == [3, 6, 7, 10, 11, 0, 1, 2]
    assert row.cu_seqlens.tolist() == [0, 1, 3, 5, 8]
    assert row.starts.tolist() == [5, 0, 1, 3]
    assert not row.holes
