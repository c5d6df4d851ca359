VENV := .venv
PY := $(VENV)/bin/python
# --no-compile: otherwise pip compiles all of torch, and a demo needs only a part of it. Conflicts: what other targets need may be absent.
PIP := $(PY) -m pip install -q --no-compile --no-warn-conflicts --disable-pip-version-check -c constraints.txt
PROJECTS := pyproject.toml $(wildcard distributions/*/pyproject.toml)
CORES := $(shell nproc)
# Two more than there are cores, as tests of processes wait for each other.
JOBS ?= $(shell echo $$(($(CORES) > 8 ? 8 : $(CORES) + 2)))

.PHONY: crate lib lib-test lib-fuzz lib-abi equality simulate simulate-faults deploy-test rolling moving demo demo-gpu test test-thorough chaos conformance prove prove-quick quick engines check check-model format docs coverage release wheel-test models acceptance bench fuzz wild demo-real clean
# $(VENV)/.X marks that what X needs is installed: EXTRAS of the distributions, and a group of pyproject.toml.
$(VENV)/.demo: EXTRAS = kvproto[cli] kvproto-reference
$(VENV)/.test: EXTRAS = kvproto[cli,objects,seal] kvproto-reference --group test
$(VENV)/.check: EXTRAS = kvproto[cli,objects,seal] kvproto-reference --group check
$(VENV)/.docs: EXTRAS = kvproto --group docs
$(VENV)/.coverage: EXTRAS = --group coverage
$(VENV)/.bench: EXTRAS = --group bench
$(VENV)/.fuzz: EXTRAS = --group fuzz
$(VENV)/.release: EXTRAS = --group release
$(VENV)/.deploy: EXTRAS = --group deploy
$(VENV)/.gpu: EXTRAS = kvproto[cuda]
$(VENV)/.real: EXTRAS = kvproto-reference[real]
$(VENV)/.jax: EXTRAS = kvproto-reference[jax]
$(VENV)/.nixl: EXTRAS = kvproto[nixl]
$(VENV)/.%: $(PROJECTS) constraints.txt | $(VENV)/.checkout
	@echo "installing $(EXTRAS) into $(VENV): once, up to half a minute from a nearby mirror"
	@$(PIP) $(EXTRAS)
	@touch $@

# All distributions, editable, so that what is imported is this checkout; what they need comes with what needs it.
$(VENV)/.checkout: $(PROJECTS) kvproto/__init__.py
	@test -x $(PY) || { echo "making $(VENV)"; python3 -m venv $(VENV); }
	@$(PIP) --upgrade 'pip>=25.1' && $(PIP) --group build
	@$(PIP) --no-deps --no-build-isolation -e . $(patsubst %/pyproject.toml,-e %,$(wildcard distributions/*/pyproject.toml))
	@touch $@

# Weights, only for the demo with --real; the download says how large they are.
$(VENV)/smollm2/config.json: | $(VENV)/.demo $(VENV)/.real
	@$(PY) -m kvproto_reference.smollm2 $(VENV)/smollm2

# Programs of Debian that tests run, out of their packages alone: nothing is installed, and no service starts.
$(VENV)/debian/usr/bin/%:
	@command -v $(@F) > /dev/null || { mkdir -p $(VENV)/debian && cd $(VENV)/debian && echo "fetching $(PACKAGE)" && \
	  apt-get download -qq $(PACKAGE) 2> /dev/null && dpkg -x $(PACKAGE)_*.deb .; } || true
$(VENV)/debian/usr/bin/etcd: PACKAGE = etcd-server
$(VENV)/debian/usr/bin/promtool: PACKAGE = prometheus

demo: $(VENV)/.demo $(if $(findstring --real,$(ARGS)),$(VENV)/smollm2/config.json)
	@$(PY) -m kvproto_reference.demo $(ARGS)

demo-gpu: $(VENV)/.demo $(VENV)/.gpu
	@$(PY) -m kvproto_reference.demo --transport cuda $(ARGS)

# Keep bytecode even if the environment says not to: otherwise each worker and each process of a test compiles everything.
test test-thorough quick: export PYTHONDONTWRITEBYTECODE =

test coverage: | $(VENV)/debian/usr/bin/etcd $(VENV)/debian/usr/bin/promtool

test: $(VENV)/.test
	@$(PY) -m pytest -n $(JOBS) -m "not thorough" $(ARGS)

