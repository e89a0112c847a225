# Shortcuts; each target is one or two plain commands that can be typed by hand.
.PHONY: setup checks docs site quick test pretend-cuda nightly release train eval clean

BIN := .venv/bin

setup:
	bash scripts/setup.sh --dev

checks: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_training_config.py --check
	$(BIN)/python scripts/make_from_verl.py --check
	$(BIN)/python scripts/make_site.py

# TRAINING_CONFIG.md, from the docstrings in verl/config/ and the values in configs/; docs/from_verl_options.md and the tables of from_trl.md, from verl/cli/.
docs: setup
	$(BIN)/python scripts/make_training_config.py
	$(BIN)/python scripts/make_from_verl.py

# The pages as a searchable site, build/site/index.html, with an environment of its own; a broken link is an error.
site: build/docs
	build/docs/bin/python scripts/make_site.py
build/docs: requirements/docs.txt
	python3 -m venv --clear build/docs
	build/docs/bin/python -m pip install -q -r requirements/docs.txt
	touch build/docs

# Three tiers: without processes, what continuous integration runs, and what takes minutes a test.
quick:
	bash scripts/test.sh --quick

test:
	bash scripts/test.sh

# The code for GPUs, without one; with -m nightly the wheels of vLLM too (docs/gpu.md).
pretend-cuda:
	bash scripts/test.sh tests/pretend_cuda

nightly:
	bash scripts/test.sh -m nightly

# Before a tag: the checks, every tier, and the sdist and wheel in dist/. It tags nothing.
release: checks
	bash scripts/test.sh
	bash scripts/test.sh -m nightly
	rm -rf dist
	$(BIN)/python setup.py -q sdist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@echo "dist/ is ready; tag it v$$($(BIN)/python setup.py --version)"

train:
	bash train.sh

eval:
	bash eval.sh

# Caches and build leftovers only; the environment and the outputs of runs stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
