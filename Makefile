# make train | fine-tune | decode | serve | test | bench: each sets up .venv by itself.
#
#   PYTHON=python3.13   the interpreter of .venv (remembered; another one makes .venv anew)
#   EXTRA=cuda12        also install this extra of pyproject.toml (remembered): cuda12 or cuda13 for NVIDIA GPUs
#   PRESET=ufo-tiny    what `make train` trains
#   ARGS='...'          passed on to train.py, serve.py, pytest or the benchmark

VENV   := .venv
PYTHON ?= $(or $(shell cat $(VENV)/.python 2>/dev/null),python3)
EXTRA  ?= $(shell cat $(VENV)/.extra 2>/dev/null)
PRESET ?= tiny
ARGS   ?=
WORKERS := -n logical --maxprocesses 4 --dist worksteal
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed$(subst /,-,-$(PYTHON))$(addprefix -,$(EXTRA))
comma  := ,

.PHONY: help setup train fine-tune decode serve test test-all lint ruff mypy quick-tests all-tests
.PHONY: bench gpu gpu-estimate docs kernels-aot
.DEFAULT_GOAL := help

help:
	@echo 'make setup      make .venv and install jmoe into it (EXTRA=cuda12 for NVIDIA GPUs)'
	@echo 'make train      train a small language model on real text (preset tiny); ARGS="--num-steps 100" adds options'
	@echo 'make fine-tune  tune a small model on chats, with all parameters and with adapters, and ask the results'
	@echo 'make decode     continue a line with what `make train` left, half of its layers on the device at a time'
	@echo 'make serve      serve what `make train` left, as OpenAI'"'"'s API; ARGS="--port 8080" adds options'
	@echo 'make test       lint and the tests'
	@echo 'make test-all   lint and all tests, the slow ones too'
	@echo 'make lint       ruff and mypy'
	@echo 'make bench      time a training step'
	@echo 'make gpu        everything a GPU has to show, in nine minutes at most; ARGS=--cpu tries it at toy sizes'
	@echo 'make gpu-estimate  what training steps would take on an H100, from the compiled steps alone (EXTRA=cuda13 for the libraries)'
	@echo 'make docs       write docs/benchmarks.md and its pages from benchmarks/results'
	@echo 'make kernels-aot  compile what `make gpu` runs for an H200 without one (EXTRA=cuda13 for the libraries)'

setup: $(STAMP)
	@echo "$(VENV) is ready: $$($(BIN)/python --version), JAX $$($(BIN)/python -c 'import jax; print(jax.__version__)')"

train: $(STAMP)
	$(BIN)/python train.py $(PRESET) $(ARGS)

fine-tune: $(STAMP)
	$(BIN)/python benchmarks/train/fine_tune.py $(ARGS)

serve: $(STAMP)
	@test -d runs/tiny/checkpoints || { echo 'There is nothing to serve yet: runs/tiny has no checkpoint. Run `make train` first.'; exit 1; }
	$(BIN)/python serve.py runs/tiny $(ARGS)

decode: $(STAMP)
	@test -d runs/tiny/checkpoints || { echo 'There is no model yet: runs/tiny has no checkpoint. Run `make train` first.'; exit 1; }
	@rm -rf runs/tiny/hf
	$(BIN)/python -m jmoe.deploy.merge runs/tiny runs/tiny/hf
	$(BIN)/python -m jmoe.programs.generate runs/tiny/hf 'def read(self, path):' --policy ring $(ARGS)

# mypy keeps one core busy: it runs beside the tests
test: ruff
	@$(MAKE) --no-print-directory -j 2 mypy quick-tests

test-all: ruff
	@$(MAKE) --no-print-directory -j 2 mypy all-tests

lint: ruff mypy

ruff: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(STAMP)
	$(BIN)/mypy

quick-tests: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow' $(WORKERS) $(ARGS)

all-tests: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/train/step.py $(ARGS)

gpu: $(STAMP)
	$(BIN)/python benchmarks/lib/gpu.py $(ARGS)

gpu-estimate: $(STAMP)
	$(BIN)/python benchmarks/train/estimates.py --write $(ARGS)

docs: $(STAMP)
	$(BIN)/python benchmarks/lib/render.py

kernels-aot: $(STAMP)
	$(BIN)/python benchmarks/kernels/aot.py $(ARGS)
	$(BIN)/python benchmarks/serve/engine_aot.py
	$(BIN)/python benchmarks/offload/retention_aot.py

# The stamp is written last, so that a set-up broken off half-way is done again.
$(STAMP): pyproject.toml
	@'$(PYTHON)' -c '' 2>/dev/null || { \
	  echo "'$(PYTHON)' does not run here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jmoe needs Python 3.11 or newer; '$(PYTHON)' is $$('$(PYTHON)' --version 2>&1). Name a newer one: make PYTHON=python3.13"; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Setting up $(VENV) with $$('$(PYTHON)' --version); this takes a few minutes the first time."
	@test "$$(cat $(VENV)/.python 2>/dev/null)" = '$(PYTHON)' || '$(PYTHON)' -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev$(addprefix $(comma),$(EXTRA))]'
	@$(BIN)/python -m kernels_pallas.native || true
	@rm -f $(VENV)/.installed-*
	@echo '$(PYTHON)' > $(VENV)/.python
	@echo '$(EXTRA)' > $(VENV)/.extra
	@touch $@
