"""What the shipped experiments and presets are about, beyond loading (test_load.py)."""

import pytest

from verl.config import PPOConfig, load_config


def load(*overrides: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", list(overrides))


def test_dapo():
    config = load("experiment=dapo")
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.2, 0.28)
    assert not config.uses_reference
    assert config.actor.loss_agg_mode == "token-mean"
    assert config.algorithm.filter_groups.enable
    assert config.reward_score.overlong_buffer.enable
    # A fifth of the response in either case.
    assert (config.data.max_response_length, config.reward_score.overlong_buffer.len) == (160, 32)
    paper = load("preset=paper", "experiment=dapo")
    assert (paper.data.max_response_length, paper.reward_score.overlong_buffer.len) == (1536, 307)


def test_the_papers_settings():
    config = load("preset=paper")
    actor, signal, trainer = config.actor, config.reward_manager, config.trainer
    assert (config.rollout.n, config.data.train_batch_size, actor.ppo_mini_batch_size) == (4, 48, 24)
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.lr_warmup_steps) == (5e-7, "constant", 0)
    assert (actor.kl_loss_coef, actor.entropy_coeff) == (0.001, 0.001)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 1536)
    assert (config.calculator.diff_stride, config.calculator.metric_indices) == (40, [1, 2])
    assert (signal.kappa, signal.gain, signal.ema_alpha, signal.aux_fix) == (2.0, 2.0, 0.3, True)
    assert (trainer.total_epochs, trainer.total_training_steps) == (2, 161)
    assert (trainer.save_freq, trainer.test_freq) == (40, 10)
    assert (config.reward_score.mode, config.model.param_dtype) == ("independent", "bfloat16")


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize(
    ("experiment", "estimator", "shaped"),
    [
        *(("grpo", "grpo", False), ("verl_grpo", "grpo", True), ("ppo", "gae", False), ("verl_ppo", "gae", True)),
        *(("dapo", "grpo", False), ("released_code", "grpo", True)),
    ],
)
def test_presets_fit_every_experiment_and_machine(experiment: str, estimator: str, shaped: bool, gpus: int):
    config = load("preset=paper", f"experiment={experiment}", "model=qwen2.5_7b", f"trainer=gpus{gpus}")
    assert (config.trainer.experiment_name, config.trainer.world_size) == (experiment, gpus)
    assert (config.algorithm.adv_estimator, config.reward_manager.active) == (estimator, shaped)
    assert config.model.path == config.critic.model.path == "Qwen/Qwen2.5-7B"
