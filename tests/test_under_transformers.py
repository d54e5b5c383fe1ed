"""`outplace.transformers`: upstream's own classes on our blocks.

`make compat` runs this file in environments of other releases of transformers too.
"""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import outplace

transformers = pytest.importorskip("transformers", reason="puts our blocks into it")

from outplace import transformers as under  # noqa: E402
from outplace.transformers import grafts, structure  # noqa: E402

MODELS = ["DebertaModel", "DebertaV2Model", "EsmModel"]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LONG = 300
"""Tokens of which DeBERTa's `auto` takes blocks."""


@pytest.fixture(autouse=True)
def upstream_as_it_was() -> Iterator[None]:
    """No test leaves anything installed, or finds anything."""
    assert under.families() == ()
    yield
    under.uninstall()


@pytest.fixture
def installed() -> Iterator[None]:
    with under.installed():
        yield


def upstream(name: str, **fields: Any) -> Any:
    """Upstream's seeded tiny model in eval mode."""
    torch.manual_seed(0)
    family = tiny.family(name)
    config = getattr(transformers, f"{family}Config")(**tiny.CONFIGS[family] | fields)
    return getattr(transformers, name)(config).eval()


def inputs(name: str, length: int = 12) -> dict[str, Tensor]:
    return tiny.inputs(name, length=length)


def unlabelled(name: str, length: int = 12) -> dict[str, Tensor]:
    return {k: x for k, x in inputs(name, length).items() if k in ("input_ids", "attention_mask")}


def tensors(output: Any) -> list[Tensor]:
    """Every tensor of an output, in order."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [y for x in values for y in (x if isinstance(x, tuple) else (x,))]


def real(x: Tensor, mask: Tensor) -> Tensor:
    """What is not padding: upstream computes something there, which is nobody's."""
    return x[mask.bool()] if x.shape[: mask.ndim] == mask.shape else x


def assert_same(found: Any, expected: Any, mask: Tensor) -> None:
    for x, y in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(real(x, mask), real(y, mask), rtol=0, atol=2e-5)


def runs_ours(model: nn.Module, name: str) -> bool:
    """Whether the model knows our plan of attention, and takes it."""
    return hasattr(model.base_model, "attention_plan") and outplace.audit(model, **inputs(name)).writes == []


# What it computes


@pytest.mark.parametrize("how", ["install", "convert"])
@pytest.mark.parametrize("length", [12, LONG])
@pytest.mark.parametrize("name", tiny.CLASSES)
def test_outputs_are_upstreams(name: str, length: int, how: str) -> None:
    """With labels, states and, for the short ones, attention weights."""
    model = upstream(name, max_position_embeddings=400)
    given = inputs(name, length) | {"output_hidden_states": True, "output_attentions": length == 12}
    if name.startswith("Esm"):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**given)
        if how == "convert":
            found = under.convert(model)(**given)
        else:
            with under.installed():
                found = model(**given)
    assert type(found) is type(expected)
    assert_same(found, expected, given["attention_mask"])


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_gradients_are_upstreams(name: str) -> None:
    found, expected = (upstream(name, **NO_DROPOUT).train() for _ in range(2))
    under.convert(found)
    for model in (found, expected):
        model(**inputs(name))[0].mean().backward()
    for (key, x), y in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), key
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_inputs_embeds_and_tuples_are_taken(name: str, return_dict: bool) -> None:
    model = under.convert(upstream(name))
    ids = tiny.ids()
    found = model(inputs_embeds=model.get_input_embeddings()(ids), return_dict=return_dict)
    assert isinstance(found, tuple) is not return_dict
    assert torch.equal(found[0], model(ids)[0])


@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_of_our_own_classes(name: str) -> None:
    model = upstream(name)
    ours = outplace.from_transformers(model)
    given = unlabelled(name)
    assert torch.equal(under.convert(model)(**given)[0], ours(**given)[0])