# The rest: small runs of all benchmarks, candidates of the specification from end to end, and whether chaos, the live driver and `make prove` find faults.
test-thorough: $(VENV)/.test
	@$(PY) -m pytest -n $(JOBS) -m thorough $(ARGS)

quick: $(VENV)/.test
	@$(PY) -m pytest -n $(CORES) -m "not slow" $(ARGS)

# Files of deploy/: options, probes, alerts and panels beside what they name, by the schemas of Compose and Kubernetes, and
# each run in namespaces that stand for pods.
deploy-test: $(VENV)/.test $(VENV)/.deploy | $(VENV)/debian/usr/bin/etcd $(VENV)/debian/usr/bin/promtool
	@$(PY) -m pytest tests/examples/test_deploy.py tests/examples/test_alerts.py $(ARGS)

# Every engine of four pairs is restarted under load, and one killed by -9 each minute, for ten minutes; the summary says what was lost.
rolling: $(VENV)/.demo
	@$(PY) -m kvproto_reference.router.rolling $(ARGS)

# Three engines that can do both copy pages, move a running request and change roles, under load (docs/moving.md).
moving: $(VENV)/.demo
	@$(PY) -m kvproto_reference.moving $(ARGS)

check: $(VENV)/.check
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check -q .
	@$(VENV)/bin/lint-imports --no-cache > $(VENV)/imports.txt || { cat $(VENV)/imports.txt; exit 1; }
	@$(VENV)/bin/mypy
	@$(PY) -m tools.house
	@$(PY) -m tools.specgen --check
	@$(PY) benchmarks/tables.py --check
	@$(PY) -m tools.layout_vectors --check

# The conformance suite on every testee, as far as its claim goes; a page for each, and one for all, in build/conformance.
# NIXL is for the live scenarios of staging slots.
conformance: $(VENV)/.demo $(VENV)/.nixl
	@test -e /usr/include/zmq.h || { echo "installing libzmq3-dev, for the engines in C"; apt-get install -y -qq libzmq3-dev > /dev/null 2>&1 || true; }
	@$(PY) -m tools.conformance $(ARGS)

# Does the suite notice what is wrong? Mutants of the registry and of code, and bugs that engines have had.
prove: $(VENV)/.test
	@PYTHONDONTWRITEBYTECODE= $(PY) -m tools.prove $(ARGS)

# The parts of `prove` that are not random: every fact of the registry, and every bug.
prove-quick: $(VENV)/.test
	@PYTHONDONTWRITEBYTECODE= $(PY) -m tools.prove bugs registry $(ARGS)

# The models in spec/v1/lifecycle, searched by spin (Debian's package).
check-model: $(VENV)/.check
	@command -v spin > /dev/null || { echo "installing spin"; apt-get install -y -qq spin > /dev/null 2>&1 || true; }
	@$(PY) -m tools.model

format: $(VENV)/.check
	@$(VENV)/bin/ruff check --fix -q .
	@$(VENV)/bin/ruff format .

# Without -q: with it, mkdocs drops its warnings before --strict counts them.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "the site is in build/site: open build/site/index.html, or run $(PY) -m mkdocs serve"

coverage: $(VENV)/.test $(VENV)/.coverage
	@$(PY) -m tools.coverage_figures $(ARGS) -- -n $(JOBS)

# Sdists and wheels of all distributions in dist/, with SBOMs, checksums and an index: built twice alike, and each tried
# in an empty environment of every Python that is here. CONTRIBUTING.md says how they are published.
release: $(VENV)/.release
	@$(PY) -m tools.release $(ARGS)

# Wheels alone, built once, on one Python, without the reference engines.
wheel-test: $(VENV)/.release
	@$(PY) -m tools.release --quick

# `kvproto describe` against the caches of every causal model of the installed transformers.
models: $(VENV)/.test
	@$(PY) -m tools.models $(ARGS)
	@$(PY) -m tools.classes --check
	@$(PY) -m tools.adversary --saved --seeds 20
	@$(PY) -m tools.adversary --first 1000 --seeds 2

# What a draft's cache is worth after a hand-over: docs/acceptance.md.
acceptance: $(VENV)/.demo $(VENV)/smollm2/config.json
	@$(PY) benchmarks/acceptance.py $(ARGS)

bench: $(VENV)/.demo $(VENV)/.bench
	@$(PY) benchmarks/codec.py $(ARGS)

# libkvproto: static, shared and as two files, in build/libkvproto; `make -C libkvproto install PREFIX=...` installs it.
lib:
	@$(MAKE) -s -C libkvproto all amalgamation

