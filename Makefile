# make demo     everything from nothing: environment, install, an unmodified training script on an emulated GPU
# make test     the tests          make lint   style and types
# make bench    speed figures      make format rewrites the sources in the project's style
# make accuracy DATA=folder   error of the predictor on measurements its fit did not see (docs/predictor.md)
# make profiles DATA=folder   fits the predictor's profiles anew
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format bench bench-worlds bench-predictor accuracy profiles clean

demo: $(INSTALLED)
	$(BIN)/maya run --gpu h100 --out maya-out/demo -- python examples/train_gpt.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_device.py

bench-worlds: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_worlds.py

bench-predictor: $(INSTALLED)
	$(BIN)/python tests/benchmarks/bench_predictor.py

accuracy: $(INSTALLED)
	@test -n "$(DATA)" || { echo "make accuracy DATA=folder: the measurements to hold predictions against (docs/predictor.md)"; exit 2; }
	$(BIN)/python tests/accuracy/predictor.py "$(DATA)"

profiles: $(INSTALLED)
	@test -n "$(DATA)" || { echo "make profiles DATA=folder: the measurements to fit (docs/predictor.md)"; exit 2; }
	$(BIN)/python -m maya_core.predictor.fitting "$(DATA)"

# torch first and by its exact version: a range would pull gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) maya-out build dist *.egg-info
