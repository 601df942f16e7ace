# Set-up, tests and checks. Everything lives in .venv; nothing outside this folder is changed.
# Plain POSIX sh and make 3.81, so that it runs on macOS as it is.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
LOG    := $(VENV).log
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-compile
LOCKS  := requirements.lock requirements-dev.lock requirements-cuda.lock requirements-cpu.lock

.PHONY: help setup demo test test-unit test-survival test-adversary test-tpm test-arm test-agents test-postgres test-sdk test-mlx test-page test-chaos test-verify test-long test-wheel test-image check docs lock sbom dist bench clean

help:
	@echo "make demo            set up, then run the bundled model over two sealed processes"
	@echo "make test            set up, then run the tests (5 to 9 minutes on 2 cores)"
	@echo "make test-unit       set up, then run the tests that need no socket, no process and no whole model (about a minute)"
	@echo "make test-survival   set up, then lose members of real clusters in every way and compare the text"
	@echo "make test-adversary  set up, then attack two members and print the table"
	@echo "make test-tpm        install a software TPM (apt-get), then enrol it and demand it of real members"
	@echo "make test-arm        install a cross compiler and qemu (apt-get), then compare the bits of ARM with this machine's"
	@echo "make test-agents     install four coding agents (npm, in .agents), and run each on a split model"
	@echo "make test-postgres   install PostgreSQL (apt-get), then run the tests of the coordinator's books on it"
	@echo "make test-sdk        install the AI SDK (npm), then ask a split model through its three providers"
	@echo "make test-page       install Chromium (apt-get) and playwright, then open the page in it"
	@echo "make test-mlx        install MLX (pip), then test its stages, and a route of hosts and MLX that loses members"
	@echo "make test-chaos      kill, stop and cut off random peers under load, for ten minutes; SECONDS=60 for one"
	@echo "make test-wheel      install the wheel in an empty environment and run the demo from it"
	@echo "make test-image      install buildah and debootstrap (apt-get), then build the image and run a cluster in it"
	@echo "make test-verify     cut a tiny model of each kind of layers, and the bundled ones, in every allowed way"
	@echo "make test-long       the tests that are marked long, and every generated example"
	@echo "make check           lint, format, types, architecture"
	@echo "make docs            build the documentation site in site/; fails on a broken link"
	@echo "make lock            resolve the dependencies anew and write their hashes; UPGRADE=1 takes the newest versions"
	@echo "make sbom            write dist/convoy.cdx.json, a CycloneDX bill of materials of what users install"
	@echo "make dist            write the wheel, the sdist and, with buildah or podman, the image convoy"
	@echo "make bench           measure the hop between two members"
	@echo "make setup           only set up .venv"
	@echo "make clean           remove .venv and what the set-up wrote"

setup: $(STAMP)

# The locks name every package by version and hash, so pip resolves nothing, and any index or mirror will do.
# A CPU build of torch is taken wherever pip is told of a place that has one; without it, pip says so in the log and takes
# PyPI's. Only a CUDA build needs the packages of requirements-cuda.lock; the build that pip took says so itself.
# The build backend is locked too, hence no isolated build environment.
# pip would compile all modules on one core. Some packages have files that no Python compiles, which harm nothing.
CUDA_BUILD := import importlib.metadata as m, sys; sys.exit(not any(r.startswith(("nvidia-", "cuda-")) for r in m.requires("torch")))
$(STAMP): pyproject.toml $(LOCKS) Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "error: Convoy needs Python 3.11, 3.12 or 3.13; $(PYTHON) is `$(PYTHON) --version 2>/dev/null || echo not there`" >&2; \
	  echo "hint: install one of them, or name it: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make a virtual environment: its venv or ensurepip module is missing" >&2; \
	  echo "hint: on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test "`$(BIN)/python --version 2>&1`" = "`$(PYTHON) --version`" || rm -rf $(VENV)
	@rm -f $(STAMP); : > $(LOG)
	@step() { \
	  echo "setup: $$1"; shift; "$$@" >> $(LOG) 2>&1 || { \
	  echo "error: set-up failed at: $$*" >&2; tail -n 20 $(LOG) >&2; echo "hint: the whole log is $(LOG)" >&2; exit 1; }; }; \
	step "1/3 `$(PYTHON) --version` in $(VENV)" $(PYTHON) -m venv $(VENV) && \
	echo "setup: 2/3 PyTorch, transformers, the HTTP server, tests (several minutes; tail -f $(LOG) shows the progress)" && \
	{ $(PIP) --require-hashes -r requirements-cpu.lock >> $(LOG) 2>&1 || true; } && \
	step "    every file is the one that the lock names" \
	  $(PIP) --require-hashes -r requirements.lock -r requirements-dev.lock && \
	{ ! $(BIN)/python -c '$(CUDA_BUILD)' || step "    the CUDA packages of this PyTorch" $(PIP) --require-hashes -r requirements-cuda.lock; } && \
	step "3/3 Convoy" $(PIP) --no-build-isolation --editable . && \
	step "    every package has what it needs" $(BIN)/python -m pip check && \
	{ $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >> $(LOG) 2>&1 || true; }
	@touch $(STAMP); echo "setup: done"

