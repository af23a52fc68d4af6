# The front door. Every target first makes what it needs in .venv; nothing has to be installed by hand.
#   make test ARGS="-k ring"       passes ARGS on
#   make test WORKERS=0            one process, for a debugger
#   make test TORCH=               leaves torch out (its tests are skipped)
#   make test TORCH=torch==2.15.0  tries another torch (after `make clean`)
#   make test PYTHON=python3.12    uses another Python (after `make clean`)

PYTHON ?= python3
# Exactly one version: a looser requirement pulls gigabytes of CUDA.
TORCH ?= torch==2.13.0
# Lightning and Accelerate require torch, so they come with it or not at all.
comma := ,
EXTRAS := dev$(if $(TORCH),$(comma)examples)
ARGS ?=
# Processes that share out the files of tests, in order: the long ones come first. Many tests wait, so more than 2 cores.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# A stamp is touched when its installation has ended well, so a broken one is tried again.
CORE := $(VENV)/.core.stamp
DEV := $(VENV)/.dev.stamp
BENCH := $(VENV)/.bench.stamp
BROWSER := $(VENV)/.browser.stamp
SCHEDULERS := $(VENV)/.schedulers.stamp
DOCS := $(VENV)/.docs.stamp
# The tools that make a release have an environment of their own: they are none of the package's.
TOOLS_BIN := build/tools/bin
TOOLS := build/tools/.stamp
# The blocks of the documents that start ranks themselves; without Ray or Dask, they say how to get them.
CLUSTER_BLOCKS := tests/integration/test_ray.py::test_the_blocks_of_the_document_run \
	tests/integration/test_dask.py::test_the_block_of_the_document_runs

.PHONY: help demo test matrix integration stress lint format bench docs dist clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CORE) ## three local peers train a small language model (ARGS=--web shows it in a browser)
	$(BIN)/ringfort demo $(ARGS)

test: $(DEV) ## every test but the long ones
	$(BIN)/python -m pytest tests -m "not stress" --ignore=tests/integration -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

matrix: ## the tests on every Python that this machine has (ARGS="--dependencies lowest", ARGS=--list)
	$(PYTHON) scripts/matrix.py --torch "$(TORCH)" --workers $(WORKERS) $(ARGS)

integration: $(BROWSER) $(DOCS) $(SCHEDULERS) ## tests with programs of others: Chromium, Slurm, MPI, Ray, Dask, Transformers; each says what it misses
	$(BIN)/python -m pytest tests/integration $(ARGS)

stress: $(DEV) ## the long tests
	$(BIN)/python -m pytest tests -m stress --ignore=tests/integration --timeout=3600 $(ARGS)

lint: $(DEV) ## format, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV) ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH) ## all-reduce against everybody's, on this machine; writes docs/performance.md (ARGS=--quick)
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(DOCS) ## the documentation site in build/site: links, commands and public names checked; blocks of Python run, or named with what they lack
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python -m pytest -raP tests/unit/test_site.py tests/cluster/test_documents.py $(CLUSTER_BLOCKS)
	$(BIN)/python -m scripts.build_site

dist: $(TOOLS) ## wheel and sdist in dist/, checked; the wheel alone runs the demo in a bare environment
	rm -rf dist build/bare
	$(TOOLS_BIN)/python -m build --outdir dist .
	$(TOOLS_BIN)/twine check --strict dist/*
	$(TOOLS_BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/bare
	build/bare/bin/python -m pip --disable-pip-version-check install --quiet dist/*.whl
	cd build/bare && bin/ringfort demo --framework numpy --no-live
	$(PYTHON) scripts/check_release.py

clean: ## remove everything that make and the tools have made, .venv too
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[ui]"
	@touch $@

$(DEV): $(CORE)
	$(PIP) --editable ".[$(EXTRAS)]" $(TORCH)
	@touch $@

$(BENCH): $(DEV)
	$(PIP) --editable ".[bench]" $(TORCH)
	@touch $@

$(DOCS): $(DEV)
	$(PIP) --editable ".[docs]" $(TORCH)
	@touch $@

$(BROWSER): $(DEV)
	$(PIP) --editable ".[browser$(if $(TORCH),$(comma)frameworks)]" $(TORCH)
	@touch $@

$(SCHEDULERS): $(DEV)
	$(PIP) --editable ".[schedulers]" $(TORCH)
	@touch $@

$(TOOLS):
	$(PYTHON) -m venv build/tools
	$(TOOLS_BIN)/python -m pip --disable-pip-version-check install --quiet "build>=1.2" "check-wheel-contents>=0.6" "twine>=6.1"
	@touch $@