# What upstream gets wrong


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_the_auditor_finds_no_write(name: str, installed: None) -> None:
    report = outplace.audit(upstream(name).train(), **inputs(name))
    assert report.writes == [], report


@pytest.mark.parametrize("name", [name for name in tiny.CLASSES if name.startswith("Deberta")])
def test_the_auditor_finds_upstreams_writes(name: str) -> None:
    assert outplace.audit(upstream(name).train(), **inputs(name)).writes


class ReturnsView(nn.Linear):
    """A linear map whose output is a view made in a custom function, as bitsandbytes' 4-bit ones are."""

    class Viewed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def forward(self, x: Tensor) -> Tensor:
        return self.Viewed.apply(super().forward(x))  # type: ignore[no-any-return]


def with_views(name: str) -> nn.Module:
    model = upstream(name).train()
    for module in list(model.modules()):
        for key, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(
                    module, key, ReturnsView(child.in_features, child.out_features, child.bias is not None)
                )
    return model  # type: ignore[no-any-return]


def _views() -> None:
    with_views("DebertaModel")(tiny.ids())[0].sum().backward()


def _bool_mask() -> None:
    upstream("DebertaV2Model")(tiny.ids(), attention_mask=torch.ones(3, 12, dtype=torch.bool))


def _mask_of_pairs(name: str) -> None:
    """Two texts in a row that do not see each other are as each by itself."""
    model = upstream(name, **({"conv_kernel_size": 0} if name == "DebertaV2Model" else {}))
    ids = tiny.ids(1, 12)
    pairs = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7))[None]
    # Absolute positions and token dropout would tell the second text from one by itself.
    together = model(ids, attention_mask=pairs)[0]
    torch.testing.assert_close(together[:, :5], model(ids[:, :5])[0], rtol=1e-4, atol=1e-5)


def _contacts() -> None:
    model = upstream("EsmForMaskedLM")
    ids, mask = inputs("EsmForMaskedLM")["input_ids"], inputs("EsmForMaskedLM")["attention_mask"]
    expected = outplace.from_transformers(model).predict_contacts(ids, mask)
    assert torch.equal(model.predict_contacts(ids, mask), expected)
    assert torch.equal(model.predict_contacts(ids), expected)


def _resized(name: str, **fields: Any) -> None:
    model = upstream(name, **fields)
    before = model(tiny.ids()).logits
    size = before.shape[-1]
    model.resize_token_embeddings(size + 7)
    assert model.config.vocab_size == size + 7
    labels = torch.full((3, 12), size + 3)
    output = model(tiny.ids(), labels=labels)
    assert torch.isfinite(output.loss)
    torch.testing.assert_close(output.logits[..., :size], before, rtol=0, atol=1e-6)
    model.resize_token_embeddings(size)
    torch.testing.assert_close(model(tiny.ids()).logits, before, rtol=0, atol=1e-6)


def _empty(name: str) -> None:
    found = upstream(name)(tiny.ids()[:0], attention_mask=torch.ones(0, 12))[0]
    assert found.shape == (0, 12, 32)


def _half() -> None:
    """Each score is in float16's range, the products before they are scaled are not."""
    model = upstream("DebertaV2Model")
    for layer in model.encoder.layer:
        nn.init.constant_(layer.attention.self.query_proj.bias, 100.0)
        nn.init.constant_(layer.attention.self.pos_key_proj.bias, 120.0)
    assert torch.isfinite(model.half()(tiny.ids())[0]).all()


def _offloaded(name: str, folder: Path) -> None:
    pytest.importorskip("accelerate", reason="offloads to the disk")
    model = upstream(name)
    expected = model(**unlabelled(name))[0]
    model.save_pretrained(folder / "model")
    loaded = type(model).from_pretrained(
        folder / "model",
        device_map={key: "disk" for key, _ in model.named_children()},
        offload_folder=str(folder / "offload"),
    )
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(loaded(**unlabelled(name))[0], expected)


