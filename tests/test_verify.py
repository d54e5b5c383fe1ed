"""`outplace verify`: the same checkpoint here and upstream."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from outplace.weights.renames import Rename
from safetensors.torch import load_file, save_file
from torch import Tensor

import outplace
from outplace.cli import main
from outplace.comparison import difference, real_values

FEW = Path(__file__).parent / "data" / "few_proteins.fasta"
LIBRARIES = ("outplace", "transformers")
PER_LAYER = ["embeddings", "layer 1", "layer 2", "attention 1", "attention 2"]


def stored(name: str, folder: Path, **fields: Any) -> Path:
    """A checkpoint as upstream writes it, with weights that make every term count."""
    torch.manual_seed(0)
    family = tiny.family(name)
    config = getattr(transformers, f"{family}Config")(**tiny.CONFIGS[family] | fields)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if key.endswith("orm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    if family == "Esm":
        outplace.EsmTokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def esm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored("EsmForMaskedLM", tmp_path_factory.mktemp("esm"))


@pytest.fixture(scope="session")
def deberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored("DebertaV2ForMaskedLM", tmp_path_factory.mktemp("deberta"))


def verify(capsys: pytest.CaptureFixture[str], folder: Path, *options: Any) -> tuple[int, dict[str, Any]]:
    """The exit status and the report; nothing else may be printed."""
    capsys.readouterr()
    status = main(["verify", str(folder), "--json", "-", *map(str, options)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, json.loads(captured.out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that a failing command leaves."""
    capsys.readouterr()
    assert main(["verify", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line.removeprefix("outplace: error: ")


def relative(report: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["relative"] for row in report["differences"]}


# A checkpoint that is the same in both


@pytest.mark.parametrize("name", tiny.CLASSES)
def test_upstreams_checkpoint_of_each_class_is_equal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = verify(capsys, stored(name, tmp_path), "--attentions")
    assert status == 0
    assert report["within"]
    assert report["class_name"] == name
    own = {"Model": ["last_hidden_state"], "ForQuestionAnswering": ["start_logits", "end_logits"]}
    outputs = own.get(name.removeprefix(tiny.family(name)), ["logits"])
    outputs += ["pooler_output"] if name == "EsmModel" else []
    assert [row["name"] for row in report["differences"]] == PER_LAYER + outputs
    assert max(relative(report).values()) < 1e-5
    nothing: dict[str, list[str]] = {"missing": [], "unexpected": []}
    assert report["keys"] == {"outplace": nothing, "transformers": nothing}
    assert report["copied"] == []


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_each_dtype_has_a_tolerance_that_a_correct_model_keeps(
    esm: Path, deberta: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (esm, deberta):
        status, report = verify(capsys, folder, "--dtype", dtype)
        assert status == 0
        assert report["dtype"] == dtype


def test_fused_attention_is_compared_with_fused_attention(
    esm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: asked.append(1) or fused(*args, **options),
    )
    assert verify(capsys, esm)[0] == 0
    assert len(asked) == 0
    assert verify(capsys, esm, "--attn-implementation", "sdpa")[0] == 0
    assert len(asked) == 4  # two layers in each library


def test_the_numbers_are_those_of_the_two_libraries(esm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "LAGVS<mask>ERT"
    _, report = verify(capsys, esm, "--text", text)
    batch = outplace.EsmTokenizer()([text], return_tensors="pt")
    ours = outplace.EsmForMaskedLM.from_pretrained(esm, attn_implementation="eager")(**batch).logits
    model = transformers.EsmForMaskedLM.from_pretrained(esm, attn_implementation="eager")
    theirs = model(**batch).logits
    apart = (ours - theirs).abs().max().item()
    (row,) = [row for row in report["differences"] if row["name"] == "logits"]
    assert row["absolute"] == pytest.approx(apart)
    assert row["relative"] == pytest.approx(apart / theirs.abs().max().item())


def test_the_text_report_says_what_the_json_file_says(
    esm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert main(["verify", str(esm), "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(path.read_text())
    assert report["versions"]["transformers"] == transformers.__version__
    assert report["tokens"]["compared"] > 0
    assert f"tokens: {report['tokens']['compared']} compared, 0 differ" in lines
    for row in report["differences"]:
        (line,) = [line for line in lines if line.startswith(row["name"])]
        assert line.removeprefix(row["name"]).split() == [f"{row['absolute']:.1e}", f"{row['relative']:.1e}"]
    assert "keys, transformers: none missing; none unexpected" in lines
    assert lines[-1] == report["verdict"]
    assert lines[-1].startswith("equal: ")


# A checkpoint that is not


def test_a_layer_that_differs_is_named(
    deberta: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outplace.models.deberta.blocks import Layer

    forward, calls = Layer.forward, []

    def second_is_off(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        states, weights = forward(self, *args, **options)
        return (states * 1.01 if len(calls) == 2 else states), weights

    monkeypatch.setattr(Layer, "forward", second_is_off)
    status, report = verify(capsys, deberta, "--class", "DebertaV2Model")
    assert status == 1
    assert not report["within"]
    found = relative(report)
    assert found["embeddings"] == 0
    assert found["layer 1"] < 1e-5
    assert found["layer 2"] == pytest.approx(0.01, rel=0.01)
    assert report["worst"] == "layer 2"
    assert report["verdict"].startswith("NOT equal: past the tolerance of 1e-04: the worst output is layer 2")


def test_the_tolerance_can_be_chosen(esm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = verify(capsys, esm)
    largest = max(relative(report).values())
    assert 0 < largest < report["tolerance"] == 1e-4
    assert verify(capsys, esm, "--tolerance", largest / 2)[0] == 1
    assert verify(capsys, esm, "--tolerance", largest)[0] == 0


def test_tokens_that_differ_are_listed_and_both_models_get_ours(
    esm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shifted(outplace.EsmTokenizer):
        def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
            found = super().__call__(text, *args, **options)
            found["input_ids"] = [[*row[:2], 7, *row[3:], 2] for row in found["input_ids"]]
            return found

    monkeypatch.setattr(outplace, "EsmTokenizer", Shifted)
    status, report = verify(capsys, esm, "--text", "LAGV", "--text", "M")
    assert status == 1
    tokens = report["tokens"]
    assert tokens["compared"] == 7 + 4
    assert tokens["differing"] == 4
    pieces = [
        (place["text"], place["position"], *(place[side] and place[side]["piece"] for side in LIBRARIES))
        for place in tokens["first"]
    ]
    assert pieces == [(0, 2, "V", "A"), (0, 6, "<eos>", None), (1, 2, "V", "<eos>"), (1, 3, "<eos>", None)]
    assert max(relative(report).values()) < 1e-5
    assert report["verdict"].endswith("4 tokens differ")


def test_no_more_than_ten_differing_tokens_are_listed(
    esm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Longer(outplace.EsmTokenizer):
        def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
            found = super().__call__(text, *args, **options)
            found["input_ids"] = [[*row, *[2] * 15] for row in found["input_ids"]]
            return found

    monkeypatch.setattr(outplace, "EsmTokenizer", Longer)
    _, report = verify(capsys, esm, "--text", "LAGV")
    assert report["tokens"]["differing"] == 15
    assert len(report["tokens"]["first"]) == 10
    assert report["tokens"]["first"][0] == {
        "text": 0,
        "position": 6,
        "outplace": {"id": 2, "piece": "<eos>"},
        "transformers": None,
    }
    main(["verify", str(esm), "--text", "LAGV"])
    assert "text 0, token 6: outplace '<eos>' (2), transformers nothing" in capsys.readouterr().out


# Keys


@pytest.mark.parametrize("name", ["EsmForSequenceClassification", "DebertaV2ForSequenceClassification"])
def test_a_head_that_the_checkpoint_lacks_is_the_same_in_both_and_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(f"{tiny.family(name)}ForMaskedLM", tmp_path)
    status, report = verify(capsys, folder, "--class", name)
    assert status == 0
    keys = report["keys"]
    assert keys["outplace"] == keys["transformers"]
    assert report["copied"] == keys["outplace"]["missing"]
    assert "classifier.dense.weight" in report["copied"] or "classifier.weight" in report["copied"]
    assert any(key.startswith(("cls.", "lm_head.")) for key in keys["outplace"]["unexpected"])
    (note,) = [note for note in report["notes"] if "lacks" in note]
    assert "the same random values were put in both models" in note


@pytest.mark.parametrize("family", ["Deberta", "DebertaV2", "Esm"])
def test_a_tied_parameter_that_is_missing_is_told_once(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(f"{family}Model", tmp_path)
    status, report = verify(capsys, folder, "--class", f"{family}ForMaskedLM")
    assert status == 0
    for library in LIBRARIES:
        missing = report["keys"][library]["missing"]
        assert missing == report["copied"]
        assert len(missing) == 5  # dense and norm, with their biases, and the bias of the vocabulary
        assert not any("decoder" in name for name in missing)


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    tensors = {change(key): tensor.clone() for key, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def test_what_upstream_alone_does_not_find_is_given_to_it_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored("EsmForMaskedLM", tmp_path)
    renamed(folder, lambda key: key.replace("lm_head.dense.", "odd."))
    monkeypatch.setattr(
        outplace.EsmForMaskedLM,
        "renames",
        (*outplace.EsmForMaskedLM.renames, Rename(r"^odd\.", "lm_head.dense.")),
    )
    status, report = verify(capsys, folder)
    assert status == 0
    assert report["copied"] == ["lm_head.dense.bias", "lm_head.dense.weight"]
    assert report["keys"]["outplace"] == {"missing": [], "unexpected": []}
    assert report["keys"]["transformers"] == {
        "missing": ["lm_head.dense.bias", "lm_head.dense.weight"],
        "unexpected": ["odd.bias", "odd.weight"],
    }
    assert "transformers did not find 2 parameters" in " ".join(report["notes"])


def test_what_is_not_found_here_alone_is_a_difference_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored("EsmForMaskedLM", tmp_path)
    monkeypatch.setattr(outplace.EsmForMaskedLM, "renames", ())
    status, report = verify(capsys, folder)
    assert status == 1
    assert report["keys"]["outplace"]["missing"]
    assert report["keys"]["transformers"]["missing"] == []
    assert "outplace did not find" in " ".join(report["notes"])


def test_the_original_masked_language_head_is_compared_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored("DebertaV2ForMaskedLM", tmp_path, legacy=False)
    config = json.loads((folder / "config.json").read_text())
    del config["legacy"], config["architectures"]  # as the published checkpoints
    (folder / "config.json").write_text(json.dumps(config))
    status, report = verify(capsys, folder)
    assert status == 0
    assert report["class_name"] == "DebertaV2ForMaskedLM"
    assert report["copied"] == report["keys"]["transformers"]["missing"] == []
    assert "transformers was told legacy=False" in " ".join(report["notes"])


# Inputs


def test_without_tokenizer_files_tokens_are_random(deberta: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = verify(capsys, deberta)
    assert status == 0
    assert report["inputs"] == "random tokens"
    assert report["tokens"] is None
    assert "tokens are random" in " ".join(report["notes"])
    assert "hold" in error_of(capsys, deberta, "--text", "word")


def test_a_tokenizer_that_upstream_cannot_load_leaves_the_models_compared(
    esm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ImportError("needs a package\nand more lines")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    status, report = verify(capsys, esm)
    assert status == 0
    assert report["tokens"] is None
    assert report["inputs"] == "built-in texts"
    (note,) = report["notes"]
    assert note == ("tokenizers are not compared: transformers' fails with ImportError: needs a package")


@pytest.mark.parametrize(("limit", "said"), [(2, "the first 2 proteins"), (100, "all 3 proteins")])
def test_proteins_come_from_a_fasta_file(
    esm: Path, tmp_path: Path, limit: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">a\nLAGV\n>b\nMK\n>c\nMKT\n")
    status, report = verify(capsys, esm, "--fasta", fasta, "--limit", limit)
    assert status == 0
    assert report["inputs"] == f"{said} of {fasta}"
    assert report["input_tokens"] == sum([6, 4, 5][:limit])


def test_fasta_is_refused_where_it_makes_no_sense(
    esm: Path, deberta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "reads no proteins" in error_of(capsys, deberta, "--fasta", FEW)
    (tmp_path / "empty").touch()
    assert "holds no proteins" in error_of(capsys, esm, "--fasta", tmp_path / "empty")


def test_pickles_are_read_where_they_are_allowed(
    esm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "pickled"
    folder.mkdir()
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        (folder / name).write_bytes((esm / name).read_bytes())
    torch.save(load_file(esm / "model.safetensors"), folder / "pytorch_model.bin")
    assert "pickle" in error_of(capsys, folder)
    assert verify(capsys, folder, "--allow-pickle")[0] == 0


# What is compared


def test_padding_is_not_compared() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    states, weights, ends = torch.randn(2, 3, 4), torch.randn(2, 5, 3, 3), torch.randn(2, 3)
    output = {"hidden_states": (states,), "attentions": (weights,), "end_logits": ends, "pooled": ends}

    def disturbed(x: Tensor, real: Tensor) -> Tensor:
        return torch.where(real, x, torch.nan)

    pairs = (mask[:, None, :, None] & mask[:, None, None, :]).expand_as(weights)
    other = {
        "hidden_states": (disturbed(states, mask[..., None]),),
        "attentions": (disturbed(weights, pairs),),
        "end_logits": disturbed(ends, mask),
        "pooled": ends,
    }
    found, expected = real_values(other, mask), real_values(output, mask)
    assert list(found) == ["embeddings", "attention 1", "end_logits", "pooled"]
    assert {name: x.numel() for name, x in found.items()} == {
        "embeddings": 4 * 4,
        "attention 1": 5 * (9 + 1),
        "end_logits": 4,
        "pooled": 6,
    }
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("ours", "upstream", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, -4.0], 6.0, 1.5),
        ([0.5, 0.0], [0.0, 0.0], 0.5, 0.5),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0, 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0, 0.0),
        ([0.0, 1.0], [math.nan, 1.0], math.inf, math.inf),
        ([math.nan, 1.0], [0.0, 1.0], math.inf, math.inf),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf, math.inf),
        ([], [], 0.0, 0.0),
    ],
)
def test_a_difference_is_absolute_and_relative_to_upstreams_largest(
    ours: list[float], upstream: list[float], absolute: float, relative: float
) -> None:
    found = difference("x", torch.tensor(ours), torch.tensor(upstream))
    assert (found.absolute, found.relative) == (absolute, relative)


def test_outputs_of_other_shapes_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"logits has shape \(2,\) in outplace and \(3,\)"):
        difference("logits", torch.zeros(2), torch.zeros(3))


def test_values_that_only_one_library_has_finite_are_null_in_json(
    esm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = outplace.EsmForMaskedLM.forward

    def with_nan(self: Any, *args: Any, **options: Any) -> Any:
        output = forward(self, *args, **options)
        output.logits = output.logits * torch.nan
        return output

    monkeypatch.setattr(outplace.EsmForMaskedLM, "forward", with_nan)
    status, report = verify(capsys, esm)
    assert status == 1
    assert relative(report)["logits"] is None
    assert report["worst"] == "logits"


# Surroundings


def test_one_model_is_in_memory_at_a_time(
    esm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, alive = transformers.EsmForMaskedLM.from_pretrained, []

    def watched(*args: Any, **options: Any) -> Any:
        gc.collect()
        alive.extend(x for x in gc.get_objects() if type(x) is outplace.EsmForMaskedLM)
        return load(*args, **options)

    monkeypatch.setattr(transformers.EsmForMaskedLM, "from_pretrained", watched)
    assert verify(capsys, esm)[0] == 0
    assert alive == []


def test_logging_and_environment_are_left_as_they_were(esm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> list[Any]:
        log = transformers.logging
        own = logging.getLogger("outplace.weights").level
        return [log.get_verbosity(), log.is_progress_bar_enabled(), own, dict(os.environ)]

    before = state()
    assert verify(capsys, esm, "--class", "EsmModel")[0] == 0  # of which both libraries would warn
    assert state() == before


def test_without_transformers_the_error_says_what_to_install(
    esm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    expected = "outplace verify compares with transformers; install outplace[verify]"
    assert error_of(capsys, esm) == expected


def test_help_imports_neither_transformers_nor_torch() -> None:
    code = (
        "import sys; from outplace.cli import build_parser; build_parser().format_help(); "
        "import outplace.verify; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_what_upstream_cannot_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored("DebertaModel", tmp_path)
    error = error_of(capsys, folder, "--dtype", "bfloat16")
    assert error.startswith(f"transformers cannot run {folder} as DebertaModel in bfloat16: RuntimeError: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--class", "DebertaModel"], "'DebertaModel' is no class of the checkpoint: EsmModel, "),
        (["--attentions", "--attn-implementation", "sdpa"], "output_attentions needs"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used here"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    esm: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, esm, *options).startswith(message)


@pytest.mark.parametrize(
    "options",
    [["--tolerance", "-1"], ["--tolerance", "nan"], ["--limit", "0"], ["--text", "M", "--fasta", "x"]],
)
def test_wrong_usage_exits_with_two(esm: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["verify", str(esm), *options])
    assert raised.value.code == 2
