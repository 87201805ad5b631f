# Two commands matter: `make demo` shows the main job, `make test` proves it.
PYTHON ?= python3
CACHE ?= $(or $(IDLEGPU_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/idlegpu)
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.runtime $(VENV)/.dev
export IDLEGPU_CACHE := $(CACHE)
# Where it is set, each of hundreds of processes would compile again all that it imports.
unexport PYTHONDONTWRITEBYTECODE

UNIT := "not prometheus and not e2e and not gpu and not page"
# Tests with real parts wait half of their time, their servers compute in the other half.
REAL := -n 5 --dist loadfile
PARTS := "(prometheus or page or e2e) and not neighbours"
# The files that have such tests: each worker would import all the others too, for 6 s.
files = $(shell grep -rlE 'pytest\.mark\.($(1))\b' --include='test_*.py' tests)

.DEFAULT_GOAL := help
.PHONY: help demo test test-neighbours test-gpu check room cluster python checks format lint types imports unit coverage real repeated neighbours prometheus page e2e e2e-installed tools neighbour-tools bench day fuzz mutants graph pictures images arm64 lock clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "idlegpu needs Python 3.11 or newer; this is %s: set PYTHON=..." % sys.version.split()[0])'

announce-%: python
	@$(PYTHON) -m tests.announce $*

$(BIN)/python: | python
	@echo "installing into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# What the demo needs; the development tools come on top, for everything else. The lock files share no
# package, so two processes of pip install them at once; each keeps a core busy with long lists of releases.
# --no-deps: the lock files name everything, and pip would look for newer releases of what only an extra
# (coverage[toml]) asks for. --no-compile: Python compiles what it imports; compiling everything takes a
# third of the time.
$(VENV)/.runtime: requirements.txt pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --require-hashes -r requirements.txt
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --require-hashes -r requirements-dev.txt
	@touch $@

# Two processes compile what all test processes import: at the first run each of them would compile it.
# `make unit` shows errors.
$(VENV)/.compiled: $(DEV)
	@$(BIN)/pytest --collect-only -qq tests/extender >/dev/null & $(BIN)/pytest --collect-only -qq --ignore tests/extender >/dev/null; wait
	@touch $@

demo: $(VENV)/.runtime ## place stock GPU pods on a simulated fleet and say why (ONCE=1: end after the run)
	@$(BIN)/python -m simulation.demo $(if $(ONCE),--once)

check: $(if $(ROOM),room,announce-check checks) ## everything that needs no cluster, in 4 minutes (ROOM=core: one room, in seconds)

test: announce-test checks real ## make check, and tests with a real control plane, Prometheus and Chromium

test-neighbours: announce-test-neighbours neighbours ## install with kubectl and helm, run beside Karpenter, descheduler, cert-manager and the oldest Kubernetes; the images

# A package and its tests: extender/core and tests/extender/core, or agent and tests/agent. Property tests
# try few examples here; `make unit` tries all.
CODE = $(wildcard extender/$(ROOM) $(ROOM)) $(wildcard tests/extender/$(ROOM) tests/$(ROOM))

room: $(DEV)
	@$(if $(strip $(CODE)),,echo "no package or test folder is named $(ROOM)"; exit 2)
	@$(BIN)/ruff format --check --quiet $(CODE)
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/mypy $(CODE)
	@$(BIN)/pytest -q -n auto --dist worksteal --hypothesis-profile=quick -m $(UNIT) $(CODE)

# All at once, because the unit tests alone do not keep two cores busy.
checks: python
	@$(MAKE) --no-print-directory -j format lint types imports unit

format: $(DEV)
	@$(BIN)/ruff format --check .

lint: $(DEV)
	@$(BIN)/ruff check .

types: $(DEV)
	@$(BIN)/mypy

imports: $(DEV)
	@$(BIN)/lint-imports

unit: $(VENV)/.compiled ## tests that need neither a cluster nor a Prometheus
	@$(BIN)/pytest -n 6 --dist worksteal -m $(UNIT)

coverage: $(DEV) ## which lines and branches these tests miss; takes twice their time
	@$(BIN)/pytest -n auto --dist worksteal -m $(UNIT) --cov --cov-report=term:skip-covered

