PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow compat compat-test upstream-suite faults parity bench bench-peers bench-scaling bench-fit bench-report bench-attention bench-line bench-packing lint types nano clean

demo: .venv/demo  ## the main job on the embedded checkpoint, in under two minutes
	$(BIN)/python examples/demo.py

test: .venv/test  ## the test suite
	$(BIN)/python -m pytest -n auto

test-slow: .venv/test  ## with the tests that take minutes or gigabytes
	$(BIN)/python -m pytest -n auto --slow

nano: .venv/demo  ## train the embedded checkpoint anew
	$(BIN)/python benchmarks/nano/train.py --results benchmarks/nano/results.json

compat: .venv/compat compat-test  ## other people's tools: their tests, and the table in the README
	$(BIN)/python -m pytest tests/compat/test_other_versions.py --slow
	$(BIN)/python -m benchmarks.compat --markdown README.md --json benchmarks/results/compat.json

compat-test: .venv/compat  ## the part of it that needs no environment of other versions
	$(BIN)/python -m pytest -n auto tests/compat
	$(BIN)/python -m benchmarks.compat --no-envs

upstream-suite: .venv/suite  ## upstream's own tests on its classes, as they are and on our blocks
	$(BIN)/python tests/upstream_suite

faults: .venv/test  ## what goes wrong with the Hub: its tests, and the table in docs/hub.md
	$(BIN)/python tests/faults.py
	$(BIN)/python -m pytest -n auto tests/test_hub_faults.py

parity: .venv/test  ## the table of differences from upstream
	cd tests && ../$(BIN)/python -m parity

bench-attention: .venv/test  ## DeBERTa-V3 in time and memory, upstream and a peer beside ours
	$(BIN)/python benchmarks/attention.py --peers build/peers --out benchmarks/results/attention.json --page docs/attention.md

bench-line: .venv/compat  ## what outplace.transformers.install() brings on a CPU: the README's first table
	$(BIN)/python -m outplace.benchmarks.line --out benchmarks/results/line.json --page README.md

bench-packing: .venv/test  ## ESM-2 over padded and uniform batches, upstream beside ours
	$(BIN)/python benchmarks/packing.py --out benchmarks/results/packing.json --page docs/attention.md

BENCH := $(BIN)/outplace bench
RECORD := benchmarks/results/bench.json
# `make bench bench-peers bench-scaling bench-fit bench-report RESULTS=benchmarks/results/bench.json` makes what is committed.
RESULTS ?= build/bench.json

bench: .venv/bench  ## memory by plan and small models on the CPU, and whether it is as committed
	$(BENCH) all --repeats 3 --out $(RESULTS)
	$(BENCH) conditions --out $(RESULTS)
	$(BENCH) report $(RESULTS) -o build/report
	$(BENCH) compare $(RESULTS) $(RECORD)

bench-peers: .venv/bench  ## other projects and old releases beside upstream and ours on the CPU
	$(BENCH) peers --out $(RESULTS)

bench-scaling: .venv/bench  ## time against length on the CPU
	$(BENCH) scaling --repeats 3 --out $(RESULTS)

bench-fit: .venv/bench  ## the largest batch of every published model on a GPU, by plan
	$(BENCH) fit --out $(RESULTS)

bench-report: .venv/bench  ## the tables and plots of the committed figures
	$(BENCH) report $(RECORD) -o benchmarks/report --page docs/out-of-place.md --front README.md

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package is assembled from folders that lie elsewhere, so the checker reads an installed copy.
types: .venv/lint
	rm -rf build/types
	$(INSTALL) --no-deps --target build/types .
	MYPYPATH=build/types $(BIN)/mypy --config-file pyproject.toml --cache-dir build/mypy -p outplace

clean:
	rm -rf .venv build

# One environment; each file says that what its target needs is in it.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable .
	touch $@

.venv/test: .venv/demo
	$(INSTALL) --editable '.[test]'
	touch $@

.venv/compat: .venv/test
	$(INSTALL) --editable '.[test,compat]'
	touch $@

.venv/suite: .venv/test
	$(INSTALL) --editable '.[test,upstream-suite]'
	touch $@

.venv/bench: .venv/test
	$(INSTALL) --editable '.[test,bench]'
	touch $@

.venv/lint: .venv/test
	$(INSTALL) --editable '.[test,lint]'
	touch $@
