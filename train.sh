#!/usr/bin/env bash
# Trains a policy with rank-shaped GRPO. Arguments are Hydra overrides, Hydra's own flags, or flags of the paper's
# release (TRAINING_CONFIG.md lists all three), for example:
#   bash train.sh                          the embedded default: a tiny model on arithmetic, on any machine
#   bash train.sh experiment=grpo          the same without rank shaping
#   bash train.sh --cfg job                prints the configuration and runs nothing
#   bash train.sh -m reward_manager.hypothesis_type=PlanB,FixTwo,FixOne     one run after another
#   bash train.sh preset=paper model=qwen2.5_7b trainer=gpus8 'data.train_files=[...]' 'data.val_files=[...]'
#   bash train.sh --model_name Qwen/Qwen2.5-1.5B --dataset_name gsm8k --rollout_n 4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

bash scripts/setup.sh
python=.venv/bin/python

# A flag that cannot be translated ends the script here, with the translator's exit code.
mapfile -d '' -t overrides < <("$python" -m verl.cli.release_flags "$@")
wait "$!"

# The embedded data and model are made once, and only for a run that uses them.
own_data=no own_model=no
for override in "${overrides[@]}"; do
  case $override in
    data.train_files=*) own_data=yes ;;
    model.path=*) own_model=yes ;;
    model=tiny) ;;
    model=*) own_model=yes ;;
    --cfg | --cfg=* | -c | --info | --info=* | -i | --help | -h | --hydra-help | --version | --shell-completion | -sc)
      own_data=yes own_model=yes # a question about the program, not a run
      ;;
  esac
done
if [[ ($own_data == no || $own_model == no) && ! -f data/arithmetic/sft_val.parquet ]]; then
  "$python" scripts/prepare_data.py arithmetic --out data/arithmetic
fi
if [[ $own_model == no && ! -f data/tiny_model/config.json ]]; then
  "$python" scripts/make_tiny_model.py --out data/tiny_model --data data/arithmetic
fi

exec "$python" -m verl.trainer.main_ppo "${overrides[@]}"
