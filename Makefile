VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo demo-gpu test check bench fuzz sweep demo-matrix clean
$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv $(VENV)
	@echo "installing into $(VENV) (once; a minute or two)"
	@$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[torch,cli,conformance,dev]'
	@touch $@

demo: $(STAMP)
	@$(PY) -m kvproto_reference.demo $(ARGS)

demo-gpu: $(STAMP)
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[cuda]'
	@$(PY) -m kvproto_reference.demo --transport cuda $(ARGS)

test: $(STAMP)
	@$(PY) -m pytest $(ARGS)

check: $(STAMP)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(PY) -m tools.specgen --check
	@$(PY) benchmarks/tables.py --check

bench: $(STAMP)
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@$(PY) benchmarks/codec.py $(ARGS)

fuzz: $(STAMP)
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@$(PY) -m tests.fuzz.run $(or $(SECONDS),60)

demo-matrix: $(STAMP)
	@$(PY) -m tests.demo.matrix

sweep: $(STAMP)
	@$(PY) -m tests.sweep

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
