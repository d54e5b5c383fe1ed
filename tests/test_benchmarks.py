"""The benchmark harness: what it reads is right, and what cannot run says why."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outplace.benchmarks import (
    answers,
    attention,
    bench,
    conditions,
    environments,
    measure,
    peers,
    report,
    running,
)
from outplace.benchmarks.cells import Cell, grid, shard
from outplace.benchmarks.conditions import EMBEDDED, LINEARS, Variant, verdict
from outplace.benchmarks.fit import exact_batch, largest_batch
from outplace.benchmarks.floors import floor
from outplace.benchmarks.in_place import LINES, in_place
from outplace.benchmarks.memory import Ledger
from outplace.benchmarks.shapes import DEBERTA, ESM, MODELS, V3, shape
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import outplace
from outplace import cli
from outplace.auditor import audit

TINY = {
    "tiny-deberta": ("Deberta", DEBERTA | shape(64, 1, 4) | {"vocab_size": 99}),
    "tiny-v3": ("DebertaV2", V3 | shape(64, 1, 4) | {"vocab_size": 99}),
    "tiny-esm": ("Esm", ESM | shape(64, 2, 4)),
}


@pytest.fixture(autouse=True)
def _tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in TINY.items():
        monkeypatch.setitem(MODELS, name, model)


def figures(cell: Cell, folder: Path | None) -> dict[str, Any]:
    return next(measure.results(cell, folder))


def planned(device: str, model: str, impl: str = "outplace", **fields: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"batch": 2, "length": 64, "mode": "train"} | fields
    found = figures(Cell("memory", model, impl, device, **options), None)
    assert "reason" not in found, found["reason"]
    return found


# The ledger


def test_a_ledger_counts_each_storage_once_and_until_it_ends() -> None:
    ledger = Ledger(nn.Identity())
    with ledger.watching():
        ledger.start()
        x = torch.zeros(1000)
        view = x[:10]
        y = x + 1
        assert ledger.total == 8000
        del x
        assert ledger.total == 8000, "a view keeps its storage"
        del view
        assert ledger.total == 4000
        del y
    assert ledger.total == 0
    peak = ledger.peak()
    assert peak.bytes == 8000
    assert sum(peak.parts().values()) == peak.bytes


def test_a_ledger_agrees_with_torchs_own_tracker() -> None:
    def run(tracker: Any, follow: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
        x = torch.randn(32, 64)
        follow(tracker, model, x)
        with tracker.watching() if isinstance(tracker, Ledger) else tracker:
            if isinstance(tracker, Ledger):
                tracker.start()
            model(x).square().mean().backward()

    def name(ledger: Ledger, model: nn.Module, x: Tensor) -> None:
        ledger.name("parameters", model.parameters())
        ledger.name("inputs", [x])

    with FakeTensorMode():
        ledger, theirs = Ledger(nn.Identity()), MemTracker()
        run(ledger, name)
        run(theirs, lambda tracker, model, x: tracker.track_external(model, x))
    expected = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ledger.peak().bytes == expected


def test_what_a_layer_retains_shows_under_its_name() -> None:
    class Hoarder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.hoard = x.new_zeros(10 * 2**20 // 4)
            return super().forward(x)

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), Hoarder(8, 8), nn.Linear(8, 8))
    ledger = Ledger(model)
    ledger.name("parameters", model.parameters())
    with ledger.watching():
        ledger.start()
        loss = model(torch.ones(4, 8)).sum()
        ledger.end_forward()
        loss.backward()
    peak = ledger.peak()
    name, size = next(iter(peak.by_module("saved activations").items()))
    assert name == "3"
    assert 10 * 2**20 <= size < 10 * 2**20 + 1000
    (largest,) = peak.largest(1)
    assert (largest["module"], largest["shape"]) == ("3", (10 * 2**20 // 4,))


# Plans


@pytest.mark.parametrize(
    ("impl", "model", "mode"),
    [
        ("outplace-eager", "tiny-deberta", "train"),
        ("outplace-blockwise", "tiny-v3", "infer"),
        ("outplace-blockwise", "tiny-v3", "train"),
        ("outplace-blockwise", "tiny-v3", "train-checkpoint"),
        ("transformers", "tiny-v3", "train"),
        ("outplace-sdpa", "tiny-esm", "train"),
    ],
)
def test_a_plan_is_what_a_cpu_allocates(impl: str, model: str, mode: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"batch": 2, "length": 300, "mode": mode}
    measure.write_checkpoint(model, tmp_path)
    real = figures(Cell("memory", model, impl, "cpu", **fields), tmp_path)
    assert "reason" not in real, real["reason"]
    plan = planned("plan-cpu", model, impl, **fields)
    assert plan["path"] == real["path"]
    assert plan["peak"] == pytest.approx(real["peak"], rel=0.03)


def test_plans_repeat_exactly() -> None:
    first, second = (planned("plan", "tiny-v3", "outplace-blockwise", batch=1, length=300) for _ in range(2))
    assert first == second


def test_attention_by_blocks_is_planned_below_all_pairs() -> None:
    eager, blocks = (
        planned("plan", "tiny-v3", impl, batch=1, length=1024)
        for impl in ("outplace-eager", "outplace-blockwise")
    )
    assert (eager["path"], blocks["path"]) == ("eager", "blockwise")
    assert blocks["peak"] < eager["peak"] / 2


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("impl", ["outplace", "transformers"])
def test_adapters_over_four_bit_weights_are_planned(impl: str, model: str) -> None:
    pytest.importorskip("peft")
    qlora, full = planned("plan", model, impl, mode="qlora"), planned("plan", model, impl)
    assert "stand-in" in qlora["note"]
    assert qlora["parts"]["parameters"] < full["parts"]["parameters"]
    assert qlora["parts"]["optimizer state"] < full["parts"]["optimizer state"]


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("impl", ["outplace", "transformers"])
def test_a_plan_is_what_cuda_allocates(impl: str, mode: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"batch": 32, "length": 512, "mode": mode}
    measure.write_checkpoint("deberta-v3-small", tmp_path)
    real = figures(Cell("memory", "deberta-v3-small", impl, "cuda", **fields), tmp_path)
    assert real["peak"] > 10**9
    plan = planned("plan", "deberta-v3-small", impl, **fields)
    assert plan["peak"] == pytest.approx(real["peak"], rel=0.05)


# What is compared


def test_in_place_lines_are_put_back_and_taken_out_again() -> None:
    config = outplace.EsmConfig(**ESM | shape(32, 1, 4))
    model = outplace.EsmModel(config).eval()
    ids = torch.tensor([[0, 5, 32, 7, 2]])
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with in_place():
            assert torch.equal(model(ids).last_hidden_state, expected)
    with in_place():
        assert audit(model, ids).writes
    assert not audit(model, ids).writes


PLAIN, DROPPED, RECOMPUTED = Variant(True, 0.0, None), Variant(True, 0.1, None), Variant(True, 0.0, False)


@pytest.mark.parametrize(
    ("line", "family", "embedded", "linears", "variant", "expected"),
    [
        ("embeddings += position_embeddings", "DebertaV2", "words", "plain", RECOMPUTED, "fine"),
        ("embeddings += position_embeddings", "DebertaV2", "leaf", "plain", RECOMPUTED, "raises: a leaf"),
        ("embeddings += position_embeddings", "DebertaV2", "given", "plain", PLAIN, "wrong gradients"),
        ("hidden_states += input_tensor", "Esm", "words", "views", PLAIN, "raises: Output 0 of _Product"),
        ("hidden_states += input_tensor", "Esm", "words", "views", DROPPED, "fine"),
    ],
)
def test_a_historic_line_fails_under_its_conditions(
    line: str, family: str, embedded: Any, linears: Any, variant: Variant, expected: str
) -> None:
    found = next(x for x in LINES if x.historic == line and family in x.families)
    assert verdict(found, family, embedded, linears, variant).startswith(expected)


def test_conditions_are_tried_and_written_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of classes and of a module, each in another process."""
    monkeypatch.setattr(conditions, "LINES", LINES[:3])
    monkeypatch.setattr(conditions, "LINEARS", {"plain": LINEARS["plain"]})
    out = tmp_path / "results.json"
    assert cli.main(["bench", "conditions", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["conditions"]["rows"]
    tried = [(x.historic, family, y) for x in LINES[:3] for family in x.families for y in EMBEDDED]
    assert [(row["line"], row["family"], row["embeddings"]) for row in rows] == tried
    assert {verdict for row in rows for verdict in row["verdicts"].values()} > {"fine", "wrong gradients"}


def test_a_summary_says_which_variants_fail() -> None:
    raises = "raises: a leaf"
    assert answers.summary({"eval": raises, "train, dropout 0.1": raises}) == "raises"
    assert answers.summary({"eval": raises, "train, dropout 0.1": "fine"}) == "raises without dropout"
    found = {"eval": "fine", "train, dropout 0": raises, "train, dropout 0.1": "fine"}
    assert answers.summary(found) == "raises in train, dropout 0"


def test_an_exponent_is_that_of_the_power_law() -> None:
    assert answers.slope({x: 3 * x**2 for x in (128, 512, 4096)}) == pytest.approx(2)


def test_historic_releases_run_in_an_environment_of_their_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, tuple[str, ...]]] = []

    def environment(home: Path, packages: tuple[str, ...], *, with_project: bool) -> Path:
        made.append((home.name, packages))
        return home

    monkeypatch.setattr(peers, "environment", environment)
    for model in TINY:
        peers.interpreter(Cell("memory", model, "transformers-historic"), tmp_path)
    assert made == [
        ("transformers-4.46.3", ("transformers==4.46.3",)),
        ("transformers-4.46.3", ("transformers==4.46.3",)),
        ("transformers-4.33.3", ("transformers==4.33.3",)),
    ]