FAULTS: dict[str, Callable[[Path], None]] = {
    "4-bit linears: a view is written to": lambda folder: _views(),
    "a bool mask before a convolution": lambda folder: _bool_mask(),
    "a mask of pairs, DeBERTa": lambda folder: _mask_of_pairs("DebertaModel"),
    "a mask of pairs, DeBERTa-V2": lambda folder: _mask_of_pairs("DebertaV2Model"),
    "a mask of pairs, ESM": lambda folder: _mask_of_pairs("EsmModel"),
    "contacts without eager attention or a mask": lambda folder: _contacts(),
    "ESM's vocabulary resized": lambda folder: _resized("EsmForMaskedLM"),
    "DeBERTa's resized under the original head": lambda folder: _resized("DebertaForMaskedLM", legacy=False),
    "DeBERTa-V2's resized so": lambda folder: _resized("DebertaV2ForMaskedLM", legacy=False),
    "an empty batch, DeBERTa": lambda folder: _empty("DebertaModel"),
    "an empty batch, DeBERTa-V2": lambda folder: _empty("DebertaV2Model"),
    "an empty batch, ESM": lambda folder: _empty("EsmModel"),
    "float16's range": lambda folder: _half(),
    "the disk, DeBERTa": lambda folder: _offloaded("DebertaForSequenceClassification", folder),
    "the disk, DeBERTa-V2": lambda folder: _offloaded("DebertaV2ForSequenceClassification", folder),
}
LATER = {"a mask of pairs, ESM": "5."}
"""Faults that only later releases have: the beginning of their version."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_upstreams_is_gone(fault: str, tmp_path: Path) -> None:
    if transformers.__version__.startswith(LATER.get(fault, "")):
        with pytest.raises((RuntimeError, TypeError, AssertionError, NotImplementedError)):
            FAULTS[fault](tmp_path)
    with under.installed():
        FAULTS[fault](tmp_path)


# Attention


@pytest.mark.parametrize("asked", ["auto", "eager", "sdpa", "blockwise"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_is_chosen_by_name(name: str, asked: str, installed: None) -> None:
    fields = {"talking_head": False} if name == "DebertaModel" else {}
    if name == "EsmModel" and asked == "blockwise":
        with pytest.raises(ValueError, match=r"'blockwise' for Esm, which is for relative positions"):
            upstream(name).set_attn_implementation(asked)
        return
    expected = {"EsmModel": "sdpa"}.get(name, "blockwise") if asked == "auto" else asked
    config = upstream(name, **fields).config
    config._attn_implementation = None
    given = transformers.AutoModel.from_config(config, attn_implementation=asked)
    told = upstream(name, **fields)
    told.set_attn_implementation(asked)
    for model in (given, told):
        assert model.attention_plan(1, LONG).path == expected
    assert upstream(name, **fields).attention_plan(1, LONG).path == (
        "sdpa" if name == "EsmModel" else "blockwise"
    )


def test_an_attention_that_a_family_lacks_is_an_error(installed: None) -> None:
    with pytest.raises(ValueError, match=r"'flash' is|is 'flash'; .* 'blockwise'"):
        upstream("DebertaV2Model").set_attn_implementation("flash")
    with pytest.raises(ValueError, match="talking heads mix the scores"):
        upstream("DebertaModel").set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", MODELS)
def test_no_configuration_file_names_our_attention(name: str, tmp_path: Path, installed: None) -> None:
    upstream(name).save_pretrained(tmp_path)
    assert "attn" not in (tmp_path / "config.json").read_text()


# Packing


@pytest.mark.parametrize("name", MODELS)
def test_padding_is_left_out_and_zero(name: str) -> None:
    model = upstream(name, max_position_embeddings=400)
    mask = torch.ones(4, LONG, dtype=torch.long)
    mask[1:, 40:] = 0
    ids = torch.where(mask == 1, tiny.ids(4, LONG), int(name == "EsmModel"))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)[0]
        found = under.convert(model)(ids, attention_mask=mask)[0]
        whole = model(ids, attention_mask=mask, pack=False)[0]
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=0, atol=2e-5)
    torch.testing.assert_close(whole[mask == 1], expected[mask == 1], rtol=0, atol=2e-5)
    assert not found[mask == 0].any()
    assert whole[mask == 0].any() or name == "EsmModel"


@pytest.mark.parametrize("name", MODELS)
def test_sequences_in_a_row_are_as_each_by_itself(name: str) -> None:
    model = under.convert(upstream(name))
    ids, bounds = tiny.ids(1, 12), torch.tensor([0, 5, 12])
    found = model(ids, cu_seqlens=bounds)[0]
    for start, end in ((0, 5), (5, 12)):
        alone = model(ids[:, start:end])[0]
        torch.testing.assert_close(found[:, start:end], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["DebertaV2ForTokenClassification", "EsmForMaskedLM"])
def test_a_head_of_tokens_takes_rows(name: str) -> None:
    model = under.convert(upstream(name))
    ids, bounds = tiny.ids(1, 12), torch.tensor([0, 5, 12])
    found = model(ids, cu_seqlens=bounds).logits
    torch.testing.assert_close(found[:, 5:], model(ids[:, 5:]).logits, rtol=1e-4, atol=1e-5)


def test_a_head_that_reads_the_first_token_refuses_rows() -> None:
    model = under.convert(upstream("EsmForSequenceClassification"))
    with pytest.raises(ValueError, match=r"takes no cu_seqlens; give them to model\.base_model"):
        model(tiny.ids(1, 12), cu_seqlens=torch.tensor([0, 5, 12]))


@pytest.mark.parametrize("name", ["DebertaV2ForQuestionAnswering", "DebertaForTokenClassification"])
def test_a_loss_that_reads_padding_is_upstreams(name: str) -> None:
    """Labels on padding, and a span over all cells: such a batch is not packed."""
    model = upstream(name, max_position_embeddings=400)
    given = inputs(name, LONG)
    given["attention_mask"] = (torch.arange(LONG) < 30).long().expand(3, LONG)
    if "labels" in given:
        given["labels"] = torch.ones_like(given["labels"])
    with torch.no_grad():
        expected = model(**given).loss
        found = under.convert(model)(**given).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_configuration_turns_packing_off() -> None:
    model = under.convert(upstream("DebertaV2ForTokenClassification", max_position_embeddings=400))
    given = unlabelled("DebertaV2ForTokenClassification", LONG)
    given["attention_mask"] = (torch.arange(LONG) < 30).long().expand(3, LONG)
    with torch.no_grad():
        packed = model(**given).logits
        model.config.pack = False
        assert not torch.equal(model(**given).logits[:, 30:], packed[:, 30:])


# Installing


def attributes() -> dict[tuple[str, str], Any]:
    """Everything in every class that is replaced."""
    found = {}
    for family in grafts.GRAFTS:
        for replacement in structure.replacements(family):
            found |= {(replacement.cls.__qualname__ + family, k): v for k, v in vars(replacement.cls).items()}
    return found


def test_installing_is_undone_whole() -> None:
    before = attributes()
    with under.installed():
        assert attributes() != before
    assert attributes() == before


def test_installing_twice_is_installing_once() -> None:
    under.install()
    once = attributes()
    under.install()
    assert attributes() == once
    assert under.families() == ("deberta", "deberta-v2", "esm")
    under.uninstall()
    assert under.families() == ()
    under.uninstall()


def test_an_inner_block_leaves_the_outer_one_installed() -> None:
    with under.installed("esm"):
        with under.installed():
            assert under.families() == ("deberta", "deberta-v2", "esm")
        assert under.families() == ("esm",)


def test_families_are_installed_by_name() -> None:
    with under.installed(["deberta-v2"]):
        assert runs_ours(upstream("DebertaV2Model"), "DebertaV2Model")
        assert not runs_ours(upstream("DebertaModel"), "DebertaModel")
    with pytest.raises(
        ValueError, match=r"'bert' is no family; it must be one of 'deberta', 'deberta-v2', 'esm'"
    ):
        under.install(["esm", "bert"])
    assert under.families() == ()


def test_a_class_that_was_imported_before_and_a_model_that_was_built_before_run_ours() -> None:
    model = upstream("DebertaV2Model")
    with under.installed():
        assert runs_ours(model, "DebertaV2Model")
        assert transformers.AutoModel.from_config(model.config).__class__ is transformers.DebertaV2Model
    assert not runs_ours(model, "DebertaV2Model")


def test_interrupted_half_way_upstream_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes()
    put, calls = under.put, []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        put(*arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(under, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        under.install()
    assert attributes() == before
    assert under.families() == ()


def test_another_structure_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes()
    module = sys.modules[transformers.DebertaV2Model.__module__]
    version = transformers.__version__
    structure.replacements.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(module, "ConvLayer")
        patch.setattr(module.DebertaV2Output, "forward", lambda self, x, residual: x)
        with pytest.raises(
            under.StructureError, match=rf"{version} .*DebertaV2Output\.forward takes x, .*no class ConvLayer"
        ):
            under.install()
        with pytest.raises(under.StructureError):
            under.convert(upstream("EsmModel"))
    structure.replacements.cache_clear()
    assert under.families() == ()
    assert attributes().keys() == before.keys()


def test_another_parameter_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build = transformers.EsmForMaskedLM.__init__

    def other(self: Any, config: Any) -> None:
        build(self, config)
        self.lm_head.scale = nn.Parameter(torch.ones(1))

    monkeypatch.setattr(transformers.EsmForMaskedLM, "__init__", other)
    structure.replacements.cache_clear()
    with pytest.raises(under.StructureError, match=r"a parameter lm_head\.scale that is not known"):
        under.install("esm")
    structure.replacements.cache_clear()


@pytest.mark.parametrize("changed", [False, True])
def test_an_unknown_release_is_tried_on_a_tiny_model(changed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "99.0")
    structure.replacements.cache_clear()
    if changed:
        module = sys.modules[transformers.DebertaV2Model.__module__]
        monkeypatch.setattr(module, "make_log_bucket_position", lambda x, bucket_size, max_position: -x)
        with pytest.raises(under.StructureError, match=r"transformers 99\.0 .* outputs differ by"):
            under.install()
    else:
        under.install()
    structure.replacements.cache_clear()


# Converting


class Wrapped(nn.Module):
    """A model of someone's own around two backbones."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = upstream("DebertaV2Model")
        self.proteins = nn.ModuleDict({"esm": upstream("EsmModel")})


