#!/usr/bin/env bash
# Runs the tests in .venv, which it makes first if needed. Arguments go to pytest: scripts/test.sh -k metrics -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev
# Another environment's packages must not leak in.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE=1
# Threads of tests that run at the same time would wait for each other, busily.
export OMP_NUM_THREADS=1
# Where a test asks for two threads all the same, they sleep while they wait.
export OMP_WAIT_POLICY=passive
# Three at a time on two cores, as tests wait for processes to start; a file in one piece. In order, for by default the
# files with the fewest tests come last, and these take longest.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
