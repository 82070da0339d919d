# The environment is .venv, from requirements.lock alone; every target makes it when it is missing or outdated.
# What Spark needs is added from requirements-spark.lock. The benchmarks have .venv-bench, with other queues to measure beside.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto --dist loadgroup

python := .venv/bin/python
ready := .venv/.ready
# An environment whose Python is gone, as the system's was upgraded, is made anew: what its stamps say isn't so any more.
works = $(1)/bin/python -c 'import pip' 2>/dev/null
$(shell for env in .venv .venv-bench .venv-lowest; do \
    $(call works,$$env) || rm -f $$env/.ready $$env/.spark-ready; done)
make_env = $(call works,$(1)) || $(PYTHON) -m venv --clear $(1)
# PySpark is half a gigabyte and of no use without Java, so it is installed where there is one, and to check types. On
# macOS there always is a java, which may only say that there is none.
spark := .venv/.spark-ready
java := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
spark_if_java := $(if $(filter test soak check,$(MAKECMDGOALS)),\
    $(if $(shell "$(java)" -version >/dev/null 2>&1 && echo yes),$(spark)))
# Python compiles what it imports; compiling everything beforehand takes longer than the downloads.
install := -m pip install --quiet --disable-pip-version-check --no-compile
# So what it compiles at the first import has to be kept, whatever the environment says: tests start many processes.
unexport PYTHONDONTWRITEBYTECODE
# The queues that the benchmarks run beside this one.
peers := awa-pg chancy dbos oban pgmq pgqueuer procrastinate
# What is locked, but for Spark and the benchmarks.
extras := asyncpg,cli,demo,embedded,fastapi,flask,pydantic,testing
comma := ,
compile := uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes --no-header \
    --no-annotate --no-emit-index-url --no-emit-find-links --quiet $(addprefix --extra ,$(subst $(comma), ,$(extras)))

.DEFAULT_GOAL := help
.PHONY: help test soak demo demo-spark example bench bench-full docs lint types mypy pyright check matrix lock clean peers-one-by-one

help:  ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(ready) $(spark_if_java)  ## run the tests; PYTEST_ARGS="-k fair" is handed to pytest
	$(python) -m pytest $(PYTEST_ARGS)

soak: $(ready) $(spark_if_java)  ## the random tests for longer: EXAMPLES=2000 of the state machine, SECONDS=60 of processes and faults
	FAIRQUEUE_TEST_EXAMPLES=$(or $(EXAMPLES),2000) FAIRQUEUE_TEST_SECONDS=$(or $(SECONDS),60) \
	    $(python) -m pytest -m soak -s

demo: $(ready)  ## see fair queueing at work; TENANTS=20 FILES=folder take other input
	$(python) -m fairqueue.demo $(if $(TENANTS),--tenants "$(TENANTS)") $(if $(FILES),--files "$(FILES)")

demo-spark: $(spark)  ## Parquet into the queue by Spark, workers, the archive, a report; needs Java
	$(python) -m examples.spark_pipeline

example: $(ready)  ## a shop with Flask, FastAPI and three workers on one database; WEB=5000 API=8000 choose ports
	$(python) -m examples.shop $(if $(WEB),--web $(WEB)) $(if $(API),--api $(API))

bench: .venv-bench/.ready  ## fairness and speed beside other queues, side by side: six minutes, into build/benchmarks; SCENARIOS="fairness spark" only these, OUT=DIR
	.venv-bench/bin/python -m benchmarks $(if $(OUT),--out "$(OUT)") $(SCENARIOS)

bench-full: .venv-bench/.ready  ## all of it, at full size: four and a half hours, into docs/benchmarks
	.venv-bench/bin/python -m benchmarks --full $(if $(OUT),--out "$(OUT)") $(SCENARIOS)

docs: $(ready)  ## the documentation as a site, with the API, in docs/_build
	$(python) -m sphinx -q -W --keep-going -c docs -d docs/_build/.doctrees . docs/_build
	@echo docs/_build/docs/index.html

