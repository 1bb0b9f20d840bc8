# make demo [APPROVE=yes]   the whole night on this machine
# make test                 fast checks: lint, types, tests           make test-all   adds browser and killed nights
# make up / make down       start / end the servers of the demo       make demo-drift  shifted traffic, and what follows
SHELL := /bin/bash
PY := .venv/bin/python
TIDEFORGE := $(PY) -m tideforge.flows.cli
APPROVE ?= no
export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# A random MoE model, its search and its verification; the last line is the report. Nothing is served or shipped.
MOE := --endpoint deployments/endpoints/tiny-moe.yaml
bench-moe: RUN := moe-$(shell date +%Y%m%d-%H%M%S)
bench-moe: setup
	@$(PY) -m tideforge.engine.doubles moe .models/tiny-moe --layers 4
	@for node in ingest profile workload search verify; do \
	  $(TIDEFORGE) node $$node $(MOE) --run $(RUN) || exit 1; done
	@$(TIDEFORGE) report $(RUN) $(MOE) --json

# The engine's own figures, on a GPU or small on the CPU. PART=swap (decode, experiments, tiers, harm, steady, noise, ship) is one
# part, about 8 minutes a call, and goes on where its last call ended; PART=merge shows all results. ARGS='--vllm PYTHON' sets
# vLLM beside. Readings lie in .bench/results (.bench-cpu/results).
bench-engine: setup
	@$(PY) -m tideforge.engine.bench $(or $(PART),all) --device cuda --state .bench $(ARGS)

bench-engine-cpu: setup
	@$(PY) -m tideforge.engine.bench $(or $(PART),all) --device cpu --state .bench-cpu --seconds 90 $(ARGS)

# Cheats that must be caught and honest forwards that must pass, small on the CPU. ARGS='--only NAME', '--set unseen', '--device cuda', ...
redteam: setup
	@$(PY) -m tests.redteam.runner $(ARGS)

# Ingest and profile of generated logs, beside a bare scan and pandas. ARGS='--requests 100000000' is the whole (16 GB of disk).
bench-traffic: setup
	@$(PY) -m tideforge.data.bench_traffic $(ARGS)

# How soon drift is noticed and how often it is seen where there is none, on made traffic. ARGS=--freeze writes the thresholds anew.
bench-drift: setup
	@$(PY) -m tideforge.data.bench_drift $(ARGS)

.PHONY: bench-drift bench-traffic bench-engine bench-engine-cpu bench-moe redteam setup demo demo-drift up down test test-all lint

setup:
	@deployments/setup.sh

demo: setup
	@$(TIDEFORGE) demo --approve $(APPROVE)

demo-drift: setup
	@$(TIDEFORGE) demo-drift --approve $(APPROVE)

up: setup
	@$(TIDEFORGE) up

down: setup
	@$(TIDEFORGE) down

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Whole systems on a shared machine: what failed is tried once more, alone, and both runs are printed.
test: lint
	$(PY) -m pytest -m "not slow" || $(PY) -m pytest -m "not slow" --last-failed --last-failed-no-failures none

test-all: test
	$(PY) -m pytest -m slow --timeout 900 || $(PY) -m pytest -m slow --timeout 900 --last-failed --last-failed-no-failures none
