# Short names for everything a person or a build machine does here. `make` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
CHAOS ?= kill-node@40,add-node@80
PYTEST_ARGS ?=
KILLS ?= 5
FAULTS ?= 200

export OMP_NUM_THREADS ?= 1

.PHONY: help install install-dev run test test-full lint check format bench bench-recovery bench-phases bench-replication bench-stall bench-storage bench-codec bench-commit bench-reproducible ablation drill soak clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## create .venv and install the project (CPU build of torch where there is no GPU)

install-dev: $(VENV)/.installed-dev ## the same with everything the tests need

$(VENV)/.installed: pyproject.toml .ci/install
	PYTHON="$(PYTHON)" .ci/install "$(VENV)" .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml .ci/install
	PYTHON="$(PYTHON)" .ci/install "$(VENV)" '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-bench: pyproject.toml .ci/install
	PYTHON="$(PYTHON)" .ci/install "$(VENV)" '.[dev,bench]'
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

run: install ## main job: 4 local nodes, one killed and one added while it trains
	$(BIN)/raysume run clusters/local/run.yaml --local-nodes 4 --chaos $(CHAOS)

test: install-dev ## all tests but the slow ones; says at the end what it skipped
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-full: install-dev ## the slow tests too
	$(BIN)/python -m pytest -q --slow $(PYTEST_ARGS)

lint: install-dev ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## the same with the unit tests: about six minutes on two cores
	$(BIN)/python -m pytest -q tests/unit tests/architecture $(PYTEST_ARGS)

format: install-dev ## apply the formatter and the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: bench-recovery bench-stall bench-storage ## every bench; on an idle machine

bench-recovery: $(VENV)/.installed-bench ## recovery beside Ray Train and torchft: about forty minutes; KILLS=5
	$(BIN)/python -m tests.bench.bench_peers --kills $(KILLS)

bench-phases: install-dev ## where the time of our own recovery goes
	$(BIN)/python -m tests.bench.bench_recovery

bench-replication: install-dev ## what a replica costs in CPU and time, beside Ray's object store
	$(BIN)/python -m tests.bench.replication

soak: install-dev ## FAULTS=200 seeded faults on one local cluster, then every invariant
	$(BIN)/python -m tests.chaos.soak --faults $(FAULTS)

bench-reproducible: install-dev ## what the same bits at any world size cost
	$(BIN)/python -m tests.bench.reproducible

drill: install ## an interrupted run beside an uninterrupted one, compared to the bit: about six minutes
	$(BIN)/raysume drill clusters/local/drill.yaml

ablation: install-dev ## the save policies side by side, with lost workers and an unstable phase; on an idle machine
	$(BIN)/python -m tests.bench.ablation

bench-stall: install-dev ## what a save costs when every upload takes 20 s longer
	$(BIN)/python -m tests.bench.bench_stall

bench-storage: install-dev ## storage figures beside stock DCP and raw s3fs, with the codec table
	$(BIN)/python -m tests.bench.bench_storage

bench-codec: install-dev ## size, speed and error of every encoding, on a model trained here
	$(BIN)/python -m tests.bench.bench_codec

bench-commit: install-dev ## one Commit of 10,000 ranks through real actor calls
	$(BIN)/python -m tests.bench.bench_commit

clean: ## remove .venv, caches and build output; results in outputs/ stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
