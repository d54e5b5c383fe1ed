"""The auditor: its rule both ways, what it finds in upstream, and that ours is clean."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from outplace.models.outputs import BaseModelOutput
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outplace
from outplace import audit_command
from outplace.auditor import AuditReport, audit


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), requires_grad=True)


def lines(report: AuditReport) -> list[str]:
    """The code of the lines that write, each once."""
    return list(dict.fromkeys(write.line.text for write in report.writes if write.line))


# The rule: writes that are the model's own


def add_to_input(x: Tensor) -> Tensor:
    x += 1
    return x


def set_item(x: Tensor) -> Tensor:
    x[0] = 1
    return x


def into_out(x: Tensor) -> Tensor:
    total = torch.empty_like(x)
    torch.add(x, x, out=total)
    return total


def write_to_fresh(x: Tensor) -> Tensor:
    noise = torch.empty_like(x)
    noise.uniform_()
    return x * noise


def write_to_view(x: Tensor) -> Tensor:
    y = x * 2
    y.t().mul_(3)
    return y


def initialise(x: Tensor) -> Tensor:
    weight = torch.empty(4, 4)
    nn.init.xavier_uniform_(weight)
    return x @ weight


def foreach(x: Tensor) -> Tensor:
    parts = [x * 1, x * 2]
    torch._foreach_add_(parts, 1.0)
    return parts[0] + parts[1]


def write_to_data(x: Tensor) -> Tensor:
    x.data.clamp_(min=0)
    return x * 2


@pytest.mark.parametrize(
    ("function", "operator", "code"),
    [
        (add_to_input, "aten.add_.Tensor", "x += 1"),
        (set_item, "aten.fill_.Tensor", "x[0] = 1"),
        (into_out, "aten.add.out", "torch.add(x, x, out=total)"),
        (write_to_fresh, "aten.uniform_.default", "noise.uniform_()"),
        (write_to_view, "aten.mul_.Tensor", "y.t().mul_(3)"),
        (initialise, "aten.uniform_.default", "nn.init.xavier_uniform_(weight)"),
        (foreach, "aten._foreach_add_.Scalar", "torch._foreach_add_(parts, 1.0)"),
        (write_to_data, "aten.clamp_.default", "x.data.clamp_(min=0)"),
    ],
)
def test_a_write_from_python_is_the_models(function: Callable[..., Any], operator: str, code: str) -> None:
    report = audit(function, torch.randn(3, 4))
    assert {write.operator for write in report.writes} == {operator}
    assert lines(report) == [code]
    assert not report.clean


def test_inplace_dropout_is_the_models_but_its_noise_is_torchs() -> None:
    report = audit(lambda x: F.dropout(x, 0.5, inplace=True), torch.randn(3, 4))
    assert [write.operator for write in report.writes] == ["aten.mul_.Tensor"]
    assert report.writes[0].is_input
    assert {write.operator for write in report.torch_writes} == {"aten.bernoulli_.float", "aten.div_.Scalar"}


def test_running_statistics_are_the_models() -> None:
    norm = nn.BatchNorm1d(4)
    targets = {write.target for write in audit(norm, torch.randn(3, 4)).writes}
    assert targets == {"buffer running_mean", "buffer running_var", "buffer num_batches_tracked"}
    assert audit(norm.eval(), torch.randn(3, 4)).clean


def test_an_operator_is_not_taken_at_its_word() -> None:
    @torch.library.custom_op("outplace_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.clone()

    report = audit(lambda x: double(x), torch.ones(3))
    assert [write.operator for write in report.writes] == ["outplace_tests.double.default"]


def test_a_reused_address_is_no_old_storage() -> None:
    def many(x: Tensor) -> Tensor:
        for _ in range(50):
            x = F.dropout(x, 0.1)
        return x

    report = audit(many, torch.randn(64, 64))
    assert report.clean
    assert len(report.torch_writes) == 100


# The rule: writes that are torch's


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: F.dropout(x, 0.5), "aten.bernoulli_.float"),
        (lambda x: F.one_hot(torch.arange(4)) * x.sum(), "aten.scatter_.value"),
        (lambda x: x.as_strided((3, 2), (1, 1)), "aten.index_add_.default"),
        (lambda x: x.cumprod(0), "aten.masked_fill_.Scalar"),
    ],
)
def test_a_write_to_what_the_call_has_made_is_torchs(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    report = audit(function, leaf())
    assert operator in {write.operator for write in report.torch_writes}
    assert report.clean
    assert report.backward


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masked_sdpa_is_clean_in_both_directions(dropout: float) -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    q = leaf(2, 2, 4, 8)
    report = audit(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=dropout), q)
    assert report.clean
    assert report.backward
    operators = {write.operator for write in report.torch_writes}
    assert operators <= {"aten.bernoulli_.float", "aten.div_.Scalar", "aten.copy_.default"}
    assert operators


def test_a_copy_that_autograd_makes_for_a_view_is_torchs_and_has_the_line_of_its_forward() -> None:
    report = audit(write_to_view, leaf())
    copies = [write for write in report.torch_writes if write.operator == "aten.copy_.default"]
    assert copies
    assert {write.line.text for write in copies if write.line} == {"y.t().mul_(3)"}
    assert lines(report) == ["y.t().mul_(3)"]


def test_adding_up_gradients_is_apart() -> None:
    def twice(x: Tensor) -> Tensor:
        for _ in range(2):
            x.exp().sum().backward()
        return x

    report = audit(twice, leaf())
    assert report.clean
    assert [write.operator for write in report.gradient_accumulation] == ["aten.add_.Tensor"] * 2


# Backward


class WritesToGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(2)


class IsView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(3, 4)


def test_a_custom_backward_is_the_models() -> None:
    report = audit(lambda x: WritesToGradient.apply(x), leaf())
    (write,) = report.writes
    assert write.phase == "backward"
    assert write.line is not None
    assert write.line.text == "return grad.mul_(2)"
    assert audit(lambda x: WritesToGradient.apply(x), leaf(), backward=False).clean


@pytest.mark.parametrize("run", ["backward", "autograd.grad"])
def test_a_backward_inside_forward_is_seen(run: str) -> None:
    def penalty(x: Tensor) -> Tensor:
        loss = (WritesToGradient.apply(x * 1) * x.detach()).sum()
        if run == "backward":
            loss.backward()
            return x * 2
        return torch.autograd.grad(loss, x, create_graph=True)[0] + x

    report = audit(penalty, leaf())
    assert lines(report) == ["return grad.mul_(2)"]
    assert report.writes[0].phase == "backward"


def test_a_gradient_hook_is_the_models() -> None:
    def hooked(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad.mul_(2))
        return y.exp()

    report = audit(hooked, leaf())
    assert [(write.operator, write.phase) for write in report.writes] == [("aten.mul_.Tensor", "backward")]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_recomputes_is_audited_again(reentrant: bool) -> None:
    linear = nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        y = linear(x)
        y += x
        return F.dropout(y, 0.1)

    report = audit(lambda x: checkpoint(block, x, use_reentrant=reentrant), leaf())
    assert lines(report) == ["y += x"]
    assert [write.phase for write in report.writes] == ["forward", "backward"]
    assert {write.phase for write in report.torch_writes} == {"forward", "backward"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_of_torch_that_a_checkpoint_recomputes_is_the_models(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    report = audit(lambda x: checkpoint(block, x, use_reentrant=reentrant), leaf())
    assert [(w.operator, w.phase) for w in report.writes] == [
        ("aten.relu_.default", "forward"),
        ("aten.relu_.default", "backward"),
    ]


# Writes that autograd refuses


def test_a_refused_write_to_a_leaf_is_a_finding() -> None:
    report = audit(add_to_input, leaf())
    (write,) = report.writes
    assert write.refused
    assert write.is_leaf
    assert write.is_input
    assert write.target == "input 0"
    assert lines(report) == ["x += 1"]
    assert "leaf" in str(report.error)
    assert not report.clean


def test_a_refused_write_to_a_view_of_a_custom_function_is_a_finding() -> None:
    def scale(x: Tensor) -> Tensor:
        y = IsView.apply(x * 1)
        y /= 2
        return y

    report = audit(scale, leaf())
    (write,) = report.writes
    assert write.refused
    assert write.is_view
    assert write.from_custom_function
    assert lines(report) == ["y /= 2"]
    assert isinstance(report.error, RuntimeError)


def test_a_refused_out_argument_is_a_finding() -> None:
    report = audit(lambda x, y: torch.add(x, x, out=y), leaf(), torch.empty(3, 4))
    assert [(write.argument, write.refused) for write in report.writes] == [("out", True)]


def test_a_refusal_that_the_model_swallows_is_a_finding_but_no_error() -> None:
    def attempt(x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            x.add_(1)
        return x * 2

    report = audit(attempt, leaf())
    assert [write.refused for write in report.writes] == [True]
    assert report.error is None
    assert report.backward


def test_a_value_written_over_before_backward_needs_it_is_an_error() -> None:
    def sigmoid(x: Tensor) -> Tensor:
        y = x.sigmoid()
        y.mul_(2)
        return y

    report = audit(sigmoid, leaf())
    assert lines(report) == ["y.mul_(2)"]
    assert "modified by an inplace operation" in str(report.error)


def test_a_write_that_torch_refuses_for_shared_memory_is_a_finding() -> None:
    report = audit(lambda x: WritesToGradient.apply(x).sum(), leaf())
    assert lines(report) == ["return grad.mul_(2)"]
    assert "single memory location" in str(report.error)


def test_another_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        audit(lambda x: x @ x, leaf())


# What an audit leaves behind, and says


def test_an_audit_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = leaf()
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    contents = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    x_gradient, generator = x.grad, torch.get_rng_state()

    assert audit(model, x).writes

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert torch.equal(parameter.grad, contents[name])
    assert x.grad is x_gradient
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)


def test_an_audit_leaves_inputs_as_they_were() -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    assert audit(add_to_input, x).writes
    assert torch.equal(x, before)


def test_an_audit_leaves_the_graph_of_its_inputs_to_the_caller() -> None:
    x = leaf()
    y = x.exp()
    assert audit(torch.sin, y).backward
    assert x.grad is None
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_gradients_of_leaves_that_only_the_function_knows_are_put_back() -> None:
    weight = leaf()
    audit(lambda x: x * weight, torch.ones(3, 4))
    assert weight.grad is None


def test_without_gradients_the_report_says_that_there_was_no_backward() -> None:
    report = audit(lambda x: x * 2, torch.ones(3))
    assert not report.backward
    assert "no backward" in str(report)
    assert audit(lambda x: x * 2, torch.ones(3), backward=False).notes == []


def test_outputs_are_found_in_any_container() -> None:
    outputs = {
        "tuple": lambda y: (1, (y, None)),
        "mapping": lambda y: {"deep": [y]},
        "dataclass": lambda y: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=y),
        "ours": lambda y: BaseModelOutput(hidden_states=(y, y)),
    }
    for name, wrap in outputs.items():
        report = audit(lambda x, wrap=wrap: wrap(WritesToGradient.apply(x)), leaf())
        assert lines(report) == ["return grad.mul_(2)"], name


def test_the_table_counts_equal_writes_and_names_the_line() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                with torch.no_grad():
                    self.bias.add_(1)
            return x + self.bias

    first, _, row, last = str(audit(Model(), torch.ones(4))).splitlines()
    assert first == "Model: 3 writes of its own (forward and backward)"
    assert row.split()[:2] == ["3", "forward"]
    assert "test_auditor.py:" in row
    assert "parameter bias (leaf)" in row
    assert row.endswith("self.bias.add_(1)")
    assert last.startswith("not counted: ")


# Upstream


def tiny(family: str, library: Any = outplace, **changes: Any) -> Any:
    fields = audit_command.TINY[family] | changes
    return getattr(library, f"{family}Config")(**fields)


def audited(model: nn.Module, config: Any, **inputs: Any) -> AuditReport:
    return audit(model, **audit_command.random_inputs(type(model).__name__, config), **inputs)


@pytest.mark.parametrize("training", [False, True])
def test_the_writes_of_upstreams_deberta_are_found(training: bool) -> None:
    config = tiny("Deberta", transformers)
    report = audited(transformers.DebertaModel(config).train(training), config)
    code = " ".join(lines(report))
    assert "pos_query_layer /=" in code
    assert "score +=" in code
    assert len(lines(report)) == 2
    assert report.backward
    assert all(write.is_view for write in report.writes if "/=" in write.line.text)


def test_the_writes_of_upstreams_other_families_are_found() -> None:
    config = tiny("DebertaV2", transformers)
    code = " ".join(lines(audited(transformers.DebertaV2Model(config), config)))
    assert "score +=" in code
    assert "out.masked_fill_" in code

    config = tiny("Esm", transformers)
    config._attn_implementation = "eager"
    model = transformers.EsmModel(config)
    ids = audit_command.random_inputs("EsmModel", config)
    code = " ".join(lines(audit(model.predict_contacts, ids["input_ids"], ids["attention_mask"])))
    assert "attns *=" in code
    assert "avg.div_" in code


# Ours

RUNS = {
    "eval": (False, None),
    "train": (True, None),
    "train, checkpointed": (True, {}),
    "train, checkpointed reentrantly": (True, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "train, attention checkpointed": (True, {"attention_only": True}),
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "Deberta": [
        {},
        *({"talking_head": False, "attn_implementation": path} for path in ("sdpa", "blockwise")),
    ],
    "DebertaV2": [
        {},
        {"share_att_key": True, "position_buckets": -1, "attn_implementation": "blockwise"},
        {"attn_implementation": "sdpa"},
    ],
    "Esm": [
        {"position_embedding_type": position, "attn_implementation": attention}
        for position, attention in itertools.product(("rotary", "absolute"), ("eager", "sdpa"))
    ],
}
DECODERS = [{"legacy": False}, {"enhanced_mask_decoder": True, "position_biased_input": False}]
CLASSES = [name for name in outplace.__all__ if "For" in name or name.endswith("Model")]
CASES = [
    (name, changes)
    for name in CLASSES
    if not name.endswith("PreTrainedModel")
    for family in [audit_command.family_of(name)]
    for changes in VARIANTS[family] + (DECODERS if name.endswith("ForMaskedLM") and family != "Esm" else [])
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_ours_does_not_write(name: str, changes: dict[str, Any], run: str) -> None:
    config = tiny(audit_command.family_of(name), **changes)
    model = getattr(outplace, name)(config)
    training, options = RUNS[run]
    model.train(training)
    if options is not None:
        model.gradient_checkpointing_enable(**options)
    in_backward: list[bool] = []
    attention = next(m for name, m in model.named_modules() if name.endswith("layer.0.attention.self"))
    attention.register_forward_pre_hook(
        lambda *given: in_backward.append(torch._C._current_graph_task_id() != -1)
    )
    report = audited(model, config)
    assert report.clean, str(report)
    assert report.backward
    assert any(in_backward) == (options is not None)


@pytest.mark.parametrize("run", ["eval", "train"])
@pytest.mark.parametrize("position", ["rotary", "absolute"])
def test_our_contact_prediction_does_not_write(position: str, run: str) -> None:
    config = tiny("Esm", position_embedding_type=position)
    model = outplace.EsmForMaskedLM(config).train(run == "train")
    inputs = audit_command.random_inputs("EsmModel", config)
    report = audit(model.predict_contacts, inputs["input_ids"], inputs["attention_mask"])
    assert report.clean, str(report)
    assert report.backward


@pytest.mark.parametrize("name", ["DebertaModel", "DebertaV2Model", "EsmModel"])
def test_ours_does_not_write_to_embeddings_that_are_leaves(name: str) -> None:
    config = tiny(audit_command.family_of(name))
    model = getattr(outplace, name)(config)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    assert audited(model, config).clean
    report = audit(model, inputs_embeds=leaf(2, 6, config.hidden_size))
    assert report.clean, str(report)
    assert report.backward


# Each in-place line that upstream has had, put into a copy of our code

MUTATIONS = [
    (
        "deberta.blocks",
        "Embeddings.forward",
        "embeddings = embeddings + self.positions(length, position_ids, embeddings.device)",
        "position_embeddings = self.positions(length, position_ids, embeddings.device)",
        "embeddings += position_embeddings",
        ("DebertaModel", "DebertaV2Model"),
    ),
    (
        "deberta.blocks",
        "Embeddings.forward",
        "embeddings = embeddings + self.token_type_embeddings(token_type_ids)",
        "token_type_embeddings = self.token_type_embeddings(token_type_ids)",
        "embeddings += token_type_embeddings",
        ("DebertaModel", "DebertaV2Model"),
    ),
    (
        "deberta.modeling",
        "DisentangledSelfAttention.project_positions",
        "pos_query = self.heads(self.pos_q_proj(table))[0] / self.scale",
        "pos_query = self.heads(self.pos_q_proj(table))[0]",
        "pos_query /= self.scale",
        ("DebertaModel",),
    ),
    (
        "attention.disentangled",
        "position_scores",
        "position = p2c if position is None else position + p2c",
        "score = position",
        "score += p2c",
        ("DebertaModel", "DebertaV2Model"),
    ),
    (
        "deberta_v2.modeling",
        "ConvLayer.forward",
        "convolved = convolved.masked_fill(~mask.unsqueeze(-1), 0)",
        "out = convolved",
        "out.masked_fill_(~mask.unsqueeze(-1), 0)",
        ("DebertaV2Model",),
    ),
    (
        "esm.modeling",
        "EsmEmbeddings.forward",
        "embeddings = token_dropout(embeddings, is_mask, attention_mask, sequences)",
        "mask = (input_ids == self.mask_token_id).unsqueeze(-1)",
        "embeddings.masked_fill_(mask, 0.0)",
        ("EsmModel",),
    ),
    (
        "esm.modeling",
        "EsmEmbeddings.forward",
        "embeddings = embeddings + position_embeddings(position_ids)",
        "positions = position_embeddings(position_ids)",
        "embeddings += positions",
        ("EsmModel",),
    ),
    (
        "esm.modeling",
        "Residual.add",
        "return drop(self.dropout, x) + residual",
        "hidden_states = self.dropout(x)",
        "hidden_states += residual",
        ("EsmModel",),
    ),
    (
        "esm.modeling",
        "EsmContactPredictionHead.forward",
        "attentions = attentions * (kept[:, :, None] * kept[:, None, :])[:, None, None]",
        "attns = attentions",
        "attns *= (kept[:, :, None] * kept[:, None, :])[:, None, None]",
        ("EsmModel.predict_contacts",),
    ),
    (
        "esm.modeling",
        "average_product_correct",
        "return x - product / torch.where(total == 0, 1, total)",
        "avg = product",
        "avg.div_(torch.where(total == 0, 1, total))",
        ("EsmModel.predict_contacts",),
    ),
]
RESULTS = {
    "hidden_states += residual": "return hidden_states",
    "avg.div_(torch.where(total == 0, 1, total))": "return x - avg",
}
"""What follows a mutation that replaces a `return`."""


def scratch_copy(function: Callable[..., Any], old: str, new: list[str], folder: Path) -> Callable[..., Any]:
    """A copy of a function in which the line `old` is the lines `new`."""
    source = textwrap.dedent(inspect.getsource(function)).splitlines()
    found = [i for i, line in enumerate(source) if line.strip() == old]
    assert len(found) == 1, f"{function.__qualname__} no longer has the line {old!r}: update MUTATIONS"
    indent = source[found[0]].removesuffix(old)
    source[found[0] : found[0] + 1] = [indent + line for line in new]
    path = folder / "scratch.py"
    path.write_text("from __future__ import annotations\n" + "\n".join(source) + "\n", encoding="utf-8")
    namespace = dict(function.__globals__)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    return namespace[function.__name__]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("place", "function", "old", "prepared", "historic", "name"),
    [(*mutation[:-1], name) for mutation in MUTATIONS for name in mutation[-1]],
    ids=lambda value: value if " " not in value else "",
)
def test_each_historic_write_is_caught(
    place: str,
    function: str,
    old: str,
    prepared: str,
    historic: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner: Any = importlib.import_module(f"outplace.models.{place}")
    *path, attribute = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    new = [prepared, historic, *([RESULTS[historic]] if historic in RESULTS else [])]
    monkeypatch.setattr(owner, attribute, scratch_copy(getattr(owner, attribute), old, new, tmp_path))

    class_name, _, method = name.partition(".")
    changes = {"position_embedding_type": "absolute"} if class_name == "EsmModel" else {}
    config = tiny(audit_command.family_of(class_name), **changes)
    model = getattr(outplace, class_name)(config)
    inputs = audit_command.random_inputs(class_name, config)
    report = audit(getattr(model, method) if method else model, *inputs.values())
    assert lines(report) == [historic]


# The command


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    audit_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["audit", *arguments])
    return args.run(args)  # type: ignore[no-any-return]


def test_the_command_passes_a_model_that_does_not_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("DebertaV2ForSequenceClassification", "--checkpointing", "reentrant") == 0
    printed = capsys.readouterr().out
    assert "[eval] DebertaV2ForSequenceClassification: 0 writes of its own (forward and backward)" in printed
    assert "[train]" in printed


def test_the_command_fails_a_model_that_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("DebertaModel", "--upstream", "--eval") == 1
    printed = capsys.readouterr().out
    assert "pos_query_layer /=" in printed
    assert "[train]" not in printed


def test_the_command_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny("Esm", architectures=["EsmForMaskedLM"])
    outplace.EsmForMaskedLM(config).save_pretrained(tmp_path)
    assert run_command(str(tmp_path), "--train", "--attn-implementation", "eager") == 0
    assert "EsmForMaskedLM" in capsys.readouterr().out
    assert run_command(str(tmp_path), "--class", "EsmModel", "--eval") == 0
    assert "EsmModel" in capsys.readouterr().out


def test_the_command_refuses_a_class_that_is_not_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}', encoding="utf-8")
    with pytest.raises(ValueError, match="BertModel"):
        run_command(str(tmp_path))
