# make check test: what to run before each commit. VENV=path takes another environment.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.tula-dev-ready
DATA ?= data

export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := true

.PHONY: help env fix check security docs test test-slow test-all bench bench-serving bench-autolog accuracy accuracy-generalization cold-start dist distributed rank-faults readme reliability clean logging-speed pictures tutorial site end-to-end profiling-cost paper

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

env: $(READY)  ## make or reuse the environment with the dev extras

fix: $(READY)  ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix mlflow_tula tests benchmarks examples docs
	$(BIN)/ruff format mlflow_tula tests benchmarks examples docs

check: $(READY)  ## ruff, mypy strict, import contracts, generated files
	$(BIN)/ruff check mlflow_tula tests benchmarks examples docs
	$(BIN)/ruff format --check mlflow_tula tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive mlflow_tula
	$(BIN)/python docs/generate.py --check

security: $(READY)  ## bandit, the security tests, and pip-audit (asks PyPI's database)
	$(BIN)/python -m pytest tests/test_security.py
	$(BIN)/python benchmarks/reliability/audit.py

docs: $(READY)  ## docs/cli.md, MLproject and the README's tree, from the code itself
	$(BIN)/python docs/generate.py

pictures: $(READY)  ## docs/figures/method-*.svg from the project's own functions and records
	$(BIN)/python docs/pictures

tutorial: $(READY)  ## run docs/tutorial.md in a fresh folder; its real output and pictures (15 minutes)
	folder=$$(mktemp -d) && $(BIN)/python docs/commands.py docs/tutorial.md --folder $$folder \
		&& $(BIN)/python docs/screenshot.py $$folder && rm -r $$folder

site: $(READY)  ## the documentation as a site that opens offline, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: $(READY)  ## the fast tests, under 6 minutes
	$(BIN)/python -m pytest -m 'not slow and not long'

test-slow: $(READY)  ## several processes, real training, real `mlflow run`
	$(BIN)/python -m pytest -m 'slow and not long'

test-all: $(READY)  ## every test, those longer than CI allows as well
	$(BIN)/python -m pytest

bench: $(READY)  ## held-out step times on this machine, and what people wait for
	mkdir -p build
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/held_out.py --markdown build/held-out.md
	$(BIN)/python docs/sections.py docs/accuracy.md held-out=build/held-out.md

logging-speed: $(READY)  ## how long a profile of 12 probes takes to log, into docs/mlflow.md
	mkdir -p build
	$(BIN)/python benchmarks/logging_speed.py --markdown build/logging.md
	$(BIN)/python docs/sections.py docs/mlflow.md logging=build/logging.md

accuracy: $(READY)  ## DATA=folder [ADAPTDL=python]: docs/accuracy.md from published measurements
	mkdir -p build
	$(BIN)/python benchmarks/accuracy.py --data $(DATA) --markdown build/accuracy.md \
		$(if $(ADAPTDL),--adaptdl-python $(ADAPTDL))
	$(BIN)/python benchmarks/knee_rules.py --data $(DATA) --markdown build/knee.md
	$(BIN)/python benchmarks/search_curve.py --data $(DATA) --markdown build/search.md \
		--plot docs/search.png
	$(BIN)/python docs/sections.py docs/accuracy.md published=build/accuracy.md \
		knee=build/knee.md search=build/search.md
	sed -n '/^| claim/,/^$$/p' build/accuracy.md > build/errors.md
	$(BIN)/python docs/sections.py README.md errors=build/errors.md

distributed: $(READY)  ## root: two hosts over slow links on this machine, into docs/distributed.md
	mkdir -p build
	$(BIN)/python benchmarks/distributed.py measure
	$(BIN)/python benchmarks/distributed.py report --markdown build/distributed.md
	$(BIN)/python benchmarks/distributed.py measure --kind fsdp --sizes 8,32,64,128,512
	$(BIN)/python benchmarks/distributed.py measure --kind fsdp --sizes 8 --piece 200Mbitx4
	$(BIN)/python benchmarks/sharded.py --markdown build/sharded.md
	$(BIN)/python benchmarks/distributed.py measure --kind options --sizes 16 --piece 200Mbit
	$(BIN)/python benchmarks/accumulation.py --markdown build/accumulation.md
	$(BIN)/python benchmarks/uneven_ranks.py --markdown build/uneven.md
	$(BIN)/python docs/sections.py docs/distributed.md figures=build/distributed.md \
		sharded=build/sharded.md accumulation=build/accumulation.md uneven=build/uneven.md

