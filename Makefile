# Everything a newcomer types. Needs GNU make and Python 3.11 or later; `make PYTHON=python3.12 test` picks one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)-bench/.installed
GPU := $(wildcard /dev/nvidiactl)
# The first NCCL that lets several ranks share a GPU.
NCCL_RELEASE := nvidia-nccl-cu13>=2.30
NCCL := $(VENV)-nccl/nvidia/nccl/lib/libnccl.so.2

# First and by itself, so that a build of this very release from another index is taken where pip is told of one:
#   PIP_EXTRA_INDEX_URL=<URL of a package index with CPU builds> make setup      saves gigabytes without a GPU
TORCH := $(shell grep '^torch==' constraints.txt)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes; where nothing compiled is kept, each compiles all of this package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu parity messages check format bench quality pictures

help:
	@echo 'make setup     a virtual environment in $(VENV), with the versions of constraints.txt'
	@echo 'make demo      train the demo translation model here, from POST to translations'
	@echo 'make check     formatting, lint, types and import directions'
	@echo 'make test      the tests but for the slow ones (THOROUGH=1 draws more random cases)'
	@echo 'make test-slow the slow tests (PART=1/8 runs an eighth of them)'
	@echo 'make test-gpu  the tests that need a GPU, and the layer measured on it'
	@echo 'make parity    every router and every family under every layout against one process; writes docs/parity*.md'
	@echo '               (rows without a record first, then the oldest; MISSING=1, ROWS=PATTERN, PART=1/3)'
	@echo 'make bench     every benchmark; prints tables, writes benchmarks/results/'
	@echo '               (AGAINST=COMMIT times the layer and a training step there and here, in turns)'
	@echo 'make quality   experts against a dense twin, one model for all languages against one for each; writes docs'
	@echo 'make pictures  the terminal of the demo and of a plan, a module as it is sharded, and the pages (which need'
	@echo '               Chromium); writes docs/pictures/'
	@echo 'make messages  write tests/golden/messages.json, the wording of refusals, anew'
	@echo 'make format    write the formatting that check asks for'

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "shardyard: $(PYTHON) must be Python 3.11 or later; name one: make PYTHON=/path/to/python3.12 setup" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "shardyard: $(PYTHON) cannot make virtual environments; install its venv module (Debian: python3-venv)" >&2; exit 1; }
	@echo 'Installing what constraints.txt pins in $(VENV); a minute or two, and some gigabytes.'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt pip setuptools
	@$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH)
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/shardyard demo examples/translate-100-to-english.yaml

# THOROUGH=1 takes more random cases. Four processes for two cores: two of them, with a Ray cluster each, mostly wait.
TESTS := $(BIN)/python -m pytest --numprocesses 4 --no-loadscope-reorder --durations 40 --durations-min 5

test: setup
	HYPOTHESIS_PROFILE=$(if $(THOROUGH),thorough,quick) $(TESTS)

# The files whose tests say what is refused.
REFUSALS := $(shell grep -rl 'tests.refusals' tests --include='test_*.py')

messages: setup
	$(BIN)/python -m pytest --numprocesses 4 --no-loadscope-reorder --quiet --write-messages $(REFUSALS)

# What takes seconds each, where other cases or tests show the subject too. CI runs an eighth of them, PART=1/8.
test-slow: setup
	HYPOTHESIS_PROFILE=$(if $(THOROUGH),thorough,usual) $(TESTS) -m 'slow and not grid' $(if $(PART),--part $(PART))

# Neither needs Ray. Without a GPU all tests are skipped, and nothing is measured.
test-gpu: setup $(PEERS) $(if $(GPU),$(NCCL))
	$(if $(GPU),LD_PRELOAD=$(CURDIR)/$(NCCL)) $(BIN)/python -m pytest -m gpu tests/gpu
	$(VENV)-bench/bin/python -m benchmarks.layer --gpu

$(NCCL): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)-nccl '$(NCCL_RELEASE)'

# Thousands of trainings on up to four processes: hours on two cores, in as many goes as it takes. Each finished row is
# recorded with its commit; rows without a record are run first, then those of the oldest commits. MISSING=1 leaves the
# latter out, ROWS='language, *' runs the rows of that name, and PART=1/3 a third of them, on one of three machines.
# Without these (or with PART=1/3), the tests marked grid come first.
parity: setup
	$(if $(ROWS)$(MISSING)$(filter-out 1/%,$(PART)),,HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m grid --numprocesses 2)
	$(BIN)/python -m tests.parity $(if $(PART),--part $(PART)) $(if $(ROWS),--rows '$(ROWS)') $(if $(MISSING),--only-missing)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Twelve trainings of six minutes, and fifty of half that; what was recorded before is not trained again.
quality: setup
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.multilingual

pictures: setup
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python -m benchmarks.page_pictures

# Other libraries' layers need an environment of their own: benchmarks/constraints.txt says why.
ifdef AGAINST
bench: setup
	$(BIN)/python -m benchmarks.against $(AGAINST)
else
bench: setup $(PEERS)
	$(BIN)/python -m benchmarks
	$(VENV)-bench/bin/python -m benchmarks layer layer_two_ranks
endif

$(PEERS): pyproject.toml benchmarks/constraints.txt
	@$(PYTHON) -m venv $(VENV)-bench
	@$(VENV)-bench/bin/python -m pip install --quiet -c constraints.txt pip setuptools
	@$(VENV)-bench/bin/python -m pip install --quiet -c constraints.txt $(TORCH)
	@$(VENV)-bench/bin/python -m pip install --quiet -c benchmarks/constraints.txt --no-build-isolation -e '.[bench]'
	@touch $@
