# Everything there is to do, and all that CI does. A fresh machine needs Python (3.11 or newer), pip and make.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
# constraints.txt says which versions were tested together; no install goes around it
PIP := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
# tests are many and small: one thread in each of two processes is faster than two threads that wait for each other
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
# tests that show how much of base and core runs
COVERING := tests/base tests/core tests/fuzz tests/integrations tests/models/test_count.py
CODE := regard tests $(wildcard bench tools)

.DEFAULT_GOAL := help
.PHONY: run test check fix slow faults bench zoo docs site release-check clean help

run: $(VENV)/.run  ## the explorer, a web page; `regard tour` is the tour in the terminal
	$(PY) -m regard explore

test: check  ## all quick tests, with coverage of base and core
	$(PYTEST) -n $(WORKERS) -m "not slow" $(COVERING) \
		--cov=regard/base --cov=regard/core --cov-branch --cov-report=term:skip-covered --cov-fail-under=95
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m "not slow" $(addprefix --ignore=,$(COVERING))

check: $(VENV)/.test  ## style, types, who imports whom, known vulnerabilities
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy --strict
	$(PYTEST) -q tests/test_architecture.py
	$(PY) -m tools.audit

fix: $(VENV)/.test  ## let ruff put style right
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

slow: $(VENV)/.test  ## the tests that take minutes
	$(PYTEST) -m slow

faults: $(VENV)/.test  ## kills, signals, bit flips, truncations, full disks, wrong clocks and fuzzed files
	$(PYTEST) tests/test_faults.py tests/explorer/test_jobs.py tests/fuzz tests/base/test_files.py tests/base/test_plain_pickle.py tests/train/test_checkpoint.py \
		tests/train/test_loop.py tests/train/test_distributed.py tests/recipes/test_run_folder.py

bench: $(VENV)/.test  ## ratios against peers
	$(PY) -m bench
	$(PY) -m bench.linear
	$(PY) -m bench.models
	$(PY) -m bench.huggingface
	$(PY) -m bench.watching

zoo: $(VENV)/.test  ## train the pretrained models of regard/models/zoo again
	OMP_NUM_THREADS=1 $(PY) -m regard.recipes.zoo

docs: $(VENV)/.test  ## run the code of every page, check links, build the pages into site/
	$(PYTEST) -q tests/test_docs.py tests/test_api_reference.py tests/test_site.py
	$(PY) -m tools.site

site: $(VENV)/.test  ## the pages and the explorer in one folder, site/, for a file or any web server
	$(PY) -m tools.site --explorer

release-check: $(VENV)/.test  ## build wheel and sdist, test them in a fresh environment, write SBOM and hashes
	$(PY) -m tools.release --out dist

clean:  ## caches and build outputs; .venv stays
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist site *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1 \2/p' Makefile | while read -r name words; do printf '%-13s %s\n' "$$name" "$$words"; done

# Some systems ship Python without ensurepip; then the pip outside puts one inside.
$(PY):
	$(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install -c constraints.txt pip; }

$(VENV)/.run: pyproject.toml constraints.txt | $(PY)
	$(PIP) -e '.[web]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(PY)
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.run
