# Two commands do everything on a fresh machine that has Python 3.11 or newer:
#   make demo   installs, then runs the main job on the embedded default
#   make test   installs, then lint, types and the test suite

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install test lint types unit demo soak mutation benchmark clean

install: $(STAMP)

# torch comes first and exactly: a bare range would bring gigabytes of CUDA to a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

test: install lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

unit: install
	$(BIN)/pytest -n 2 --dist loadgroup

demo: install
	$(BIN)/stalewise demo

# A random sample of mutants of the pure rooms; the share killed is printed last.
mutation: install
	$(BIN)/python scripts/mutation.py --sample 200 --seed 0

# A run is killed 200 times and must end as if it never had been.
soak: install
	$(BIN)/python scripts/soak.py --kills 200

benchmark: install
	$(BIN)/python benchmarks/objectives.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
