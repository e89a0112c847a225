from verl.algorithms import kl
from verl.algorithms.advantages.grpo import grpo_advantages
from verl.algorithms.losses.ppo_clip import ppo_clip_loss
from verl.trainer.ppo import core_algos


def test_algorithms_are_found_by_name():
    assert core_algos.ADVANTAGE_ESTIMATORS["grpo"] is grpo_advantages
    assert core_algos.POLICY_LOSSES["ppo_clip"] is ppo_clip_loss
    assert core_algos.KL_ESTIMATORS["low_var_kl"] is kl.low_var_kl
