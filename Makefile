VENV := .venv
PY := $(VENV)/bin/python
# Without --no-compile pip would compile all of torch, of which a demo needs a part.
PIP := $(PY) -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt
CORES := $(shell nproc)
# One more than there are cores: tests of processes wait for each other.
JOBS ?= $(shell echo $$(($(CORES) > 8 ? 8 : $(CORES) + 1)))

.PHONY: demo demo-gpu test chaos conformance prove prove-quick quick engines check check-model format docs coverage wheel wheel-test bench fuzz sweep wild demo-matrix demo-real clean
# $(VENV)/.X says that the extras of X are there. Each target installs its own and no more.
$(VENV)/.demo: EXTRAS = torch,cli
$(VENV)/.test: EXTRAS = torch,cli,test
$(VENV)/.check: EXTRAS = torch,cli,check
$(VENV)/.docs: EXTRAS = docs
$(VENV)/.coverage: EXTRAS = coverage
$(VENV)/.bench: EXTRAS = bench
$(VENV)/.fuzz: EXTRAS = fuzz
$(VENV)/.gpu: EXTRAS = cuda
$(VENV)/.real: EXTRAS = real
$(VENV)/.jax: EXTRAS = torch,jax
$(VENV)/.nixl: EXTRAS = nixl
$(VENV)/.%: pyproject.toml constraints.txt
	@test -x $(PY) || { echo "making $(VENV)"; python3 -m venv $(VENV); }
	@echo "installing kvproto[$(EXTRAS)] into $(VENV): once, half a minute or less from a near mirror"
	@$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

# Weights, for the demo with --real alone; they say how large they are.
$(VENV)/smollm2: | $(VENV)/.demo $(VENV)/.real
	@$(PY) -m kvproto_reference.smollm2 $@

demo: $(VENV)/.demo $(if $(findstring --real,$(ARGS)),$(VENV)/smollm2)
	@$(PY) -m kvproto_reference.demo $(ARGS)

demo-gpu: $(VENV)/.demo $(VENV)/.gpu
	@$(PY) -m kvproto_reference.demo --transport cuda $(ARGS)

# Bytecode is kept also where the environment says not to: each worker, and each process of a test, would compile all anew.
test quick: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.test
	@$(PY) -m pytest -n $(JOBS) $(ARGS)

quick: $(VENV)/.test
	@$(PY) -m pytest -n $(CORES) -m "not slow" $(ARGS)

check: $(VENV)/.check
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check -q .
	@$(VENV)/bin/lint-imports --no-cache > $(VENV)/imports.txt || { cat $(VENV)/imports.txt; exit 1; }
	@$(VENV)/bin/mypy
	@$(PY) -m tools.specgen --check
	@$(PY) benchmarks/tables.py --check
	@$(PY) benchmarks/dcp_report.py --check
	@$(PY) -m tools.layout_vectors --check

# All testees by the conformance suite, as far as they claim; a page of each, and one of all, in build/conformance.
# NIXL is for the live scenarios of staging slots.
conformance: $(VENV)/.demo $(VENV)/.nixl
	@test -e /usr/include/zmq.h || { echo "installing libzmq3-dev, for the sink in C"; apt-get install -y -qq libzmq3-dev > /dev/null 2>&1 || true; }
	@$(PY) -m tools.conformance $(ARGS)

# Whether the suite notices what is wrong: mutants of the registry and of code, bugs that engines have had.
prove: $(VENV)/.test
	@PYTHONDONTWRITEBYTECODE= $(PY) -m tools.prove $(ARGS)

# Its parts that are not drawn by chance: every fact of the registry, and every bug.
prove-quick: $(VENV)/.test
	@PYTHONDONTWRITEBYTECODE= $(PY) -m tools.prove bugs registry $(ARGS)

# The models of spec/v1/lifecycle, searched by Debian's spin.
check-model: $(VENV)/.check
	@command -v spin > /dev/null || { echo "installing spin"; apt-get install -y -qq spin > /dev/null 2>&1 || true; }
	@$(PY) -m tools.model

format: $(VENV)/.check
	@$(VENV)/bin/ruff check --fix -q .
	@$(VENV)/bin/ruff format .

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q
	@echo "the site is in build/site: open build/site/index.html, or $(PY) -m mkdocs serve"

coverage: $(VENV)/.test $(VENV)/.coverage
	@$(PY) -m tools.coverage_figures $(ARGS) -- -n $(JOBS)

wheel: $(VENV)/.demo
	@rm -rf dist && $(PY) -m pip wheel -q --disable-pip-version-check --no-deps -w dist .

wheel-test: wheel $(VENV)/.check
	@$(PY) -m tools.wheel_test dist/*.whl

bench: $(VENV)/.demo $(VENV)/.bench
	@$(PY) benchmarks/codec.py $(ARGS)

fuzz: $(VENV)/.test $(VENV)/.fuzz
	@$(PY) -m tests.fuzz.run $(or $(SECONDS),60)

# vLLM and SGLang themselves, on the CPU, in an environment of their own: their pools beside `kvproto describe --engine`,
# and engines that hand prompts over to each other through integrations/.
engines: $(VENV)/.demo $(VENV)/.jax $(VENV)/smollm2
	@tools/engines/install.sh .engines
	@$(PY) -m tools.engines

# The demo with --real, and beside it one bit that flips on the way.
demo-real: $(VENV)/.demo $(VENV)/smollm2
	@$(PY) -m tests.demo.real

demo-matrix: $(VENV)/.demo
	@$(PY) -m tests.demo.matrix

# Engines in processes of their own to which everything happens (docs/chaos.md); about three minutes.
chaos: $(VENV)/.test
	@$(PY) -m kvproto_reference.chaos --seeds $(or $(SEEDS),0..59) --jobs 2 $(ARGS)

sweep: $(VENV)/.test
	@$(PY) -m tests.sweep

wild: $(VENV)/.test
	@$(PY) -m tests.plan.wild $(or $(SECONDS),60)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
