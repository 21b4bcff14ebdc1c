# Everything runs in a virtual environment that these rules make; `make` lists them.

VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check

# The recorded traces, where they lie beside the checkout.
ifeq ($(strip $(UHRC_TRACES)),)
ifneq ($(wildcard ../shared/traces/.),)
export UHRC_TRACES := $(abspath ../shared/traces)
endif
endif

# Two processes, a file at a time, so that a file compiles what it shares once.
TWO := -n 2 --dist loadfile

MINUTES ?= 60

.DEFAULT_GOAL := help
.PHONY: help demo replay test test-all test-env lint format bench soak tpu-estimate
.PHONY: tpu-estimate-here clean always

help: ## list the targets
	@echo "usage: make TARGET [ARGS='more arguments'] [PYTHON=/path/to/python]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1|/p' Makefile | awk -F'|' '{printf "%-16s%s\n", $$1, $$2}'

demo: $(VENV)/.replay ## serve conversations with a hybrid model, cache on and off
	$(PY) -m uhrc_fn.serving $(ARGS)

replay: $(VENV)/.replay ## replay the built-in workload through the jitted cache
	$(PY) -m uhrc_fn.replay --trace builtin $(ARGS)

test: $(VENV)/.dev ## the fast tests and the notebooks
	$(PY) -m pytest -m "not slow" $(TWO) $(ARGS)

test-all: $(VENV)/.dev ## every test
	$(PY) -m pytest $(TWO) $(ARGS)

test-env: $(VENV)/.dev ## make the environment of the tests, run nothing
	@echo "$(VENV) is ready"

lint: $(VENV)/.dev ## ruff and pyright
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.dev ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.dev ## time each operation
	$(PY) benchmarks/ops.py $(ARGS)

soak: $(VENV)/.dev ## an hour under pressure, MINUTES= to shorten; nothing may grow
	$(PY) benchmarks/soak.py --minutes $(MINUTES) $(ARGS)

# Where libtpu is installed, every JAX program looks for a TPU first and complains: it
# gets an environment of its own.
tpu-estimate: ## the TPU compiler's estimates, no TPU needed
	@$(MAKE) --no-print-directory VENV=$(VENV)-tpu tpu-estimate-here

tpu-estimate-here: $(VENV)/.tpu
	$(PY) benchmarks/tpu_estimate.py $(ARGS)

clean: ## remove the environment and the caches
	rm -rf $(VENV) $(VENV)-tpu .cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras, out of date when pyproject.toml changes.
$(VENV)/.replay: EXTRAS := replay
$(VENV)/.dev: EXTRAS := dev
$(VENV)/.tpu: EXTRAS := tpu
$(VENV)/.replay $(VENV)/.dev $(VENV)/.tpu: $(VENV)/.made pyproject.toml
	@echo "Installing uhrc_fn[$(EXTRAS)] into $(VENV) (the first time takes a minute or two)"
	@$(PIP) install --editable '.[$(EXTRAS)]'
	@touch $@

# An environment that does not run (its Python was removed, it was left half made) is
# made anew, stamp or no stamp.
VENV_RUNS := import pip, sys; print(sys.version_info >= (3, 12))
ifneq ($(shell test -x $(PY) && $(PY) -c '$(VENV_RUNS)' 2>&1),True)
$(VENV)/.made: always
endif
$(VENV)/.made:
	@python=$$(sh scripts/find-python.sh) && \
	echo "Making $(VENV) with $$python" && \
	"$$python" -m venv --clear $(VENV)
	@touch $@
