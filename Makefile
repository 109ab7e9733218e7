# `make demo` and `make test` set up everything they need, from nothing, in any order.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.setup

.PHONY: demo test check bench clean

demo: $(SETUP)
	$(BIN)/tapeline demo --out demo

test: $(SETUP)
	$(BIN)/pytest --numprocesses auto --dist worksteal

check: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py

bench: $(SETUP)
	$(BIN)/python benchmarks/everything.py $(BENCH)

# The data package is read as a file and never imported, so it comes without its dependencies.
$(SETUP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,docs,markets,metrics,remote,search,trackers]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps ob-analytics==0.1.0
	touch $(SETUP)

clean:
	rm -rf .venv demo tutorial runs stores build dist
