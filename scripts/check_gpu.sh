#!/usr/bin/env bash
# What to run first on a GPU machine: whether the GPU path works there, in stages (docs/gpu.md).
#   bash scripts/check_gpu.sh                      all stages, one line each; exit code 1 if any failed
#   bash scripts/check_gpu.sh --list               their names
#   bash scripts/check_gpu.sh --stage train        one of them, by name or number
#   bash scripts/check_gpu.sh --device cpu --toy   the same on a CPU, at toy size
# Installs nothing. Python is that of VERL_ENV, of the active environment, of .venv, or the first on PATH, in this order.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for folder in "${VERL_ENV:-}" "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" .venv; do
  if [[ -n $folder && -x $folder/bin/python ]]; then
    exec "$folder/bin/python" scripts/check_gpu.py "$@"
  fi
done
exec python3 scripts/check_gpu.py "$@"