def test_backbones_are_found_wherever_they_sit(capsys: pytest.CaptureFixture[str]) -> None:
    model = Wrapped()
    assert under.convert(model) is model
    assert "2 backbones of Wrapped" in capsys.readouterr().err
    assert runs_ours(model.texts, "DebertaV2Model")
    assert not runs_ours(upstream("DebertaV2Model"), "DebertaV2Model"), "others are left alone"
    kinds = {id(module): type(module) for module in model.modules()}
    under.convert(model)
    assert kinds == {id(module): type(module) for module in model.modules()}


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_nothing_is_copied_or_renamed(name: str) -> None:
    model = upstream(name)
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    kinds = [type(module).__name__ for module in model.modules()]
    frozen = next(model.parameters()).requires_grad_(False)
    calls: list[str] = []
    model.base_model.encoder.register_forward_hook(lambda *arguments: calls.append("hook"))
    under.convert(model)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {k: id(x) for k, x in after.items()} == {k: id(x) for k, x in before.items()}
    assert [type(module).__name__ for module in model.modules()] == kinds
    assert isinstance(model, getattr(transformers, name))
    assert not frozen.requires_grad
    model(**unlabelled(name))
    assert calls == ["hook"]


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_reverting_gives_upstreams_model_back(name: str) -> None:
    model = upstream(name)
    expected = model(**inputs(name))
    kinds = [type(module) for module in model.modules()]
    assert under.revert(under.convert(model)) is model
    assert [type(module) for module in model.modules()] == kinds
    for x, y in zip(tensors(model(**inputs(name))), tensors(expected), strict=True):
        assert torch.equal(x, y)


