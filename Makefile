# Every target sets up .venv by itself, once per change of requirements.lock. Needs a POSIX shell and Python 3.11 or newer;
# Java is not needed, a runtime comes as a wheel.
#
#   make demo        live rows through every part of the system into Spark tables
#   make test        the whole test suite but crashes and long runs
#   make test-crash  kills, power cuts, failing disks, flipped bits: a few of each; Linux, and root for some of it
#   make test-crowded  the README, workers and every command beside packages that users have, in an environment of its own
#   make test-long   the long tests; with GATE=kill MINUTES=60 one gate for so long, kept in docs/reliability.md
#   make check       format, lint, types, layers, spelling, tidiness, budgets
#   make bench       the benchmarks, each against its baseline
#   make docs        pages and reference as a site in site/; fails on a broken link, or a public name without a docstring
#   make lock        resolve requirements.lock and requirements-crowded.lock again
#   make clean       remove caches and build output; environments and data stay
#
# ARGS is passed on: make test ARGS="tests/wal -x". Tests run in WORKERS processes, two of which start Spark; in one process,
# for a debugger: make test WORKERS=0

.POSIX:
.SUFFIXES:
.PHONY: demo test test-crash test-crowded test-long check bench docs lock clean venv

PYTHON ?= python3
ARGS ?=
WORKERS ?= 3
GATE ?=
MINUTES ?= 10
UV_VERSION = 0.13.8

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Test processes, and the many that they start, do not compile the same files again, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

VENV = .venv
IN = $(VENV)/bin
CROWDED = .venv-crowded

demo: $(VENV)/.installed
	$(IN)/streamingnode demo $(ARGS)

test: $(VENV)/.installed
	$(IN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-crash: $(VENV)/.installed
	$(IN)/python -m pytest --numprocesses 2 --dist worksteal -m crash --durations=10 -o faulthandler_timeout=900 $(ARGS)

test-crowded: $(CROWDED)/.installed
	$(CROWDED)/bin/python -m pytest -m crowded tests/crowded --durations=5 $(ARGS)

test-long: $(VENV)/.installed
	@if [ -n "$(GATE)" ]; then \
	  $(IN)/python -m tests.chaos $(GATE) --minutes $(MINUTES) $(ARGS); \
	else \
	  HYPOTHESIS_PROFILE=nightly $(IN)/python -m pytest -m long --timeout=3600 $(ARGS); \
	fi

check: $(VENV)/.installed
	$(IN)/ruff format --check .
	$(IN)/ruff check .
	$(IN)/python -m mypy
	$(IN)/lint-imports --no-logo
	$(IN)/codespell
	$(IN)/python -m pytest -q tests/test_tidy.py tests/test_budgets.py

bench: $(VENV)/.installed
	$(IN)/python -m bench $(ARGS)

docs: $(VENV)/.installed
	$(IN)/python -m sphinx -q -W --keep-going -E -d build/doctrees -c docs . site $(ARGS)

venv: $(VENV)/.installed

clean:
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name .venv -prune -o -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +

# uv resolves for every supported Python and system at once; it has an environment of its own, so that a lock that cannot
# be installed can still be replaced.
lock: $(VENV)/.created
	$(IN)/python -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv==$(UV_VERSION)
	build/lock/bin/uv pip compile --universal --python-version 3.11 --all-extras --generate-hashes --fork-strategy fewest \
	  --no-emit-index-url --no-emit-find-links --no-header --quiet $(ARGS) pyproject.toml --output-file requirements.lock
	cp requirements.lock requirements-crowded.lock
	build/lock/bin/uv pip compile --universal --python-version 3.11 --all-extras --group crowded --generate-hashes \
	  --fork-strategy fewest --no-emit-index-url --no-emit-find-links --no-header --quiet $(ARGS) \
	  pyproject.toml --output-file requirements-crowded.lock

# --- the environment --------------------------------------------------------------------------------------------------

$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	$(IN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.locked: $(VENV)/.created requirements.lock
	@echo "installing requirements.lock into $(VENV), once; Spark and Java are about 600 MB"
	$(IN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	@touch $@

# What .venv has is seen from here, too, and not installed once more: Spark and Java alone are 600 MB.
$(CROWDED)/.installed: $(VENV)/.installed requirements-crowded.lock
	rm -rf $(CROWDED)
	$(IN)/python -m venv $(CROWDED)
	$(IN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(CROWDED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(CROWDED)/bin/python -m pip install --quiet --require-hashes --requirement requirements-crowded.lock
	$(CROWDED)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# A .venv that works is kept, whoever made it. Debian splits ensurepip off into python3-venv, hence the second question.
$(VENV)/.created:
	@if $(IN)/python -m pip --version >/dev/null 2>&1; then touch $@; exit 0; fi; \
	old='' bare=''; \
	for python in "$(PYTHON)" python3.13 python3.12 python3.11 python3.14; do \
	  "$$python" -c '' >/dev/null 2>&1 || continue; \
	  "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { old="$$python"; continue; }; \
	  "$$python" -c 'import ensurepip, venv' 2>/dev/null || { bare="$$python"; continue; }; \
	  echo "creating $(VENV) with $$python"; \
	  rm -rf $(VENV) && "$$python" -m venv $(VENV) && touch $@; exit $$?; \
	done; \
	if [ -n "$$bare" ]; then \
	  echo "$$bare cannot create virtual environments: its ensurepip is missing." >&2; \
	  echo "On Debian and Ubuntu: apt install python3-venv" >&2; \
	elif [ -n "$$old" ]; then \
	  echo "$$old is $$("$$old" --version 2>&1); Python 3.11, 3.12, 3.13 or 3.14 is needed." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.13" >&2; \
	else \
	  echo "no Python found; install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3.13" >&2; \
	fi; exit 1
