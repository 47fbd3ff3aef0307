# make demo, make test: each does all its own set-up in .venv, once, and reuses it afterwards.
#
#   PYTHON=python3.12   which Python to use; else the first of python3, python3.14 ... python3.10
#   FOLDER=path         demo: what to index
#   ARGS="-k fork -x"   test, unit: arguments of pytest
#   WHAT="acquire herd" bench: which ones

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
BIN := .venv/bin

.PHONY: help demo test unit lint format bench clean core dev

help:
	@echo "make demo    four processes, one index, a crash and a pause: watch the lease at work"
	@echo "make test    everything: linters, types, floors, then all tests"
	@echo "make unit    the tests alone         (ARGS=\"-k fork\")"
	@echo "make lint    ruff, mypy, pyright, import-linter alone"
	@echo "make format  let ruff put the sources in order"
	@echo "make bench   the benchmarks          (WHAT=\"acquire herd\")"
	@echo "make clean   remove .venv and whatever else was made"

demo: core
	@$(BIN)/python -m tako_sync.demo $(if $(FOLDER),"$(FOLDER)")

test: lint unit

unit: dev
	@echo "== pytest"
	@$(BIN)/python -m pytest -n auto $(ARGS)

lint: dev
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== pyright"
	@$(BIN)/basedpyright --pythonpath $(BIN)/python
	@echo "== lint-imports"
	@$(BIN)/lint-imports > .venv/floors.txt || { cat .venv/floors.txt; exit 1; }
	@tail -n 2 .venv/floors.txt | grep .

format: dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: dev
	@$(BIN)/python -m benchmarks $(WHAT)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache \
		.hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

core dev:
	@PYTHON="$(PYTHON)" sh -c "$$SETUP" setup $@

# --- The virtual environment ---------------------------------------------------------------
#
# .venv/made says where, and with which Python, it was made: it works nowhere else, so a copied
# checkout or a changed Python has it rebuilt. .venv/core and .venv/dev say from which setup.cfg
# and pyproject.toml each was installed, by content: a file that was only touched costs nothing.

define SETUP
set -eu
what=$$1
about='import os, sys; print(os.path.realpath(sys.prefix), sys.base_prefix, sys.version)'
base='import sys; print(sys.base_prefix, sys.version)'
new_enough='import sys; sys.exit(sys.version_info < (3, 10))'

works() {
	[ -f .venv/made ] || return 1
	made=$$(cat .venv/made)
	[ "$$(.venv/bin/python -c "$$about" 2>&1)" = "$$made" ] || return 1
	[ -z "$$PYTHON" ] && return 0
	case $$made in *" $$($$PYTHON -c "$$base" 2>&1)") return 0 ;; *) return 1 ;; esac
}

choose() {
	old= bare=
	for python in $${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
		version=$$($$python -V 2>/dev/null) || continue
		if ! $$python -c "$$new_enough" 2>/dev/null; then
			old="$$old $$python ($$version)"
		elif ! $$python -c 'import ensurepip, venv' 2>/dev/null; then
			bare="$$bare $$python"
		else
			# The one below, if this is that of an active .venv, about to be removed.
			python=$$($$python -c 'import sys; print(sys._base_executable)')
			return 0
		fi
	done
	if [ -n "$$bare" ]; then
		set -- $$bare
		minor=$$($$1 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
		echo "No virtual environment can be made with$$bare: venv or ensurepip is missing." >&2
		echo "On Debian and Ubuntu: apt-get install python$$minor-venv (or python3-venv)" >&2
	else
		echo "Python 3.10 or newer is needed, and found was:$${old:- none}." >&2
		echo "Install one, or name it: make PYTHON=/path/to/python3" >&2
	fi
	exit 1
}

if ! works; then
	choose
	echo "== virtual environment in .venv ($$version)"
	rm -rf .venv
	"$$python" -m venv .venv
	.venv/bin/python -c "$$about" > .venv/made
fi

want=$$(cat setup.cfg pyproject.toml | cksum)
has() { [ "$$(cat .venv/$$1 2>/dev/null)" = "$$want" ]; }

if [ $$what = dev ] && ! has dev; then
	echo "== install tako_sync and what its tests and tools need (once; a minute or two)"
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	echo "$$want" > .venv/dev
elif [ $$what = core ] && ! has core && ! has dev; then
	echo "== install tako_sync and what it needs (once; about a minute)"
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e .
	echo "$$want" > .venv/core
fi
endef
export SETUP