tools: $(DEV) ## build Kubernetes, kubectl, kwok and Prometheus into the cache; get Chromium
	@$(BIN)/python -m testkit.controlplane.tools
	@$(BIN)/python -m testkit.page.chromium

neighbour-tools: $(DEV) ## build helm, kube-controller-manager, Karpenter, cert-manager and others as well
	@$(BIN)/python -m testkit.controlplane.tools --neighbours

# Servers written in Go collect garbage less often: tests need their CPU, not their memory.
real repeated neighbours: export GOGC := 400

real: tools ## all that need real parts: the next three at once
	@$(BIN)/pytest $(REAL) -m $(PARTS) $(call files,prometheus|page|e2e)

repeated: tools ## these tests ten times in a row (RUNS=...) beside two busy loops
	@$(BIN)/python -m tests.repeated $(or $(RUNS),10) -- $(BIN)/pytest -q $(REAL) -m $(PARTS) $(call files,prometheus|page|e2e)

neighbours: neighbour-tools
	@$(BIN)/pytest $(REAL) -m neighbours $(call files,neighbours)

prometheus: tools ## tests against a real Prometheus
	@$(BIN)/pytest $(REAL) -m prometheus $(call files,prometheus)

page: tools ## tests of the page in a real headless Chromium
	@$(BIN)/pytest $(REAL) -m page $(call files,page)

e2e: tools ## tests with the real kube-scheduler, kube-apiserver and Prometheus
	@$(BIN)/pytest $(REAL) -m "e2e and not neighbours" $(call files,e2e)

e2e-installed: tools ## its scenarios as the manifests say, with the default and with the second scheduler
	@E2E_WAY=default $(BIN)/pytest $(REAL) -m e2e tests/e2e
	@E2E_WAY=second $(BIN)/pytest $(REAL) -m e2e tests/e2e

test-gpu: tools ## the node agent on a machine with an NVIDIA GPU, alone and in a cluster; prints its figures
	@$(BIN)/pytest -m gpu -s -v tests/agent tests/e2e/test_real_gpu.py

mutants: $(DEV) ## which small faults the tests of a room let pass (ROOM=core)
	@$(BIN)/python -m tests.mutants $(ROOM)

graph: $(DEV) ## lines, files, rooms, layers, imports and public names of each program
	@$(BIN)/python -m tests.graph

pictures: $(DEV) ## write docs/pictures from the demo's page, with Chromium
	@$(BIN)/python -m testkit.page.chromium
	@$(BIN)/python -m tests.pictures

cluster: announce-cluster $(DEV) ## leave the real control plane, Prometheus, extender and simulated fleet running
	@$(BIN)/python -m testkit.controlplane.cluster

bench: tools ## measure speed, memory, start, ingest, soak and kube-scheduler's rate; writes bench/results
	@$(BIN)/python -m bench

day: $(VENV)/.runtime ## simulate days with and without idlegpu, in 3 minutes (SEEDS=4); writes bench/results and a picture
	@$(BIN)/python -m bench.day $(if $(SEEDS),--seeds $(SEEDS))

fuzz: $(DEV) ## every decoder, guided by coverage, for MINUTES=10; Linux on x86-64 alone
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)

images: ## build the images and push them to REGISTRY=registry.example.com/team; without docker and podman write archives
	@images/push.sh "$(REGISTRY)"

arm64: $(DEV) ## build the images' trees for arm64 and run them in an emulator; needs apt with Debian 12
	@$(BIN)/python -m tests.images.arm64
	@IMAGES_PLATFORM=arm64 $(BIN)/pytest -s -v tests/images/test_trees.py

lock: $(DEV) ## write the lock files from pyproject.toml
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header pyproject.toml -o requirements.txt
	@$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header pyproject.toml --group dev --constraint requirements.txt $$(sed -n 's/^\([a-z][a-z0-9-]*\)==.*/--no-emit-package \1/p' requirements.txt) -o requirements-dev.txt
	@UV=$(BIN)/uv images/lock.sh

clean: ## remove the virtual environment (the cache of built tools stays)
	rm -rf $(VENV)
