#!/usr/bin/env bash
# Trains a policy with rank-shaped GRPO. Arguments are Hydra overrides, for example:
#   bash train.sh                          the embedded default: a tiny model on arithmetic, on any machine
#   bash train.sh experiment=grpo          the same without rank shaping
#   bash train.sh --cfg job                prints the configuration and runs nothing
#   bash train.sh model.path=Qwen/Qwen2.5-1.5B 'data.train_files=[...]' 'data.val_files=[...]'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

bash scripts/setup.sh
python=.venv/bin/python

# The embedded data and model are made once, and only for a run that uses them.
own_data=no own_model=no
for argument in "$@"; do
  case $argument in
    data.train_files=*) own_data=yes ;;
    model.path=*) own_model=yes ;;
    --*) own_data=yes own_model=yes ;; # a question about the program, not a run
  esac
done
if [[ ($own_data == no || $own_model == no) && ! -f data/arithmetic/sft_val.parquet ]]; then
  "$python" scripts/prepare_data.py arithmetic --out data/arithmetic
fi
if [[ $own_model == no && ! -f data/tiny_model/config.json ]]; then
  "$python" scripts/make_tiny_model.py --out data/tiny_model --data data/arithmetic
fi

exec "$python" -m verl.trainer.main_ppo "$@"
