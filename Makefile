# `make` lists what can be made. Needs Python 3.11 with its headers, g++ and make; nothing else.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
# What to install stands once, in the pip section of environment.yml.
REQUIREMENTS := $(shell sed -n 's/^ *- \(-[ce] .*\)$$/\1/p' environment.yml)
# Options for JupyterLab; it refuses to run as root (a container) unless told.
LAB ?= $(if $(filter 0,$(shell id -u)),--allow-root)
# Arguments passed on to pytest, e.g. make test ARGS="-k tokens -x"
ARGS ?=
# This checkout's kernel and settings come before the user's own.
export JUPYTER_PREFER_ENV_PATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup smollm2 lab report notebooks test test-fast test-browser bench calibrate pins clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## install everything into .venv (done once; again only when the pins change)

$(STAMP): pyproject.toml constraints.txt environment.yml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(REQUIREMENTS)
	$(BIN)/jupyter labextension disable @jupyterlab/apputils-extension:announcements 2>/dev/null || true
	@touch $@

smollm2: $(STAMP) ## fetch SmolLM2-135M-Instruct (98 MB, once)
	$(BIN)/lossless-lab models fetch smollm2

lab: $(STAMP) ## open JupyterLab on the first notebook
	@$(MAKE) --no-print-directory smollm2 \
	  || echo "SmolLM2 could not be fetched: set MODEL = \"tiny-target\" in the notebook's parameters."
	$(BIN)/jupyter lab $(LAB) notebooks/00_start_here.ipynb

report: $(STAMP) ## run every notebook unattended; write figures/ and figures/report.html
	$(PY) -m notebooks.build report

notebooks: $(STAMP) ## rebuild the executed notebooks/*.ipynb from notebooks/src
	$(PY) -m notebooks.build rebuild

test: smollm2 ## every test but those in the browser
	$(PY) -m pytest -m "not browser" $(ARGS)

test-fast: $(STAMP) ## the tests that need no download and little time, under three minutes
	$(PY) -m pytest -m "not slow and not browser and not smollm2 and not engine" $(ARGS)

test-browser: $(STAMP) ## the panels in JupyterLab in headless Chromium
	$(PY) -m pytest -m browser $(ARGS)

bench: $(STAMP) ## measure the times that are quoted; interleaved, median of 5
	$(PY) -m benchmarks bench

calibrate: $(STAMP) ## simulate the stated error rates at full length
	$(PY) -m benchmarks calibrate

pins: $(STAMP) ## write constraints.txt from what is installed now
	@{ sed -n '/^#/p' constraints.txt; $(PY) -m pip freeze --all --exclude-editable \
	  | sed '/^pip==/d; s/+[a-z0-9.]*$$//' | tr 'A-Z_' 'a-z-' | LC_ALL=C sort -t= -k1,1; } > constraints.new
	mv constraints.new constraints.txt

clean: ## remove caches, not .venv and not fetched models
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
