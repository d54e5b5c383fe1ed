"""The benchmark harness: what it reads is right, and what cannot run says why."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from outplace.benchmarks import answers, bench, conditions, measure, peers, report, running, tables
from outplace.benchmarks.cells import Cell, grid, shard
from outplace.benchmarks.conditions import EMBEDDED, LINEARS, Variant, verdict
from outplace.benchmarks.fit import exact_batch, largest_batch
from outplace.benchmarks.floors import floor
from outplace.benchmarks.in_place import LINES, in_place
from outplace.benchmarks.memory import Ledger
from outplace.benchmarks.shapes import DEBERTA, ESM, MODELS, V3, shape
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


def planned(device: str, model: str, impl: str = "outplace", **fields: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"batch": 2, "length": 64, "mode": "train"} | fields
    found = measure.result(Cell("memory", model, impl, device, **options), None)
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
    real = measure.result(Cell("memory", model, impl, "cpu", **fields), tmp_path)
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
    real = measure.result(Cell("memory", "deberta-v3-small", impl, "cuda", **fields), tmp_path)
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
    monkeypatch.setattr(conditions, "LINES", LINES[:1])
    out = tmp_path / "results.json"
    assert cli.main(["bench", "conditions", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["conditions"]
    tried = [(family, x, y) for family in LINES[0].families for x in EMBEDDED for y in LINEARS]
    assert [(row["family"], row["embeddings"], row["linears"]) for row in rows] == tried
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


def test_a_cell_whose_outputs_differ_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure.write_checkpoint("tiny-esm", tmp_path)
    cell = Cell("speed", "tiny-esm", "outplace", "cpu", batch=1, length=16)
    assert measure.result(cell, tmp_path)["seconds"] > 0
    monkeypatch.setattr("outplace.models.esm.modeling.TRAINED_MASK_RATIO", 0.5)
    assert "differ from upstream's" in measure.result(cell, tmp_path)["reason"]


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    cell = Cell("memory", "tiny-v3", "transformers", "plan", mode="train-selective")
    assert measure.result(cell, None)["reason"] == "it cannot recompute attention alone"
    if not torch.cuda.is_available():
        cell = Cell("memory", "tiny-v3", "outplace", "cuda")
        assert measure.result(cell, tmp_path)["reason"] == running.NOT_MEASURED


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
    impls = ("fair-esm", "flashdeberta", "outplace-blockwise", "outplace")
    cells = grid("speed", TINY, impls, ("cpu",), ("float32",), (1,), (8,), ("infer",))
    assert [cell.impl for cell in cells if cell.family == "Esm"] == ["fair-esm", "outplace"]


def test_results_are_kept_and_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    cells = [Cell("speed", "tiny-esm", impl) for impl in ("transformers", "outplace", "fair-esm")]
    asked: list[str] = []

    class Counting(running.Runner):
        def run(self, *cells: Cell) -> list[dict[str, Any]]:
            asked.extend(cell.impl for cell in cells)
            fails = cells[0].impl == "fair-esm"
            return [{"reason": "no"} if fails else {"seconds": 1.0 + len(asked)}]

    runner, path = Counting(tmp_path, tmp_path), tmp_path / "results.json"
    running.measure(cells, running.Results(path), runner, repeats=3)
    # They take turns, and one that failed is not tried again.
    assert asked == ["transformers", "outplace", "fair-esm", *["transformers", "outplace"] * 2]
    rows = {row["impl"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["transformers"]["repeats"] == [2.0, 5.0, 7.0]
    assert rows["transformers"]["seconds"] == 5.0
    assert rows["fair-esm"]["reason"] == "no"
    asked.clear()
    running.measure(cells, running.Results(path), runner, repeats=3)
    assert asked == []


def test_a_process_that_dies_is_a_row(tmp_path: Path) -> None:
    runner = running.Runner(tmp_path, tmp_path, limit=0.01)
    found = runner.run(Cell("memory", "deberta-v3-xsmall", "outplace", "plan"))
    assert found == [{"reason": "took more than 0 s"}]


def test_cells_after_one_that_ends_its_process_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies at its second cell, each time it has two."""

    def process(python: Path, cells: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
        rows = "\n".join(json.dumps({"peak": cell.length}) for cell in cells[:1])
        return subprocess.CompletedProcess([], -9 if len(cells) > 1 else 0, rows, "")

    runner = running.Runner(tmp_path, tmp_path)
    monkeypatch.setattr(runner, "_process", process)
    cells = [Cell("memory", "tiny-esm", "outplace", "plan", length=n) for n in (1, 2, 3)]
    killed = {"reason": "killed by signal 9: probably out of memory"}
    assert runner.run(*cells) == [{"peak": 1}, killed, {"peak": 3}]


def test_planned_cells_share_processes_by_model_and_implementation() -> None:
    cells = grid(
        "memory", TINY, ("transformers", "outplace"), ("plan",), ("float32",), (1,), range(8), ("infer",)
    )
    parts = list(running.together(cells))
    assert sorted(cell.key for part in parts for cell in part) == sorted(cell.key for cell in cells)
    assert all(len({(cell.model, cell.impl) for cell in part}) == 1 for part in parts)
    assert max(map(len, parts)) == running.TOGETHER


def test_a_report_has_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = []
    for impl in ("transformers", "outplace"):
        for length in (16, 32, 64, 512):
            cell = Cell("memory", "tiny-esm", impl, "plan", batch=1, length=length, mode="train")
            rows.append({**vars(cell), **measure.result(cell, None)})
        speed = Cell("speed", "tiny-esm", impl)
        rows.append({**vars(speed), "path": "sdpa", "seconds": 2.0, "repeats": [2.0, 2.0, 4.0], "floor": 1.0})
    page, front = tmp_path / "page.md", tmp_path / "front.md"
    for path in (page, front):
        path.write_text(f"Before.\n\n{tables.BEGIN}\nold\n{tables.END}\n\nAfter.\n")
    report.write([{"environment": running.environment(), "rows": rows}], tmp_path, page, front)
    assert "| tiny-esm | train | 1 × 512 | " in front.read_text()
    assert "| tiny-esm | infer | 1 × 128 | 1.00 | 1.00 | 1.00 |" in front.read_text()
    assert page.read_text().startswith(f"Before.\n\n{tables.BEGIN}\n\nMemory, planned")
    assert page.read_text().endswith(f"{tables.END}\n\nAfter.\n")
    assert "old" not in page.read_text()
    text = (tmp_path / "README.md").read_text()
    assert running.NOT_MEASURED in text, "no GPU has been asked"
    assert "| tiny-esm | infer | 1 × 128 | outplace | sdpa | 1.00 | 1.00 to 1.00 | 2.0 |" in text
    assert (tmp_path / "memory-tiny-esm-train-plan-float32-1.svg").exists()
    assert (tmp_path / "parts-tiny-esm-plan.svg").exists()