demo: setup
	@$(BIN)/convoy demo

# Some systems forbid Python to keep what it compiles. Then every process that a test starts compiles Convoy anew, and
# pytest rewrites the assertions of every file for each worker.
unexport PYTHONDONTWRITEBYTECODE

# Four at a time on two cores: much of it is waiting for processes. A file stays with one worker, so that its fixtures are
# made once. Files come in the order of their names: by the number of their tests, those of few and long ones would come last, and
# one worker would wait for the other. A worker that is killed is not replaced: its test has failed by name, and with
# a new one pytest-xdist would wait for ever.
PARALLEL := --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# For tests that start processes or cut models: how long each may take on a busy machine.
PATIENT := -o timeout=900 -o faulthandler_timeout=930

# --unit fails a test of these folders that opens a socket or starts a process. Such a test is marked `outside`.
UNIT := $(addprefix tests/,api/body config crypto engine fleet/books model/checkpoints model/sampling plan transport trust wire)
GUARD := --unit '$(UNIT)'
# These load whole models and compare their logits with the library's, a fifth of the time of all. `make test` runs them.
WHOLE := $(patsubst %,tests/model/checkpoints/formats/test_%.py,formats gguf gguf_families)
test-unit: setup
	@$(BIN)/python -m pytest $(GUARD) -m 'not long and not slow and not outside' $(addprefix --ignore ,$(WHOLE)) $(PARALLEL) $(UNIT)

# One run for all, so that each worker imports and collects once. `make check` runs the tests of the architecture.
test: setup
	@$(BIN)/python -m pytest $(GUARD) -m 'not long' --ignore tests/architecture --ignore tests/test_architecture.py $(PARALLEL)

# Losses take their time: a late step is a second, a member that comes back ten. Files are named lose_*. The tests of a file
# share members.
test-survival: setup
	@$(BIN)/python -m pytest -o 'python_files=lose_*.py' $(PATIENT) $(PARALLEL) tests/survival

# Its files are not called test_*, so that `make test` leaves them out.
test-adversary: setup
	@$(BIN)/python -m pytest -o 'python_files=attack_*.py' $(PATIENT) $(PARALLEL) tests/adversary

# Named like those above. An installation of PyTorch takes a minute or, on a busy machine, many.
test-wheel: setup
	@$(BIN)/python -m pytest -o 'python_files=install_*.py' -o faulthandler_timeout=0 -o timeout=1800 tests/wheel

# Named like those above. Not in `.ci/run`: it takes about five minutes. Exit 3 of the script: buildah or debootstrap cannot
# be installed here, and it has said why.
test-image: setup
	@sh tests/image/install.sh; code=$$?; \
	if [ $$code -eq 0 ]; then $(BIN)/python -m pytest -o 'python_files=image_*.py' -o faulthandler_timeout=0 -o timeout=1800 tests/image; \
	else exit $$((code == 3 ? 0 : code)); fi

# Named like those above. SEED repeats a disorder that was printed.
SECONDS ?= 600
test-chaos: setup
	@$(BIN)/python -m pytest -o faulthandler_timeout=0 -o 'python_files=chaos_*.py' tests/chaos --chaos-seconds $(SECONDS) $(if $(SEED),--chaos-seed $(SEED))

# Named like those above: files are verify_*. They are few, so their tests are shared out one by one. Every cut of a family
# whose layers are those of another is in `make test-long`.
VERIFY := -o 'python_files=verify_*.py' $(PATIENT) $(PARALLEL) --dist worksteal tests/evaluate
test-verify: setup
	@$(BIN)/python -m pytest -m 'not long' $(VERIFY)

# What `make test` leaves out to stay short: tests that are marked long, and generated examples. One run for both, as each
# worker imports every test file. SHARE=3 runs a third of them, chosen by their names: each has a quicker test of its kind
# in `make test`.
SHARE ?= 1
test-long: setup
	@$(BIN)/python -m pytest -m 'long or hypothesis' --share $(SHARE) --hypothesis-profile thorough $(PATIENT) $(PARALLEL)
	@$(if $(filter 1,$(SHARE)),$(BIN)/python -m pytest -m long $(VERIFY))

