# `make` lists the targets. Everything happens inside .venv; nothing outside this folder is changed.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PY := .venv/bin/python
STAMP := .venv/.setup-done

# Extra options for pip, for example another index: make setup PIP_ARGS="--index-url ..."
PIP_ARGS ?=

# The pins hold for every package, and for the isolated environment in which the editable package is built.
export PIP_CONSTRAINT := $(CURDIR)/constraints-dev.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints-dev.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The stamp holds the folder it was made for: a moved, copied or broken environment is set up again.
ifneq ($(shell $(PY) -c 'import pip; print(open("$(STAMP)").read().strip())' 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: $(STAMP) ## create .venv and install the package with its development tools

$(STAMP): pyproject.toml constraints-dev.txt
	@rm -f $(STAMP)
	@if ! $(PY) -c 'import sys, pip._internal; assert sys.version_info >= (3, 11)' 2>/dev/null; then \
	    for python in python3.11 python3.12 python3.13 python3 python; do \
	        if $$python -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' 2>/dev/null; then \
	            echo "creating .venv with $$($$python --version)"; \
	            rm -rf .venv; \
	            $$python -m venv .venv || exit 1; \
	            break; \
	        fi; \
	    done; \
	    if [ ! -x $(PY) ]; then \
	        echo "error: expected Python 3.11 or newer with the venv module on the path; found none. Install one and run make again." >&2; \
	        exit 1; \
	    fi; \
	fi
	@echo "installing into .venv (a few minutes the first time)"
	@$(PY) -m pip install -qq $(PIP_ARGS) -c constraints-dev.txt torch==2.13.0 -e '.[dev]'
	@$(PY) -m pip check
	@echo '$(CURDIR)' > $(STAMP)
	@echo 'ready; to use the command: source .venv/bin/activate'

.PHONY: FORCE
FORCE:

.PHONY: demo
demo: $(STAMP) ## show on one page what trains without normalization (1½ minutes)
	@$(PY) -m normfree demo --out demo

.PHONY: claims
claims: $(STAMP) ## write docs/claims.md and all judgements, and draw all pictures, from the stored results
	@$(PY) -m normfree reproduce --draw --write docs/claims.md
	@for kept in $$(find results -name comparison.json); do $(PY) -m normfree compare --draw "$$kept" || exit 1; done
	@PYTHONPATH=src $(PY) tests/papers/test_judgements.py

.PHONY: claim
claim: $(STAMP) ## measure the claim ID=PAPER/NAME, try it with its mutants, and write all that follows
	@$(PY) -m normfree reproduce $(ID) --again || [ $$? -eq 1 ]
	@$(MAKE) --no-print-directory mutants CLAIMS=$(ID)
	@$(MAKE) --no-print-directory claims

.PHONY: mutants
mutants: $(STAMP) ## plant errors in the library and write which claims notice them to results/mutants.json
	@PYTHONPATH=src:tests/support OMP_NUM_THREADS=1 $(PY) tests/papers/test_mutants.py $(CLAIMS)

.PHONY: docs
docs: $(STAMP) ## build the documentation site in site/ (half a minute)
	@PYTHONPATH=src $(PY) website/build_site.py

.PHONY: examples
examples: $(STAMP) ## run the examples, and store their outputs, pictures and notebooks (2 minutes)
	@PYTHONPATH=src OMP_NUM_THREADS=1 $(PY) -W ignore website/example_runs.py

.PHONY: benchmarks-page
benchmarks-page: $(STAMP) ## write docs/benchmarks.md from the stored results
	@$(PY) benchmarks/page.py

# Two workers with one thread each: at the default thread counts they would slow each other down. A file stays with one
# worker, because its tests share measurements.
.PHONY: test
test: $(STAMP) ## run the tests (9 minutes on two cores)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --durations=10

.PHONY: slow
slow: $(STAMP) ## run the tests marked slow, without those for a GPU or a browser
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --durations=10 -m 'slow and not gpu and not browser'

.PHONY: faults
faults: $(STAMP) ## inject faults into stored files and processes, and count them by kind
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m 'faults and not gpu and not browser' tests

.PHONY: browser
browser: $(STAMP) ## test the HTML pages and the documentation site in Chromium (install the package chromium first)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m browser tests/report tests/train/run tests/website tests/papers/claims/test_ledger.py

.PHONY: check
check: $(STAMP) ## check lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy src

.PHONY: clean
clean: ## remove caches and build output, keep .venv, data and runs
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .coverage htmlcov
	find . \( -name .venv -o -name .git \) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
