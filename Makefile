# Shortcuts; each target is one or two plain commands that can be typed by hand.
.PHONY: setup checks docs quick test pretend-cuda nightly train eval clean

BIN := .venv/bin

setup:
	bash scripts/setup.sh --dev

checks: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_training_config.py --check
	$(BIN)/python scripts/make_from_verl.py --check

# TRAINING_CONFIG.md, from the docstrings in verl/config/ and the values in configs/; docs/from_verl.md, from verl/cli/.
docs: setup
	$(BIN)/python scripts/make_training_config.py
	$(BIN)/python scripts/make_from_verl.py

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

train:
	bash train.sh

eval:
	bash eval.sh

# Caches and build leftovers only; the environment and the outputs of runs stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
