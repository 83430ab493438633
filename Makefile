# make demo     everything from nothing: environment, install, Llama 3 8B on eight emulated H100, and a page about it
# make test     all tests. Its parts: make test-fast (about a minute), test-slow (whole programs), test-framework (Lightning, DeepSpeed, ...)
# make lint     style, types and directions of imports
# make test-torch TORCH=2.15.0   the seam to torch and the device with another version of torch, in an environment of its own
# make test-oldest   the integrations with the oldest versions of their frameworks, in an environment of its own
# make docs     the site, strictly, into site/
# make wheel    the wheel that is released, into dist/
# make bench    speed figures      make format rewrites the sources in the project's style
# make accuracy DATA=folder   errors on measurements: kernels (docs/predictor.md) and whole training runs (docs/accuracy.md)
# make accuracy-megatron MEGATRON=folder   memory against what Megatron-LM's own CI measured (docs/megatron.md)
# make profiles DATA=folder   fits the predictor's profiles again
# make golden   records and prices the programs of tests/golden again, when predictions change on purpose
PYTHON ?= python3
VENV := .venv
DIST := dist
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CPP := $(wildcard maya_core/device/native/*.cpp maya_core/device/native/*.h maya_core/simulator/*.cpp maya_core/overlay/native/*.cpp maya_core/overlay/native/*.h)

.PHONY: environment demo test test-fast test-slow test-framework test-torch test-oldest docs wheel lint format bench bench-worlds bench-predictor bench-simulator accuracy accuracy-megatron profiles golden clean

environment: $(INSTALLED)

demo: $(INSTALLED)
	mkdir -p maya-out
	$(BIN)/maya run --gpu h100 --out maya-out/demo --html maya-out/demo.html -- torchrun --nproc-per-node 8 examples/train_llama_fsdp2.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal tests

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not framework" tests

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not framework" tests

test-framework: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m framework tests

# A version's CUDA build brings 4 GB of libraries. Everything else is as in constraints.txt.
TORCH_ENV = .venv-torch/$(TORCH)
test-torch:
	@test -n "$(TORCH)" || { echo "make test-torch TORCH=2.15.0: the version of torch to test with (docs/versions.md)"; exit 2; }
	test -x $(TORCH_ENV)/bin/python || $(PYTHON) -m venv $(TORCH_ENV)
	$(TORCH_ENV)/bin/pip install --quiet --disable-pip-version-check 'torch==$(TORCH).*'
	grep -vE '^(torch|triton)==' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(TORCH_ENV)/bin/pip install --quiet --disable-pip-version-check -c $(TORCH_ENV)/constraints.txt 'torch==$(TORCH).*' -e '.[huggingface,lightning,deepspeed]' pytest pytest-xdist hypothesis psutil
	$(TORCH_ENV)/bin/python -m pytest -n auto --dist worksteal tests/torch_seam tests/device tests/ops

test-oldest:
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints-oldest.txt)"
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[lightning,pytorch-lightning,huggingface,deepspeed,megatron,mlflow,compile,search]' peft trl wandb tensorboard pytest pytest-xdist hypothesis psutil selenium nbclient ipykernel tabulate
	.venv-oldest/bin/python -m pytest -n auto --dist worksteal tests/integrations

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site

# The build runs in an environment of its own; the second variable has the meaning of the first since pip 25.3.
wheel:
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(DIST) .

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	PYTHONPATH=.:integrations $(BIN)/lint-imports --no-logo
	$(BIN)/mypy || { test $$? -eq 2 && $(BIN)/mypy; }  # 2: mypy itself crashed, as it did once in ten runs without a cache

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

bench: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_device.py

bench-worlds: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_worlds.py

bench-simulator: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_simulator.py

bench-predictor: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_predictor.py

accuracy: $(INSTALLED)
	@test -n "$(DATA)" || { echo "make accuracy DATA=folder: the measurements to hold predictions against (docs/predictor.md)"; exit 2; }
	$(BIN)/python tests/accuracy/held_out.py "$(DATA)"
	$(BIN)/python tests/accuracy/published_runs.py "$(DATA)"

accuracy-megatron: $(INSTALLED)
	@test -n "$(MEGATRON)" || { echo "make accuracy-megatron MEGATRON=folder: a checkout of Megatron-LM (docs/megatron.md)"; exit 2; }
	$(BIN)/python tests/accuracy/megatron_ci.py "$(MEGATRON)"

profiles: $(INSTALLED)
	@test -n "$(DATA)" || { echo "make profiles DATA=folder: the measurements to fit (docs/predictor.md)"; exit 2; }
	$(BIN)/python -m maya_core.predictor.fitting "$(DATA)"

golden: $(INSTALLED)
	$(BIN)/python tests/golden/golden.py record

# torch first and by its exact version: a range would pull gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt HolisticTraceAnalysis  # which wants JupyterLab
	touch $@

clean:
	rm -rf $(VENV) maya-out site build dist *.egg-info