# Exit 3 of the script: the TPM cannot be installed here, and it has said why.
test-tpm: setup
	@sh tests/tpm/install.sh; code=$$?; \
	if [ $$code -eq 0 ]; then $(BIN)/python -m pytest -o 'python_files=tpm_*.py' tests/tpm; else exit $$((code == 3 ? 0 : code)); fi

# Named like those above: files are arm_*. Exit 3 of the script: this machine cannot run them, and it has said why.
test-arm: setup
	@sh tests/arm/install.sh; code=$$?; \
	if [ $$code -eq 0 ]; then $(PIP) -q --require-hashes -r tests/arm/zig.lock; $(BIN)/python -m pytest -o timeout=900 -o faulthandler_timeout=0 -o 'python_files=arm_*.py' tests/arm; \
	else exit $$((code == 3 ? 0 : code)); fi

# Named like those above: files are agent_*. Exit 3 of the script: this machine cannot run agents, and it has said why.
test-agents: setup
	@sh tests/agents/install.sh; code=$$?; \
	if [ $$code -eq 0 ]; then sh tests/agents/enter.sh $(BIN)/python -m pytest -o faulthandler_timeout=0 -o timeout=900 \
	  -o 'python_files=agent_*.py' tests/agents; else exit $$((code == 3 ? 0 : code)); fi

# A server of its own in a folder that goes with it. `make test` runs the same tests on SQLite, and all others of the fleet.
# Exit 3 of the script: it cannot be installed here, and it has said why.
test-postgres: setup
	@sh tests/fleet/postgres.sh $(BIN)/python -m pytest -k postgres tests/fleet; code=$$?; exit $$((code == 3 ? 0 : code))

# Exit 3 of the script: the packages cannot be installed here, and it has said why.
test-sdk: setup
	@sh tests/sdk/ai/install.sh; code=$$?; \
	if [ $$code -eq 0 ]; then $(BIN)/python -m pytest -o 'python_files=npm_*.py' tests/sdk; else exit $$((code == 3 ? 0 : code)); fi

# Named like those above: files are page_*. Exit 3 of the script: no browser can be installed here, and it has said why.
test-page: setup
	@sh tests/page/install.sh; code=$$?; \
	if [ $$code -eq 0 ]; then $(PIP) -q --require-hashes -r tests/page/page.lock; $(BIN)/python -m pytest -o 'python_files=page_*.py' $(PATIENT) tests/page; \
	else exit $$((code == 3 ? 0 : code)); fi

# The route's file is named mlx_*, as those above. Exit 3 of the script: MLX has no wheel here, and it has said why.
test-mlx: setup
	@sh tests/mlx/install.sh $(BIN)/python $(VENV)/mlx-lm; code=$$?; \
	if [ $$code -eq 0 ]; then PYTHONPATH="$(CURDIR)/$(VENV)/mlx-lm$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -o 'python_files=test_*.py mlx_*.py' $(PATIENT) tests/model/backends/mlx tests/mlx; \
	else exit $$((code == 3 ? 0 : code)); fi

# Not part of the set-up: both need what the set-up installs.
lock: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/lock.py $(if $(UPGRADE),--upgrade)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/lock.py --macs

sbom: setup
	@$(BIN)/python scripts/sbom.py

# The image's base comes from a registry. IMAGE_OPTIONS names another: --build-arg BASE=...
dist: setup
	@rm -f dist/convoy_llm-*
	@$(BIN)/python -m hatchling build
	@engine=$$(command -v buildah || command -v podman) || { echo "dist: no image: neither buildah nor podman is here"; exit 0; }; \
	cp requirements.lock requirements-cpu.lock requirements-cuda.lock dist/ && \
	$$engine build $(IMAGE_OPTIONS) -f deploy/container/Containerfile -t convoy dist

check: setup
	@$(BIN)/python scripts/lock.py --check
	@$(BIN)/python scripts/commands.py --check
	@$(BIN)/python scripts/settings.py --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_architecture.py tests/architecture
	@$(BIN)/python scripts/house.py

# The site's tools have an environment of their own: they share no package with what users run.
DOCS := .venv-docs
docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs --quiet build --strict
	@echo "docs: site/index.html"

$(DOCS)/.ready: requirements-docs.lock
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps --require-hashes -r requirements-docs.lock
	@touch $@

bench: setup
	@$(BIN)/convoy bench hop

clean:
	rm -rf $(VENV) $(LOG) $(DOCS) site