def test_bad_input_is_an_error_that_says_what_to_do() -> None:
    bert = transformers.BertModel(transformers.BertConfig(**tiny.SHAPE, vocab_size=9))
    with pytest.raises(ValueError, match=r"BertModel holds no .*DebertaModel, DebertaV2Model, EsmModel"):
        under.convert(bert)
    with pytest.raises(TypeError, match=r"not str; give it the module inside, such as pipeline\.model"):
        under.convert("microsoft/deberta-v3-base")  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"DebertaV2Model was not converted.*uninstall\(\)"):
        under.revert(upstream("DebertaV2Model"))
    model = Wrapped()
    with pytest.raises(ValueError, match="'blockwise' for Esm"):
        under.convert(model, "blockwise")
    assert type(model.texts) is transformers.DebertaV2Model


def test_a_users_own_class_keeps_what_it_overrides() -> None:
    class Mine(transformers.DebertaV2Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids)[0] * 2

    torch.manual_seed(0)
    model = Mine(upstream("DebertaV2Model").config).eval()
    expected = model(tiny.ids())
    under.convert(model)
    assert type(model).forward is Mine.forward
    assert outplace.audit(model, tiny.ids()).writes == []
    torch.testing.assert_close(model(tiny.ids()), expected, rtol=0, atol=2e-5)