def test_packages_of_an_environment_take_the_place_of_the_projects_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[list[str]] = []
    monkeypatch.setattr(environments.venv, "create", lambda home, **options: home.mkdir())
    monkeypatch.setattr(environments.subprocess, "run", lambda command, **options: installed.append(command))
    for packages in (("fair-esm==2.0.0",), ("esm-cpp==0.2.1", "numpy==1.26.4")):
        home = tmp_path / packages[0]
        assert environments.environment(home, packages) == home / "bin" / "python"
        assert environments.environment(home, packages), "it is there, and not made again"
    own, other = ([each for each in command[1:] if "==" in each] for command in installed)
    torch_and_numpy = [environments.pinned("torch"), environments.pinned("numpy")]
    assert own == [*torch_and_numpy, "fair-esm==2.0.0"]
    assert other == [torch_and_numpy[0], "esm-cpp==0.2.1", "numpy==1.26.4"]


def test_esm_cpp_is_given_a_checkpoint_of_the_masked_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model:
        """Its interface, around our model, which takes a file only if it is whole."""

        def __init__(self, file: str) -> None:
            weights = load_file(file)
            rotary = "rotary_embeddings.inv_freq"
            of_layers = [weights.pop(f"esm.encoder.layer.{i}.attention.self.{rotary}") for i in range(2)]
            for frequencies in of_layers:
                torch.testing.assert_close(frequencies, 10000.0 ** -(torch.arange(8) / 8))
            weights[f"esm.{rotary}"] = of_layers[0]
            weights["lm_head.decoder.weight"] = weights["esm.embeddings.word_embeddings.weight"]
            self.model = outplace.EsmForMaskedLM(outplace.EsmConfig(**TINY["tiny-esm"][1])).eval()
            self.model.load_state_dict(weights)

        def forward_with_hidden_states(self, ids: Any) -> tuple[Any, list[Any]]:
            output = self.model(torch.from_numpy(ids)[None].long(), output_hidden_states=True)
            return output.logits[0].numpy(), [states[0].numpy() for states in output.hidden_states]

    module = SimpleNamespace(Model=SimpleNamespace(load_from_safetensors=Model))
    monkeypatch.setitem(sys.modules, "esm_cpp", module)
    measure.write_checkpoint("tiny-esm", tmp_path)
    cell = Cell("speed", "tiny-esm", "esm-cpp", batch=2, length=16)
    found = measure.results(cell, tmp_path)
    assert next(found)["difference"] < 1e-5
    assert next(found)["seconds"] > 0
    for other in ({"mode": "train"}, {"dtype": "bfloat16"}, {"what": "memory"}):
        assert "it infers in float32 on a CPU" in figures(replace(cell, **other), tmp_path)["reason"]