# The library under sanitizers: L1 and L2, out of memory, misused, installed, its interface as kept, fuzzed, and equal to kvproto.
lib-test: $(VENV)/.test
	@command -v abidiff clang > /dev/null || { echo "installing abigail-tools and clang"; apt-get install -y -qq abigail-tools clang > /dev/null 2>&1 || true; }
	@$(PY) -m pytest -n $(JOBS) tests/library tests/conformance/test_testees.py -k "not rust and not javascript and not perl and not core" -m "thorough or not thorough" $(ARGS)

# libFuzzer on the library for so many seconds; what it has learnt is kept in build/fuzz.
lib-fuzz:
	@mkdir -p build/fuzz/seeds && clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Ilibkvproto/include \
	  -o build/fuzz/library libkvproto/fuzz/fuzz.c libkvproto/src/kvproto.c
	@build/fuzz/library -max_total_time=$(or $(SECONDS),60) -max_len=6000 -artifact_prefix=build/fuzz/ build/fuzz/seeds

# What the library's interface is from now on, after an addition to it.
lib-abi: $(VENV)/.test
	@$(PY) -m tests.library.abi

# The crate in Rust: built without std too, tested on every vector, linted, documented, packaged; and the testee on top of it.
crate: CARGO = cd crates/kvproto && CARGO_TARGET_DIR=$(CURDIR)/build/crate RUSTFLAGS="-D warnings" RUSTDOCFLAGS="-D warnings" cargo
crate: $(VENV)/.demo
	@command -v cargo > /dev/null || { echo "installing cargo"; apt-get install -y -qq cargo > /dev/null 2>&1; } || { echo "make crate needs cargo, from rustup or from Debian"; exit 1; }
	@$(CARGO) build -q --offline --no-default-features
	@$(CARGO) test -q --offline
	@cargo clippy --version > /dev/null 2>&1 || { echo "left out for want of clippy"; exit 0; } && $(CARGO) clippy -q --offline --all-targets
	@cargo fmt --version > /dev/null 2>&1 || { echo "left out for want of rustfmt"; exit 0; } && $(CARGO) fmt --check
	@$(CARGO) doc -q --offline --no-deps
	@$(CARGO) package -q --offline --allow-dirty
	@rustc --edition 2021 -O --crate-type rlib --crate-name kvproto -o build/crate/libkvproto.rlib crates/kvproto/src/lib.rs
	@rustc --edition 2021 -O --extern kvproto=build/crate/libkvproto.rlib -o build/crate/testee conformance/testees/rust/testee.rs
	@$(PY) -m kvproto_conformance run -- build/crate/testee

# kvproto, libkvproto and the crate in Rust on worlds and frames of an adversary, for as long as one likes.
equality: $(VENV)/.test
	@$(PY) -m tools.equality $(ARGS)

fuzz: $(VENV)/.test $(VENV)/.fuzz
	@$(PY) -m tests.fuzz.run $(or $(SECONDS),60)

# vLLM and SGLang themselves, on the CPU, in a separate environment: compares their pools with `kvproto describe --engine`,
# and has the engines hand prompts over to each other through integrations/.
engines: $(VENV)/.demo $(VENV)/.jax $(VENV)/smollm2/config.json
	@tools/engines/install.sh .engines
	@$(PY) -m tools.engines

# The demo with --real, and again with one bit flipped on the way.
demo-real: $(VENV)/.demo $(VENV)/smollm2/config.json
	@$(PY) -m tests.demo.real

# Engines in separate processes, with faults of every kind (docs/chaos.md); about three minutes.
chaos: $(VENV)/.test
	@$(PY) -m kvproto_reference.chaos --seeds $(or $(SEEDS),0..59) --jobs 2 $(ARGS)

# The real Source and Sink in one thread, in a world that one seed decides (docs/simulation.md); SEEDS=17 ARGS=--trace replays.
simulate: $(VENV)/.test
	@$(PY) -m tests.simulation $(or $(SEED),$(SEEDS),0..999) $(ARGS)

# Faults planted one at a time, each of which its shortest story must show; without ARGS=--replay they are sought anew.
simulate-faults: $(VENV)/.test
	@$(PY) -m tests.simulation.planting $(or $(ARGS),--replay)

wild: $(VENV)/.test
	@$(PY) -m tests.plan.wild $(or $(SECONDS),60)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