def test_without_transformers_the_error_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['transformers'] = None; import outplace; import outplace.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'outplace[transformers]'" in done.stderr


def test_importing_outplace_imports_nothing_of_transformers() -> None:
    code = "import outplace, sys; outplace.EsmModel; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


PROGRAM = """
import sys
import beside
import transformers
config = transformers.DebertaV2Config(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                                      intermediate_size=8)
print(transformers.DebertaV2Model(config).attention_plan(1, 300).path, sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_program_runs_unchanged(module: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").touch()
    command = ["-m", "program"] if module else [str(tmp_path / "program.py")]
    done = subprocess.run(
        [sys.executable, "-m", "outplace.transformers", *command, "--flag", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path if module else tmp_path.parent,
        check=False,
    )
    assert done.stdout.split("\n")[0] == "blockwise ['--flag', 'x'] __main__", done.stderr


@pytest.mark.parametrize("arguments", [[], ["-m"]])
def test_no_program_is_an_error_with_the_usage(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "outplace.transformers", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: python -m outplace.transformers (program.py | -m module)" in done.stderr


# Saving


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_what_one_saves_the_other_loads(name: str, tmp_path: Path) -> None:
    model = upstream(name)
    expected = model(**inputs(name))
    model.save_pretrained(tmp_path / "theirs")
    with under.installed():
        loaded = type(model).from_pretrained(tmp_path / "theirs")
        assert_same(loaded.eval()(**inputs(name)), expected, inputs(name)["attention_mask"])
        loaded.save_pretrained(tmp_path / "ours")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(**inputs(name))[0], expected[0])


@pytest.mark.parametrize("name", ["DebertaV2ForMaskedLM", "DebertaModel", "EsmForSequenceClassification"])
def test_a_whole_model_is_pickled_without_a_trace_of_ours(name: str) -> None:
    fields = {"max_position_embeddings": 400}
    plain, file = io.BytesIO(), io.BytesIO()
    torch.save(upstream(name, **fields), plain)
    model = under.convert(upstream(name, **fields))
    given = unlabelled(name, LONG)
    with torch.no_grad():
        expected = model(**given)[0]
    torch.save(model, file)
    assert b"outplace" not in file.getvalue()
    assert len(file.getvalue()) < len(plain.getvalue()) * 1.02, (
        "tables that are kept for the next pass are left out"
    )
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(loaded) is getattr(transformers, name)
    with torch.no_grad():
        assert_same(loaded(**given), (expected,), given["attention_mask"])


def test_a_deep_copy_is_converted_too_and_shares_nothing() -> None:
    model = under.convert(upstream("DebertaV2ForMaskedLM"))
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert torch.equal(twin(tiny.ids()).logits, model(tiny.ids()).logits)
    mine = {x.data_ptr() for x in model.parameters()}
    assert mine.isdisjoint(x.data_ptr() for x in twin.parameters())
    tied = twin.cls.predictions.decoder.weight
    assert tied is twin.get_input_embeddings().weight


# Training

CHECKPOINTED = ["DebertaForMaskedLM", "DebertaV2ForSequenceClassification", "EsmForMaskedLM"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "name", ["DebertaForMaskedLM", "DebertaV2ForSequenceClassification", "EsmForMaskedLM"]
)
def test_checkpointing_gives_the_same_gradients(name: str, reentrant: bool, installed: None) -> None:
    model = upstream(name, **NO_DROPOUT).train()
    model(**inputs(name)).loss.backward()
    expected = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    calls: list[int] = []
    model.base_model.encoder.layer[0].intermediate.register_forward_hook(lambda *arguments: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(**inputs(name)).loss.backward()
    assert len(calls) == 2, "the first layer is computed again in backward"
    found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for key, grad in found.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-4, atol=1e-6, msg=key)


TARGETS = {"Deberta": ["in_proj"], "DebertaV2": ["query_proj", "value_proj"], "Esm": ["query", "value"]}


def adapted(family: str, **fields: Any) -> Any:
    peft = pytest.importorskip("peft", reason="adds adapters")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=TARGETS[family], init_lora_weights=False
    )
    model = peft.get_peft_model(upstream(f"{family}ForSequenceClassification", **fields), config)
    # Each copy draws its own adapters.
    generator = torch.Generator().manual_seed(3)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return model


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("family", TARGETS)
def test_lora_trains_as_upstream(family: str, reentrant: bool | None) -> None:
    """With the hook on frozen embeddings, for which upstream once failed, and with checkpointing."""
    name = f"{family}ForSequenceClassification"
    gradients = []
    for ours in (True, False):
        model = adapted(family, **NO_DROPOUT).train()
        if ours:
            under.convert(model)
        model.enable_input_require_grads()
        if reentrant is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**inputs(name)).loss.backward()
        gradients.append({k: p.grad for k, p in model.named_parameters() if "lora_" in k})
    for key, found in gradients[0].items():
        assert found is not None, key
        torch.testing.assert_close(found, gradients[1][key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", TARGETS)
def test_quantised_models_load_and_train_adapters(family: str, bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="quantises")
    pytest.importorskip("accelerate", reason="loads what is quantised")
    peft = pytest.importorskip("peft", reason="adds adapters")
    name = f"{family}ForSequenceClassification"
    fields = {"hidden_size": 64, "intermediate_size": 64, "talking_head": False}
    upstream(name, **fields).save_pretrained(tmp_path)
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["classifier"],  # too narrow for its kernels
    )
    cls = getattr(transformers, name)
    with torch.no_grad():
        plain = cls.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float32).eval()
        expected = plain(**unlabelled(name)).logits
    with under.installed():
        model = cls.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float32).eval()
        assert any("bit" in type(module).__name__ for module in model.modules())
        with torch.no_grad():
            found = model(**unlabelled(name)).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        model = cls.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = peft.prepare_model_for_kbit_training(model)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=TARGETS[family]))
        model.train()(**inputs(name)).loss.backward()
        grads = [p.grad for k, p in model.named_parameters() if "lora_" in k]
        assert all(grad is not None for grad in grads)
        assert any(grad.any() for grad in grads)


@pytest.mark.parametrize("family", TARGETS)
def test_trainer_takes_steps_and_plain_upstream_loads_them(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    name = f"{family}ForSequenceClassification"
    given = inputs(name)
    rows = [{key: x[i] for key, x in given.items()} for i in range(3)] * 4
    with under.installed():
        trainer = transformers.Trainer(
            upstream(name, **NO_DROPOUT),
            transformers.TrainingArguments(
                str(tmp_path),
                max_steps=3,
                per_device_train_batch_size=4,
                gradient_checkpointing=True,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                logging_steps=1,
            ),
            train_dataset=rows,
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.save_model(str(tmp_path / "end"))
        trained = trainer.model.eval()(**unlabelled(name)).logits
    assert len(losses) == 3
    loaded = getattr(transformers, name).from_pretrained(tmp_path / "end").eval()
    torch.testing.assert_close(loaded(**unlabelled(name)).logits, trained, rtol=0, atol=2e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", TARGETS)
def test_it_compiles_in_one_graph(family: str, training: bool, installed: None) -> None:
    """Upstream's classifiers look at their labels unless the kind of problem is told."""
    name = f"{family}ForSequenceClassification"
    fields = {"problem_type": "single_label_classification"}
    model = upstream(name, **NO_DROPOUT, **fields).train(training)
    expected = model(**inputs(name))
    torch._dynamo.reset()
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs(name))
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=2e-5)
    if training:
        found.loss.backward()
        assert model.base_model.embeddings.word_embeddings.weight.grad.any()