def test_a_cell_whose_outputs_differ_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure.write_checkpoint("tiny-esm", tmp_path)
    cell = Cell("speed", "tiny-esm", "outplace", "cpu", batch=1, length=16)
    found = measure.results(cell, tmp_path)
    assert next(found)["difference"] < 1e-5
    assert next(found)["seconds"] > 0
    assert next(found)["seconds"] > 0, "it can be asked again"
    monkeypatch.setattr("outplace.models.esm.modeling.TRAINED_MASK_RATIO", 0.5)
    assert "differ from upstream's" in figures(cell, tmp_path)["reason"]


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    cell = Cell("memory", "tiny-v3", "transformers", "plan", mode="train-selective")
    assert figures(cell, None)["reason"] == "it cannot recompute attention alone"
    if not torch.cuda.is_available():
        cell = Cell("memory", "tiny-v3", "outplace", "cuda")
        assert figures(cell, tmp_path)["reason"] == running.NOT_MEASURED


def test_peaks_are_above_their_floors() -> None:
    for model in TINY:
        for mode in ("infer", "train"):
            found = planned("plan", model, mode=mode)
            assert found["peak"] > found["floor"]


def test_the_floor_of_a_dense_layer_is_its_products() -> None:
    cell = Cell("speed", "tiny-esm", "outplace", batch=3, length=10)
    width, layers = 64, 2
    projections, inner, pairs = 4 * width**2, 2 * width * 4 * width, 2 * 10 * width
    assert floor(cell, 0).multiply_adds == layers * 30 * (projections + inner + pairs)


