# make demo    stage real photographs and print what it did
# make test    lint, types and the whole test suite
# make bench   accel_ops beside the peers that are installed (make peers installs two of them)
#
# All of them make .venv on first use. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MPLBACKEND := Agg

# The stamps carry the interpreter's version: another one gets a new environment.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
ifeq ($(VERSION),)
$(error $(PYTHON) does not run; name an interpreter: make PYTHON=python3.12)
endif
STAMP := $(VENV)/.installed-$(VERSION)

.PHONY: demo test bench peers clean

demo: $(STAMP)-demo
	$(RUN) examples/stage_photographs.py

test: $(STAMP)-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest

bench: $(STAMP)-dev
	$(RUN) -m benchmarks.compare $(BENCH_OPTIONS)

# torch, the third peer, is not installed here, because its default build may bring a CUDA runtime along: install its
# CPU build into .venv as torch's own documentation says.
peers: $(STAMP)-dev
	$(RUN) -m pip install --quiet --editable '.[peers]'

# Dependency groups need pip 25.1; the one that comes with a new environment may be older.
$(STAMP)-base:
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --upgrade 'pip>=25.1'
	touch $@

$(STAMP)-%: $(STAMP)-base pyproject.toml
	$(RUN) -m pip install --quiet --editable . --group $*
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .benchmarks