rank-faults: $(READY)  ## root: twenty failing ranks and links (20 minutes), into docs/distributed.md
	mkdir -p build
	$(BIN)/python benchmarks/reliability/ranks.py --results build/rank-faults
	$(BIN)/python benchmarks/reliability/report.py --folder build/rank-faults \
		--markdown build/rank-faults.md
	$(BIN)/python docs/sections.py docs/distributed.md faults=build/rank-faults.md

bench-serving: $(READY)  ## served decisions with 1,000 predictors: latency, memory, new champions
	$(BIN)/python benchmarks/serving.py --markdown build/serving.md
	$(BIN)/python docs/sections.py docs/mlflow.md serving=build/serving.md

bench-autolog: $(READY)  ## what autolog adds to a step, fit over 2,000 runs, noise scale against the true one
	mkdir -p build
	$(BIN)/python benchmarks/autolog_overhead.py --markdown build/autolog-overhead.md
	$(BIN)/python benchmarks/observed_runs_speed.py --markdown build/observed-runs.md
	$(BIN)/python benchmarks/autolog_noise.py --markdown build/autolog-noise.md
	$(BIN)/python docs/sections.py docs/mlflow.md autolog-overhead=build/autolog-overhead.md \
		observed-runs=build/observed-runs.md
	$(BIN)/python docs/sections.py docs/accuracy.md autolog-noise=build/autolog-noise.md

readme: $(READY)  ## the README's decision and figure, from a real run in build/run
	rm -rf build/run && mkdir -p build/run
	cd build/run && MLFLOW_TRACKING_URI=sqlite:///mlflow.db $(abspath $(BIN))/tula main --model vgg11 \
		> run.txt
	cp $$(find build/run/mlartifacts -name overview.png) docs/overview.png
	(echo '```text'; sed -n '/^choice:/,$$p' build/run/run.txt; echo '```') > build/run/run.md
	$(BIN)/python docs/sections.py README.md run=build/run/run.md

accuracy-generalization: $(READY)  ## large-batch methods on three real datasets (an hour when new)
	$(BIN)/python benchmarks/generalization.py both

# Scripts that take --short and write build/reliability/<part>.jsonl (benchmarks/reliability/facts.py).
RELIABILITY := $(addprefix benchmarks/reliability/,crash.py stores.py soak.py fuzz.py determinism.py guards.py audit.py ranks.py)

reliability: $(READY)  ## [SHORT=1]: kill, starve, fuzz, soak; a full one fills docs/reliability.md
	rm -rf build/reliability && mkdir -p build/reliability
	-for part in $(RELIABILITY); do $(BIN)/python $$part $(if $(SHORT),--short); done
	$(BIN)/python benchmarks/reliability/report.py --markdown build/reliability/report.md; code=$$?; \
		$(if $(SHORT),,$(BIN)/python docs/sections.py docs/reliability.md \
		campaign=build/reliability/report.md;) exit $$code

cold-start: $(READY)  ## docs/accuracy.md: models predicted from the profiles of others
	mkdir -p build
	$(BIN)/python benchmarks/cold_start.py --markdown build/cold-start.md
	$(BIN)/python docs/sections.py docs/accuracy.md cold-start=build/cold-start.md

end-to-end: $(READY)  ## idle machine, half an hour when new: time to a target three ways, into docs/accuracy.md
	mkdir -p build
	$(BIN)/python benchmarks/end_to_end.py run
	$(BIN)/python benchmarks/end_to_end.py report --markdown build/end-to-end.md \
		--gains build/gains.md
	$(BIN)/python docs/sections.py docs/accuracy.md end-to-end=build/end-to-end.md
	$(BIN)/python docs/sections.py README.md gains=build/gains.md

profiling-cost: $(READY)  ## idle machine, ten minutes when new: partial against full search, live, into docs/accuracy.md
	mkdir -p build
	$(BIN)/python benchmarks/profiling_cost.py measure
	$(BIN)/python benchmarks/profiling_cost.py report --markdown build/profiling-cost.md
	$(BIN)/python docs/sections.py docs/accuracy.md profiling-cost=build/profiling-cost.md

dist: $(READY)  ## wheel and sdist in dist/, with setuptools of the environment, checked by twine
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

paper: $(READY)  ## idle machine, most of an hour when new: the paper's figures, into docs/paper.md
	mkdir -p build
	$(BIN)/python examples/paper/run.py --figure all --output-dir build/paper \
		--tracking-uri sqlite:///build/paper.db
	$(BIN)/python examples/paper/report.py --output-dir build/paper --markdown build/paper.md
	$(BIN)/python docs/sections.py docs/paper.md figures=build/paper.md

clean:  ## caches and build outputs, never the environment or the store
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