# Fitting


def test_the_largest_batch_is_where_the_line_ends() -> None:
    def row(batch: int) -> dict[str, Any]:
        return {"of phases": {"forward": 100 + 9 * batch, "backward": 100 + 10 * batch, "optimizer": 150}}

    two = {2: row(2), 4: row(4)}
    assert largest_batch(two, 200) == 10
    assert largest_batch(two, 209) == 10
    assert largest_batch(two, 140) == 0, "the optimiser's step does not fit"
    assert exact_batch(lambda batch: 100 + 10 * batch, 200, 7) == 10
    assert exact_batch(lambda batch: 100 + 10 * batch, 200, 12) == 10
    assert exact_batch(lambda batch: 100 + 10 * batch, 50, 2) == 0


# The command


def test_shards_are_all_cells_once_and_keep_sizes_together() -> None:
    cells = bench.small_set()
    parts = [shard(cells, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(cell.key for part in parts for cell in part) == sorted(cell.key for cell in cells)
    with pytest.raises(ValueError, match="4/3"):
        shard(cells, "4/3")


def test_implementations_are_given_only_their_families() -> None:
    impls = ("fair-esm", "flashdeberta", "esm-cpp", "outplace-blockwise", "outplace")
    cells = grid("speed", TINY, impls, ("cpu",), ("float32",), (1,), (8,), ("infer",))
    assert [cell.impl for cell in cells if cell.family == "Esm"] == ["fair-esm", "esm-cpp", "outplace"]


def children(monkeypatch: pytest.MonkeyPatch, script: str) -> running.Runner:
    """A runner whose processes run a script instead, with `cells` and `turn(row)`."""
    prelude = (
        "import json, os, signal, sys\n"
        "cells = json.loads(sys.argv[-1])\n"
        "def turn(row):\n"
        "    print('a library says something')\n"
        "    print(json.dumps(row), flush=True)\n"
    )

    def command(python: Path, cells: Any, *arguments: str) -> list[str]:
        given = json.dumps([vars(cell) for cell in cells])
        return [str(python), "-c", prelude + script, given]

    monkeypatch.setattr(running, "_command", command)
    runner = running.Runner(Path(), Path())
    monkeypatch.setattr(runner, "checkpoint", lambda cell: Path())
    return runner


def test_results_are_kept_and_what_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Implementations note down when they have their turns; one fails at once, and one at its second."""
    log, path = tmp_path / "log", tmp_path / "results.json"
    runner = children(
        monkeypatch,
        f"""
impl = cells[0]["impl"]
if impl == "outplace-sdpa":
    sys.exit("no such thing (/opt/there/its.py), see https://a.b/c/d")
turn({{"path": "its own"}})
for number, _ in enumerate(sys.stdin):
    with open({str(log)!r}, "a") as file:
        print(impl, file=file)
    if impl == "outplace-eager" and number == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    turn({{"seconds": 1.0 + number % 2}})
""",
    )
    impls = ("transformers", "outplace", "outplace-sdpa", "outplace-eager")
    cells = [Cell("speed", "tiny-esm", impl) for impl in impls]
    running.measure(cells, running.Results(path), runner, repeats=3)
    all_three = ["transformers", "outplace", "outplace-eager"]
    assert log.read_text().split() == [*all_three * 2, "transformers", "outplace"]
    rows = {row["impl"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["transformers"]["repeats"] == [1.0, 2.0, 1.0]
    assert rows["transformers"]["seconds"] == 1.0
    assert rows["transformers"]["path"] == "its own"
    assert rows["outplace-sdpa"]["reason"] == "no such thing (its.py), see https://a.b/c/d"
    assert rows["outplace-eager"]["reason"] == "killed by signal 11: it crashed"
    assert "seconds" not in rows["outplace-eager"]
    log.unlink()
    running.measure(cells, running.Results(path), runner, repeats=3)
    assert not log.exists()


@pytest.mark.parametrize(("impl", "path"), [("disentangled-flash", "its own"), ("transformers", "eager")])
def test_attention_of_a_peer_is_not_what_the_configuration_names(impl: str, path: str) -> None:
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="eager"))
    assert measure.attention_path(model, Cell("speed", "tiny-v3", impl), torch.device("cpu")) == path


def test_times_of_one_size_are_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one lacks, all that were asked for take turns again; what was not asked for keeps its own run."""
    runner = children(
        monkeypatch,
        "turn({'path': 'its own', 'floor': 1.0})\nfor _ in sys.stdin:\n    turn({'seconds': 1.0})",
    )
    path = tmp_path / "results.json"

    def measure(repeats: int, *impls: str) -> dict[str, Any]:
        monkeypatch.setattr(running, "environment", lambda: {"repeats": repeats})
        results = running.Results(path)
        running.measure([Cell("speed", "tiny-esm", impl) for impl in impls], results, runner, repeats)
        return {row["impl"]: row for row in results.rows}

    measure(2, "transformers", "outplace", "outplace-eager")
    # A run starts in another second than the one before it.
    for row in (found := json.loads(path.read_text()))["rows"]:
        row["run"] = "before"
    path.write_text(json.dumps(found))
    rows = measure(3, "transformers", "outplace", "outplace-sdpa")
    assert {impl: len(row["repeats"]) for impl, row in rows.items()} == {
        "transformers": 3,
        "outplace": 3,
        "outplace-sdpa": 3,
        "outplace-eager": 2,
    }
    assert rows["outplace-eager"]["run"] == "before"
    assert {impl: row["environment"] for impl, row in rows.items() if impl != "outplace"} == {
        "transformers": 1,
        "outplace-sdpa": 1,
        "outplace-eager": 0,
    }
    text = "\n".join(report.speed_tables(list(rows.values())))
    assert text.count("1.00 to 1.00") == 3, "no ratio of one run's times to another's"


def test_those_that_take_turns_get_ready_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is ready once the other has begun, and neither has a turn before both are."""
    runner = children(
        monkeypatch,
        f"""
import pathlib, time
folder = pathlib.Path({str(tmp_path)!r})
def both(what):
    return len(list(folder.glob(f"*.{{what}}"))) == 2
impl = cells[0]["impl"]
(folder / f"{{impl}}.begun").touch()
late = time.monotonic() + 60
while not both("begun") and time.monotonic() < late:
    time.sleep(0.01)
(folder / f"{{impl}}.ready").touch()
turn({{}} if both("begun") else {{"reason": "the other had not begun"}})
for _ in sys.stdin:
    turn({{"seconds": float(both("ready"))}})
""",
    )
    cells = [Cell("speed", "tiny-esm", impl) for impl in ("transformers", "outplace")]
    assert [row["seconds"] for row in running.turns(cells, runner, 1)] == [1.0, 1.0]


def test_what_lacked_memory_beside_others_has_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of which one at a time finds memory."""
    runner = children(
        monkeypatch,
        f"""
import fcntl
memory = open({str(tmp_path / "memory")!r}, "a")
try:
    fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    turn({{"reason": "out of memory: none is left"}})
else:
    turn({{}})
    for _ in sys.stdin:
        turn({{"seconds": 1.0}})
""",
    )
    cells = [Cell("speed", "tiny-esm", impl) for impl in ("transformers", "outplace")]
    assert [row["repeats"] for row in running.turns(cells, runner, 2)] == [[1.0, 1.0], [1.0, 1.0]]


def test_a_process_that_dies_is_a_row(tmp_path: Path) -> None:
    runner = running.Runner(tmp_path, tmp_path, limit=0.01)
    found = runner.run(Cell("memory", "deberta-v3-xsmall", "outplace", "plan"))
    assert list(found) == [{"reason": "took more than 0 s"}]


def test_cells_after_one_that_ends_its_process_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies at its second cell, each time it has two."""
    runner = children(
        monkeypatch,
        """
turn({"peak": cells[0]["length"]})
if len(cells) > 1:
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    cells = [Cell("memory", "tiny-esm", "outplace", "plan", length=n) for n in (1, 2, 3)]
    killed = {"reason": "killed by signal 9: probably out of memory"}
    assert list(runner.run(*cells)) == [{"peak": 1}, killed, {"peak": 3}]


def test_planned_cells_share_processes_by_environment() -> None:
    impls = ("transformers-historic", "transformers", "outplace")
    cells = grid("memory", TINY, impls, ("plan",), ("float32",), (1,), range(20), ("infer",))
    parts = list(running.together(cells))
    assert sorted(cell.key for part in parts for cell in part) == sorted(cell.key for cell in cells)
    needed = [{peers.packages_of(cell) for cell in part} for part in parts]
    assert all(len(packages) == 1 for packages in needed)
    assert needed == sorted(needed, key=min), "those that need none come first"
    assert max(map(len, parts)) == running.TOGETHER


def test_figures_made_anew_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(impl: str, device: str = "cpu", what: str = "speed", **figures: Any) -> dict[str, Any]:
        cell = Cell(what, "esm2_t6_8M_UR50D", impl, device)  # type: ignore[arg-type]
        return vars(cell) | {"run": "once"} | figures

    plan = row("outplace", "plan", "memory", peak=100)
    live = row("outplace", "cpu", "memory", peak=200)
    times = [row("transformers", repeats=[2.0, 2.0, 2.0]), row("outplace", repeats=[1.0, 2.0, 0.5])]
    only_there = row("outplace-eager", repeats=[9.0])
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps({"rows": [plan, live, *times, only_there]}))
    times[1] = row("outplace", repeats=[1.0, 1.0, 1.0])
    new.write_text(json.dumps({"rows": [plan, {**live, "peak": 202}, *times]}))
    assert cli.main(["bench", "compare", str(new), str(old)]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 plans are the same" in said
    assert "Peaks of 1 runs on a CPU are within 1.0% of the others" in said
    assert "| esm2_t6_8M_UR50D | infer | 1 × 128 | outplace | 2.00 | 2.00 | 1.00 to 4.00 |" in said
    new.write_text(json.dumps({"rows": [{**plan, "peak": 101}]}))
    assert cli.main(["bench", "compare", str(new), str(old)]) == 1
    said = capsys.readouterr().out
    assert "0 of 1 plans are the same" in said
    assert "not the same: memory esm2_t6_8M_UR50D outplace plan float32 1 128 infer" in said


def test_a_report_has_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = []
    for impl in ("transformers", "outplace"):
        for length in (16, 32, 64, 512):
            cell = Cell("memory", "tiny-esm", impl, "plan", batch=1, length=length, mode="train")
            rows.append({**vars(cell), **figures(cell, None)})
        speed = Cell("speed", "tiny-esm", impl)
        times = {"seconds": 2.0, "repeats": [2.0, 2.0, 4.0], "floor": 1.0}
        rows.append({**vars(speed), "run": "once", "path": "sdpa", **times})
    page, front = tmp_path / "page.md", tmp_path / "front.md"
    begin, end = "<!-- written by `outplace bench report` -->", "<!-- until here -->"
    for path in (page, front):
        path.write_text(f"Before.\n\n{begin}\nold\n{end}\n\nAfter.\n")
    rows = [{**each, "environment": 0} for each in rows]
    here = running.environment()
    gone = here | {"date": "2026-01-01"}
    report.write([{"environments": [here, gone], "rows": rows}], tmp_path, page, front)
    assert "| tiny-esm | train | 1 × 512 | " in front.read_text()
    assert "| tiny-esm | infer | 1 × 128 | 1.00 | 1.00 | 1.00 |" in front.read_text()
    assert page.read_text().startswith(f"Before.\n\n{begin}\n\nMemory, planned")
    assert page.read_text().endswith(f"{end}\n\nAfter.\n")
    assert "old" not in page.read_text()
    text = (tmp_path / "README.md").read_text()
    assert f"- 10 cells: {here['date']}, commit `" in text
    assert gone["date"] not in text, "all that was measured there has been measured anew"
    assert running.NOT_MEASURED in text, "no GPU has been asked"
    assert "| tiny-esm | infer | 1 × 128 | outplace | sdpa | 1.00 | 1.00 to 1.00 | 2.0 |" in text
    assert (tmp_path / "memory-tiny-esm-train-plan-float32-1.svg").exists()
    assert (tmp_path / "parts-tiny-esm-plan.svg").exists()


def test_figures_of_attention_join_those_of_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of different packages, of different lengths: the second one ends with both.

    Each length is measured where freed memory is returned and where it is kept.
    """
    asked: list[tuple[str, bool]] = []

    def run(command: list[str], env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append((command[-1], "MALLOC_TRIM_THRESHOLD_" in env))
        figures = {"seconds": 2.0, "resident": 3, "live": 4, "kept": 0}
        return subprocess.CompletedProcess(command, 0, json.dumps(figures))

    for name in attention.FREED["kept"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(attention.subprocess, "run", run)
    out = tmp_path / "attention.json"
    for packages, lengths in (("old", ["16"]), ("new", ["24"]), ("new", ["24", "32"])):
        asked.clear()
        this = {"date": "of " + lengths[-1], "versions": packages}
        monkeypatch.setattr(running, "environment", lambda this=this: this)
        arguments = ["--modes", "eval", "--repeats", "1", "--out", str(out), "--lengths", *lengths]
        monkeypatch.setattr(sys, "argv", ["attention.py", *arguments])
        attention.main()
    assert set(asked) == {("32", False), ("32", True)}, (
        "what this environment has measured is not measured again"
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(row["freed"], row["length"], row["environment"]["versions"]) for row in rows] == [
        (freed, *of_length)
        for freed in ("returned", "kept")
        for of_length in ((16, "old"), (24, "new"), (32, "new"))
    ]