def test_compiled_code_follows_install_and_uninstall() -> None:
    model = upstream("DebertaV2Model")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    mask = torch.ones(3, 12, 12)
    with under.installed():
        assert compiled(tiny.ids(), attention_mask=mask)[0].shape == (3, 12, 32)
    with pytest.raises(Exception, match=r"broadcast|must match"):
        compiled(tiny.ids(), attention_mask=mask)


@pytest.mark.parametrize("family", TARGETS)
def test_layers_called_by_hand_are_upstreams(family: str, installed: None) -> None:
    """A program that walks through the encoder itself gets what it always got."""
    model = upstream(f"{family}Model")
    embeddings = model.embeddings(tiny.ids(), attention_mask=torch.ones(3, 12)) if family == "Esm" else None
    if embeddings is None:
        mask = torch.ones(3, 12)
        embeddings = model.embeddings(tiny.ids(), mask=mask)
        states = embeddings
        encoder = model.encoder
        pairs, distances = encoder.get_attention_mask(mask), encoder.get_rel_pos(embeddings)
        table = encoder.get_rel_embedding()
        for index, layer in enumerate(encoder.layer):
            states = layer(states, pairs, relative_pos=distances, rel_embeddings=table)[0]
            if index == 0 and getattr(encoder, "conv", None) is not None:
                states = encoder.conv(embeddings, states, mask)
        found = encoder(embeddings, mask).last_hidden_state
        torch.testing.assert_close(states, found, rtol=0, atol=2e-5)
        assert torch.equal(found, model(tiny.ids(), attention_mask=mask)[0])
    else:
        states = embeddings
        rotary = {}
        if getattr(model, "rotary_embeddings", None) is not None:
            rotary["position_embeddings"] = model.rotary_embeddings(embeddings, torch.arange(12)[None])
        for layer in model.encoder.layer:
            states = layer(states, **rotary)
            assert isinstance(states, Tensor)
        states = model.encoder.emb_layer_norm_after(states)
        torch.testing.assert_close(states, model(tiny.ids())[0], rtol=0, atol=2e-5)
