"""What goes into a forward pass: masks of every form, lengths, dtypes, and what is refused."""

from __future__ import annotations

import inspect

import pytest
import tiny
import torch
import transformers
from torch import Tensor

import outplace

MODELS = ["DebertaModel", "DebertaV2Model", "EsmModel"]
ABSOLUTE = {"DebertaModel": {}, "DebertaV2Model": {}, "EsmModel": {"position_embedding_type": "absolute"}}


def mask(length: int = 12) -> Tensor:
    found = torch.ones(3, length, dtype=torch.long)
    found[1, 8:], found[2, :5] = 0, 0
    return found


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_signatures_are_upstreams(name: str) -> None:
    def positional(cls: type) -> list[str]:
        parameters = inspect.signature(cls.forward).parameters.values()
        return [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]

    assert positional(getattr(outplace, name)) == positional(getattr(transformers, name))


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_an_unknown_argument_is_an_error_that_names_it_and_known_idle_ones_are_accepted(name: str) -> None:
    model, inputs = tiny.model(name), tiny.inputs(name)
    with pytest.raises(TypeError, match="attention_musk"):
        model(**inputs, attention_musk=None)
    plain = model(**inputs)[0]
    types = torch.zeros_like(inputs["input_ids"])
    assert torch.equal(model(**inputs, token_type_ids=types, use_cache=True)[0], plain)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.float32, torch.float64, torch.uint8], ids=str
)
def test_a_mask_means_the_same_in_any_dtype(name: str, dtype: torch.dtype) -> None:
    model = tiny.model(name)
    expected = model(tiny.ids(), mask()).last_hidden_state
    assert torch.equal(model(tiny.ids(), mask().to(dtype)).last_hidden_state, expected)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_sequence_equals_itself_alone(name: str, attention: str) -> None:
    model = tiny.model(name, attn_implementation=attention)
    padded = model(tiny.ids(), mask()).last_hidden_state
    for row, real in enumerate((slice(0, 12), slice(0, 8), slice(5, 12))):
        # Absolute positions count from the start of the row, so they are given to the row alone.
        positions = torch.arange(12)[None, real]
        alone = model(tiny.ids()[row : row + 1, real], position_ids=positions).last_hidden_state
        assert torch.allclose(padded[row, real], alone[0], atol=3e-6), row


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_a_square_mask_of_blocks_equals_separate_sequences(name: str, attention: str) -> None:
    # Token dropout and convolution look across the row, whatever the mask.
    fields = {"token_dropout": False} if name == "EsmModel" else {}
    fields |= {"conv_kernel_size": 0} if name == "DebertaV2Model" else {}
    model = tiny.model(name, attn_implementation=attention, **fields)
    block = (torch.arange(12) >= 7).long()
    square = (block[:, None] == block[None, :]).expand(3, 12, 12)
    together = model(tiny.ids(), square).last_hidden_state
    for part in (slice(0, 7), slice(7, 12)):
        alone = model(tiny.ids()[:, part], position_ids=torch.arange(12)[None, part]).last_hidden_state
        assert torch.allclose(together[:, part], alone, atol=3e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Deberta", "DebertaV2"])
def test_a_square_mask_equals_upstreams_encoder(family: str) -> None:
    ours = tiny.model(f"{family}Model")
    config = getattr(transformers, f"{family}Config")(**tiny.CONFIGS[family])
    theirs = getattr(transformers, f"{family}Model")(config).eval()
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(0))
    square = torch.ones(3, 12, 12, dtype=torch.long).tril()
    # Upstream's convolution takes no square mask.
    ours.encoder.conv = theirs.encoder.conv = None
    states, _ = ours.encoder(hidden, square.bool(), ours.attention_plan(3, 12))
    assert torch.equal(states[-1], theirs.encoder(hidden, square)[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(3, 11), (2, 12), (3, 1, 12), (3, 1, 1, 12), (12,)])
def test_a_mask_of_another_shape_is_an_error_with_both_shapes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"attention_mask has shape.*\(3, 12\) or \(3, 12, 12\)"):
        tiny.model(name)(tiny.ids(), torch.ones(shape))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_fully_padded_row_gives_finite_numbers(name: str, dtype: torch.dtype, attention: str) -> None:
    model = tiny.model(name, attn_implementation=attention).to(dtype)
    empty = mask()
    empty[1] = 0
    for one in (empty, empty[:, None, :].expand(3, 12, 12)):
        assert torch.isfinite(model(tiny.ids(), one).last_hidden_state).all()


