# demo, test, quick, parity, bench, check, lint. The first use makes the virtual environment and installs what the target needs.
#   PYTHON=python3.12        the interpreter the environment is made with (default: the first one >= 3.11)
#   VENV=.venv-other         where the environment lies (one per interpreter)
#   JAX='jax==0.11.2'        holds JAX at a version
#   TESTS='tests/test_x.py'  tests to run, with any options for pytest
#   CHECK='--shape small'    options of check
#   STORE=mooncake           what the demo's second process gets its checkpoint from (default: disk)

VENV ?= .venv
JAX ?=
WORKERS ?= 2
TESTS ?= tests
CHECK ?=
STORE ?= disk
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

python := $(VENV)/bin/python
pytest = $(python) -m pytest -q -n $(WORKERS) --durations=8
# One more than cores: these wait for servers, stores and processes for a third of their time.
quick = $(pytest) -n $(shell expr $(WORKERS) + 1) --dist loadfile --no-loadscope-reorder --quick-compile
# A file of these may take as long as all others together: its tests are shared out, and no file is read that has none.
optimised = $(pytest) --dist worksteal -m optimised \
  $(if $(filter-out tests,$(TESTS)),$(TESTS),$$(grep -l mark.optimised tests/test_*.py))
# Modules are compiled when they are first imported: most never are.
install = $(python) -m pip install -qq --no-compile --disable-pip-version-check
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.3
# Bytecode is kept, whatever the caller's shell has: without it every process compiles all of JAX anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick parity bench check lint format
.DELETE_ON_ERROR:

demo: $(VENV)/.installed $(if $(filter mooncake,$(STORE)),$(VENV)/.installed-mooncake)
	@$(python) -m kda_jax demo --store $(STORE)

# Twice, once with little optimisation, for what is not about compiled arithmetic; one of the two may select no test (5).
test: $(VENV)/.installed-dev
	@little=0; all=0; \
	$(quick) -m 'not parity and not optimised' $(TESTS) || little=$$?; \
	$(optimised) || all=$$?; \
	case "$$little $$all" in '0 0' | '0 5' | '5 0') ;; *) exit 1 ;; esac

# The first of the two alone.
quick: $(VENV)/.installed-dev
	@$(quick) -m 'not parity and not optimised' $(TESTS)

parity: $(VENV)/.installed-parity
	@$(quick) --dist load -m parity $(TESTS)

bench: $(VENV)/.installed-parity $(VENV)/.installed-peers
	@mkdir -p out
	@$(python) -m kda_jax bench ops --json out/ops.json
	@$(python) -m kda_jax bench model --json out/model.json

check: $(VENV)/.installed-check
	@mkdir -p out
	@$(python) -m pallas_kernels check --jobs $(WORKERS) --json out/check.json $(CHECK)

lint: $(VENV)/.installed-dev
	@$(python) -m ruff format --check --quiet . || { echo 'not formatted: run `make format`' >&2; exit 1; }
	@$(python) -m ruff check --quiet .
	@$(python) -m pyright --pythonpath $(python)

format: $(VENV)/.installed-dev
	@$(python) -m ruff format --quiet . && $(python) -m ruff check --fix --quiet .

$(python):
	@test -n '$(PYTHON)' || { echo 'no Python >= 3.11 found: name one with PYTHON=...' >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(python)
	@echo 'installing kda-jax into $(VENV)'
	@$(install) -e . $(JAX)
	@touch $@

$(VENV)/.installed-mooncake: pyproject.toml | $(VENV)/.installed
	@echo "installing Mooncake's client and master into $(VENV)"
	@$(install) -e '.[mooncake]' $(JAX)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml | $(python)
	@echo 'installing kda-jax and its development tools into $(VENV)'
	@$(install) -e '.[dev]' $(JAX)
	@touch $(VENV)/.installed $(VENV)/.installed-mooncake $@

# torch goes first and by itself, so that nothing else decides which one comes
$(VENV)/.installed-parity: $(VENV)/.installed-dev
	@echo 'installing torch and transformers, to compare with, into $(VENV)'
	@$(install) torch==2.13.0
	@$(install) -e '.[dev,parity]' $(JAX)
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

$(VENV)/.installed-peers: $(VENV)/.installed-dev
	@echo 'installing the JAX packages to compare with into $(VENV) (Python 3.12 or later)'
	@$(install) -e '.[dev,peers]' $(JAX)
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

# JAX's plugins must be of its version: the CUDA one without NVIDIA's libraries, which only a GPU needs, and libtpu
# as JAX's own extra `tpu` names it
$(VENV)/.installed-check: $(VENV)/.installed
	@echo 'installing the compilers for GPUs and TPUs into $(VENV)'
	@version=$$($(python) -c 'import jax; print(jax.__version__)') && \
	  libtpu=$$($(python) -c 'from importlib.metadata import requires; print(next(line.split(";")[0].strip() for line in requires("jax") if line.startswith("libtpu")))') && \
	  $(install) --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" "$$libtpu" \
	  'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*'
	@touch $@