lint: $(ready)  ## ruff: rules and format
	$(python) -m ruff check
	$(python) -m ruff format --check

types: $(spark)  ## mypy and pyright
	@$(MAKE) --no-print-directory --jobs=2 mypy pyright

mypy: $(spark)
	$(python) -m mypy

pyright: $(spark)
	$(python) -m pyright --pythonpath $(python)

check: lint types test  ## lint, types and test

# SQLAlchemy 2.0 leaves a connection open where a task is cancelled, which a later test would fail for.
matrix: $(ready) .venv-lowest/.ready  ## the tests on PostgreSQL 14 to 18 and on the lowest versions of what it needs
	.venv-lowest/bin/python -m pytest -W ignore::pytest.PytestUnraisableExceptionWarning $(PYTEST_ARGS)
	@versions=$$($(python) tools/postgres_versions.py --list) || exit; \
	for version in $$versions; do \
	    bin=$$($(python) tools/postgres_versions.py $$version) || exit; \
	    echo "PostgreSQL $$version"; \
	    FAIRQUEUE_PG_BIN=$$bin $(python) -m pytest $(PYTEST_ARGS) || exit; \
	done

lock:  ## renew the locks, requirements*.lock (needs uv); they name no host, so any index serves
	$(compile) --upgrade --output-file requirements.lock
	$(compile) --extra spark --constraint requirements.lock --upgrade --output-file requirements-spark.lock
	$(compile) --extra benchmarks --extra spark --constraint requirements-spark.lock --upgrade \
	    --output-file requirements-benchmarks.lock
	@! grep -n '://' requirements*.lock

clean:  ## remove what these targets made, but for docs/benchmarks: environments, servers, caches, the site, what demos left
	rm -rf .venv .venv-bench .venv-lowest .pg build docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -rf fairqueue-demo.png fairqueue-spark-demo

# Installing goes by hash; the project itself is built with the locked build backend, not one fetched for it.
.venv/.ready: requirements.lock pyproject.toml
	$(call make_env,.venv)
	$(python) $(install) --require-hashes -r requirements.lock
	$(python) $(install) --no-deps --no-build-isolation --editable .
	touch $@

$(spark): requirements-spark.lock $(ready)
	$(python) $(install) --require-hashes -r requirements-spark.lock
	touch $@

.venv-bench/.ready: requirements-benchmarks.lock pyproject.toml
	$(call make_env,.venv-bench)
	@rm -f .venv-bench/whole
	.venv-bench/bin/python $(install) --require-hashes -r requirements-benchmarks.lock && touch .venv-bench/whole || true
	@test -e .venv-bench/whole || $(MAKE) --no-print-directory peers-one-by-one
	.venv-bench/bin/python $(install) --no-deps --no-build-isolation --editable .
	@! test -e .venv-bench/whole || touch $@

# Where one of them can't be installed, as it has no wheel for this machine, the others are measured without it. Each run
# tries again, and says which is left out.
peers-one-by-one:
	.venv-bench/bin/python $(install) --require-hashes -r requirements.lock
	sed -n 's/^\([A-Za-z0-9._-]*==[^ ]*\).*/\1/p' requirements-benchmarks.lock >.venv-bench/pins
	@left=; for peer in $(peers); do \
	    .venv-bench/bin/python $(install) --constraint .venv-bench/pins $$peer || left="$$left $$peer"; \
	done; echo "What is locked for the benchmarks can't all be installed here. Left out:$${left:- none of the other queues}."

# But for what only the tests need: anyio's anyio_mode, stderr apart from stdout by click, a pyparsing without warnings for
# that Matplotlib; and what they run on is as new as can be.
.venv-lowest/.ready: pyproject.toml
	$(call make_env,.venv-lowest)
	uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '.[$(extras)]' \
	    'anyio>=4.12' 'click>=8.2' 'pyparsing>=3.1,<3.3'
	uv pip install --quiet --python .venv-lowest --group dev
	touch $@
