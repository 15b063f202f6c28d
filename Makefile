# Everything here works on a clean clone with Python 3.11 or newer and make: the environment
# in .venv is made when it is needed, with the versions in constraints.txt.

# Every command here imports torch, which takes twice as long where no bytecode may be kept.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo check test bench results docs lint types unit quick durations wheel stranger test-lowest recipes torture torture-long native-proof format clean

# Processes that share the tests: one a core, and no more than memory has room for.
JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores > 8 ? 8 : cores)))
# Whole files go to one process, the longest first: see tests/durations.py.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

help:
	@echo "make demo    the whole story on this machine's CPU"
	@echo "make check   lint, types and the quick tests: for the loop of a developer"
	@echo "make test    lint, format, types, all tests, documentation"
	@echo "make recipes the examples of each framework; VERSIONS=newest for the newest of everything"
	@echo "make wheel stranger test-lowest torture    what a release must pass too: docs/releasing.md"
	@echo "make bench   the kernels beside their peers (the peers need a C++ compiler)"
	@echo "make results  every committed study again, from where it is: hours; RESULTS='--list' or names"
	@echo "make docs    the documentation, into site/"
	@echo "make native-proof   the C++ kernels against their definition, at length"
	@echo "make lint types unit    the parts of make test; make format rewrites the layout"
	@echo "make durations    all tests, and how long each takes into tests/durations.tsv"
	@echo "make clean   remove the environment and everything generated"

demo: $(VENV)/.stamp-runtime
	$(BIN)/halfulp demo

check: lint types quick

# What one process does (types, documentation) goes on beside the tests, which share all cores.
test: lint
	@$(MAKE) --no-print-directory -j 3 types docs unit

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-dev
	$(BIN)/mypy src
	$(BIN)/mypy --config-file tests/mypy.ini tests

unit: $(VENV)/.stamp-dev
	$(PYTEST)

quick: $(VENV)/.stamp-dev
	$(PYTEST) -m "not slow and not large" -q

durations: $(VENV)/.stamp-dev
	$(PYTEST) --durations-to tests/durations.tsv

docs: $(VENV)/.stamp-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/links.py site

wheel: $(VENV)/.stamp-dev
	rm -rf dist && $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt hatchling
	$(BIN)/hatchling build

# The wheel in an empty environment: the demo, the five-minute start, every how-to as written.
stranger: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m large tests/test_stranger.py

# The quick tests with the oldest versions that pyproject.toml allows. What a new click says of an old typer, and an old torch
# of itself, is not ours.
test-lowest: $(VENV)/.stamp-dev
	mkdir -p build && rm -rf build/lowest && $(PYTHON) -m venv build/lowest
	$(BIN)/python tests/lowest.py pyproject.toml > build/lowest.txt
	PIP_CONSTRAINT=build/lowest.txt build/lowest/bin/python -m pip install --disable-pip-version-check --quiet \
	    -e ".[figures,test]"
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not slow and not large" -q \
	    -W "ignore:'click.utils:DeprecationWarning" -W "ignore:The epoch parameter:UserWarning" \
	    -W "ignore:Converting a tensor with requires_grad:UserWarning" -W "ignore:TypedStorage is deprecated:UserWarning"

# Every recipe of docs/how/recipes.md in an environment of its own: with the versions that the page names, or
# with the newest of everything (VERSIONS=newest).
recipes:
	rm -rf build/recipes && $(PYTHON) -m venv build/recipes
	build/recipes/bin/python -m pip install --disable-pip-version-check --quiet -e ".[huggingface,lightning]" \
	    -r examples/recipes/requirements.txt \
	    $(if $(filter newest,$(VERSIONS)),,-c constraints.txt -c examples/recipes/constraints.txt)
	build/recipes/bin/python examples/recipes/run_all.py --distributed

# Kills, mutated inputs, other orders, size, mistakes in our own code: see docs/reliability.md. TORTURE="--only fuzz"
torture torture-long: $(VENV)/.stamp-dev
	cd tests && ../$(BIN)/python -m torture $(if $(filter torture-long,$@),--long) $(TORTURE)

# BENCH="--quick" or BENCH="--sizes 1e6,1e8": see benchmarks/kernels.py --help
bench: $(VENV)/.stamp-peers
	$(BIN)/python benchmarks/kernels.py $(BENCH)
	$(BIN)/python benchmarks/writeback.py
	$(BIN)/python benchmarks/many_tensors.py
	$(BIN)/python benchmarks/study.py
	$(BIN)/python benchmarks/controlled.py

# RESULTS="cnn-small margin-paper", "--list", "--compare": see benchmarks/results.py --help
results: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/results.py $(RESULTS)

# The C++ kernels beside the NumPy reference on random bit patterns, and their tests under ASan and UBSan (g++). PROOF="--inputs 1e8"
native-proof: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/native_proof.py random $(PROOF)
	$(BIN)/python benchmarks/native_proof.py sanitizers

clean:
	rm -rf $(VENV) site build dist benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp a set of extras. PIP_CONSTRAINT rather than -c, so that build requirements are pinned too. Of 20,000 modules most
# are never imported: --no-compile.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(VENV)/.stamp
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile \
	    -e "$(if $(filter runtime,$*),.,.[$*])"
	@touch $@

$(VENV)/.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "halfulp needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
	        "Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
