#!/usr/bin/env bash
# Trains a policy with rank-shaped GRPO. Arguments are Hydra overrides, Hydra's own flags, flags of the paper's release
# (TRAINING_CONFIG.md lists all three), or veRL's options (docs/from_verl.md), for example:
#   bash train.sh                          the default: the tiny model and the arithmetic task of data/, on any machine
#   bash train.sh experiment=grpo          the same without rank shaping
#   bash train.sh --cfg job                print the configuration and run nothing
#   bash train.sh -m reward_manager.hypothesis_type=PlanB,FixTwo,FixOne     one run after another
#   bash train.sh preset=paper model=qwen2.5_7b trainer=gpus8 'data.train_files=[...]' 'data.val_files=[...]'
#   bash train.sh --model_name Qwen/Qwen2.5-1.5B --dataset_name gsm8k --rollout_n 4
# On several machines: docs/multinode.md.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # the working directory stays: relative paths begin there

source "$checkout/scripts/environment.sh"
source "$checkout/scripts/cluster.sh"
find_python
submit_elsewhere train.sh "$@"
run_on_cluster verl.trainer.main_ppo "$@"