def test_gradients_of_a_fully_padded_row_are_finite() -> None:
    for name in MODELS:
        model, empty = tiny.model(name), mask()
        empty[1] = 0
        model(tiny.ids(), empty).last_hidden_state.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_longer_than_the_absolute_positions_is_an_error_with_both_numbers(name: str) -> None:
    model = tiny.model(name, **ABSOLUTE[name])
    limit = 38 if name == "EsmModel" else 32
    assert model(tiny.ids(1, limit)).last_hidden_state.shape[1] == limit
    with pytest.raises(ValueError, match=f"{limit + 1} tokens.*{limit} positions"):
        model(tiny.ids(1, limit + 1))
    vectors = torch.zeros(1, limit + 1, 32)
    with pytest.raises(ValueError, match=f"{limit + 1} tokens.*{limit} positions"):
        model(inputs_embeds=vectors)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_relative_and_rotary_positions_take_any_length(name: str) -> None:
    fields = {} if name == "EsmModel" else {"position_biased_input": False}
    for length in (1, 200):
        output = tiny.model(name, **fields)(tiny.ids(1, length)).last_hidden_state
        assert torch.isfinite(output).all()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "positions", [{}, {"position_embedding_type": "absolute", "emb_layer_norm_before": True}]
)
def test_inputs_embeds_of_the_table_equal_ids(name: str, positions: dict[str, object]) -> None:
    model = tiny.model(name, **(positions if name == "EsmModel" else {}))
    vectors = model.get_input_embeddings()(tiny.ids())
    by_ids, by_vectors = model(tiny.ids(), mask()), model(inputs_embeds=vectors, attention_mask=mask())
    assert torch.equal(by_ids.last_hidden_state, by_vectors.last_hidden_state)


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_vectors_exclude_each_other(name: str) -> None:
    model = tiny.model(name)
    for inputs in ({}, {"input_ids": tiny.ids(), "inputs_embeds": torch.zeros(3, 12, 32)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**inputs)
    with pytest.raises(ValueError, match=r"input_ids has shape \(12,\).*\[B, L\]"):
        model(tiny.ids()[0])


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.CLASSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_computes_in_its_own_dtype(name: str, dtype: torch.dtype) -> None:
    model, inputs = tiny.model(name).to(dtype), tiny.inputs(name)
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    kinds = ("last_hidden_state", "logits", "start_logits")
    floating = [output[-1][0], output[-2][0], *(output[kind] for kind in kinds if kind in output)]
    assert all(x.dtype == dtype and torch.isfinite(x).all() for x in floating)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_float64_is_float64_throughout(name: str) -> None:
    """The same result to float64's precision however the input is perturbed below float32's."""
    model = tiny.model(name).double()
    vectors = torch.randn(1, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = model(inputs_embeds=vectors * (1 + 1e-11)).last_hidden_state
    difference = (moved - model(inputs_embeds=vectors).last_hidden_state).abs().max()
    assert 0 < difference < 1e-9


# ESM


@torch.no_grad()
def test_esm_infers_padding_from_the_pad_id() -> None:
    model = tiny.model("EsmModel")
    ids = torch.where(mask() == 1, tiny.ids(), 1)
    assert torch.equal(model(ids).last_hidden_state, model(ids, mask()).last_hidden_state)
    everything = model(ids, torch.ones_like(ids)).last_hidden_state
    assert not torch.allclose(everything[1, :8], model(ids).last_hidden_state[1, :8])


@torch.no_grad()
def test_token_dropout_scales_by_the_share_of_masks_in_eval_too() -> None:
    model = tiny.model("EsmModel")
    ids = torch.where(mask() == 1, tiny.ids(), 1)
    ids[1, [2, 5]] = 32
    embeddings = model.embeddings(ids, mask().bool(), None, None)
    table = model.embeddings.word_embeddings
    assert torch.allclose(embeddings[1, 0], table(ids[1, 0]) * 0.88 / (1 - 2 / 8))
    assert not embeddings[1, 2].any()
    assert torch.allclose(embeddings[0], table(ids[0]) * 0.88)


@torch.no_grad()
def test_a_sequence_of_nothing_but_masks_stays_finite() -> None:
    output = tiny.model("EsmModel")(torch.full((1, 5), 32)).last_hidden_state
    assert torch.isfinite(output).all()


@torch.no_grad()
def test_encoder_states_are_refused() -> None:
    with pytest.raises(ValueError, match="encoder_hidden_states is not supported"):
        tiny.model("EsmModel")(tiny.ids(), encoder_hidden_states=torch.zeros(3, 4, 32))


@torch.no_grad()
def test_sdpa_refuses_attention_weights_and_auto_gives_them() -> None:
    model = tiny.model("EsmModel", attn_implementation="sdpa")
    with pytest.raises(ValueError, match="'eager' or 'auto'"):
        model(tiny.ids(), output_attentions=True)
    assert len(tiny.model("EsmModel")(tiny.ids(), output_attentions=True).attentions) == 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["EsmModel", "EsmForMaskedLM"])
def test_contacts_equal_upstreams_on_every_path_and_for_padded_sequences(name: str) -> None:
    config = transformers.EsmConfig(**tiny.CONFIGS["Esm"])
    theirs = getattr(transformers, name)(
        config, **({} if "For" in name else {"add_pooling_layer": True})
    ).eval()
    theirs.set_attn_implementation("eager")
    ids = torch.where(mask() == 1, tiny.ids(), 1)
    ids[0, -1] = ids[1, 7] = 2
    right = mask()[:2]
    regression = theirs.base_model.contact_head.regression
    regression.weight.copy_(100 * torch.randn(1, 8, generator=torch.Generator().manual_seed(0)))
    expected = theirs.predict_contacts(ids[:2], right)
    for attention in ("auto", "eager", "sdpa"):
        model = tiny.model(name, attn_implementation=attention)
        model.load_state_dict(theirs.state_dict())
        assert torch.allclose(model.predict_contacts(ids[:2], right), expected, atol=1e-6)
        assert torch.allclose(model.predict_contacts(ids[:2]), expected, atol=1e-6)
        alone = model.predict_contacts(ids[1:2, :8])
        assert torch.allclose(alone[0], expected[1, :6, :6], atol=1e-6)


# DeBERTa-V2


def test_the_two_bucket_rules_differ_only_past_the_last_distance() -> None:
    from outplace.models.attention.disentangled import log_bucket, slots

    distance = torch.arange(-2000, 2001)
    upstream, original = (slots(log_bucket(distance, 256, 512, clamp), 256) for clamp in (False, True))
    assert distance[upstream != original].tolist() == list(range(-2000, -511))
    assert upstream[distance <= -512].unique().tolist() == [0]
    assert original[distance <= -512].unique().tolist() == [1]
    theirs = transformers.models.deberta_v2.modeling_deberta_v2.make_log_bucket_position(distance, 256, 512)
    assert torch.equal(log_bucket(distance, 256, 512), theirs.long())
