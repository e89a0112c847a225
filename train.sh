#!/usr/bin/env bash
# Trains a policy with rank-shaped GRPO. Arguments are Hydra overrides, for example:
#   bash train.sh                                   the embedded default: a tiny model on arithmetic, on any machine
#   bash train.sh experiment=grpo                   the same without rank shaping
#   bash train.sh model.path=Qwen/Qwen2.5-1.5B data.train_files=... data.val_files=...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

bash scripts/setup.sh
python=.venv/bin/python

# The embedded model and data are made once, unless the arguments name others.
if [[ " $* " != *" data.train_files="* && ! -f data/arithmetic/test.parquet ]] ||
  [[ " $* " != *" model.path="* && ! -f data/arithmetic/sft_val.parquet ]]; then
  "$python" scripts/prepare_data.py arithmetic --out data/arithmetic
fi
if [[ " $* " != *" model.path="* && ! -f data/tiny_model/config.json ]]; then
  "$python" scripts/make_tiny_model.py --out data/tiny_model --data data/arithmetic
fi

exec "$python" -m verl.trainer.main_ppo "$@"
