"""What the shipped experiments and presets set, against literal tables."""

from dataclasses import replace

import pytest

from verl.config import PPOConfig, SFTConfig, load_config
from verl.config.load import CONFIG_DIR


def load(*overrides: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", list(overrides))


# What a preset sets, whatever the experiment: longest response, prefix stride, buffer of overlong punishment, actor's
# and critic's learning rate, steps, score mode, precision; then entropy and loss aggregation, where no experiment sets
# them, and responses per prompt of the group estimators.
PRESETS = {
    "foreign": ((1024, 32, 204, 1e-6, 1e-5, 80, "mix", "bfloat16"), 0.0, "token-mean", 8),
    "small": ((128, 4, 25, 2e-5, 1e-5, 60, "mix", "bfloat16"), 0.0, "token-mean", 8),
    "embedded": ((160, 8, 32, 2e-4, 5e-4, 80, "mix", "float32"), 0.0, "token-mean", 8),
    "paper": ((1536, 40, 307, 5e-7, 1e-5, 160, "independent", "bfloat16"), 0.001, "seq-mean-token-mean", 4),
    "paper_4096": ((4096, 128, 819, 5e-7, 1e-5, 160, "independent", "bfloat16"), 0.001, "seq-mean-token-mean", 4),
}
# Estimator, add_reward, add_adv, clip range, KL loss, dynamic sampling, overlong punishment; then what it sets over
# every preset: score mode, entropy, loss aggregation, responses per prompt.
EXPERIMENTS = {
    "grpo": (("grpo", False, False, (0.2, 0.2), True, False, False), {}),
    "verl_grpo": (("grpo", False, True, (0.2, 0.2), True, False, False), {}),
    "ppo": (("gae", False, False, (0.2, 0.2), True, False, False), {"n": 1}),
    "verl_ppo": (("gae", False, True, (0.2, 0.2), True, False, False), {"n": 1}),
    "dapo": (("grpo", False, False, (0.2, 0.28), False, True, True), {"entropy": 0.0, "aggregation": "token-mean"}),
    "released_code": (("grpo", False, True, (0.2, 0.2), True, False, False), {"stride": 40, "mode": "independent"}),
    "released_code_later": (
        ("grpo", False, True, (0.2, 0.2), True, False, False),
        {"stride": 128, "mode": "independent"},
    ),
}


def test_the_tables_name_every_shipped_file():
    # preset=verl is compared with veRL's defaults in tests/cli/test_verl_options.py
    assert sorted([*PRESETS, "verl"]) == sorted(path.stem for path in (CONFIG_DIR / "preset").glob("*.yaml"))
    # Recipes are tried in tests/recipes/.
    assert set(EXPERIMENTS) <= {path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml")}


@pytest.mark.parametrize(
    ("experiment", "preset"),
    [*((name, "paper") for name in EXPERIMENTS), *(("dapo", name) for name in PRESETS if name != "paper")],
)
def test_experiments_with_presets(experiment: str, preset: str):
    config = load(f"preset={preset}", f"experiment={experiment}", "device=cuda", "model.path=hub/model")
    (length, stride, buffer, lr, critic_lr, steps, mode, dtype), entropy, aggregation, n = PRESETS[preset]
    signal, sets = EXPERIMENTS[experiment]
    actor, scores, manager = config.actor, config.reward_score, config.reward_manager
    assert signal == (
        config.algorithm.adv_estimator,
        manager.add_reward,
        manager.add_adv,
        actor.clip_range,
        # A small model's preset saves the reference.
        actor.use_kl_loss if preset != "small" else signal[4] and not actor.use_kl_loss,
        config.algorithm.filter_groups.enable,
        scores.overlong_buffer.enable,
    )
    assert (length, sets.get("stride", stride)) == (config.data.max_response_length, config.calculator.diff_stride)
    assert (buffer, lr) == (scores.overlong_buffer.len, actor.optim.lr)
    assert (critic_lr, steps) == (config.critic.optim.lr, config.trainer.total_training_steps)
    assert (sets.get("mode", mode), dtype) == (scores.mode, config.model.param_dtype)
    assert (sets.get("entropy", entropy), sets.get("n", n)) == (actor.entropy_coeff, config.rollout.n)
    assert sets.get("aggregation", aggregation) == actor.loss_aggregation
    assert config.trainer.experiment_name == experiment


@pytest.mark.parametrize(
    ("overrides", "lengths", "micro_batches", "stride", "buffer"),
    [
        ("preset=foreign model.path=hub/model", (512, 1024), (16384, 32768), 32, 204),
        ("preset=foreign model.path=hub/model data.max_response_length=20000", (512, 20000), (20512, 32768), 625, 4000),
        # The embedded model takes 512 tokens.
        ("preset=foreign", (170, 341), (16384, 32768), 10, 68),
        ("preset=small", (256, 128), (512, 4096), 4, 25),
        ("preset=small data.max_response_length=4000", (256, 4000), (4256, 4256), 125, 800),
        ("experiment=dapo data.max_response_length=16", (32, 16), (16384, 16384), 8, 3),
        ("experiment=dapo data.max_response_length=3", (32, 3), (16384, 16384), 8, 1),
    ],
)
def test_sizes_go_with_the_longest_response(overrides, lengths, micro_batches, stride, buffer):
    config = load(*overrides.split())
    actor = config.actor
    assert (config.data.max_prompt_length, config.data.max_response_length) == lengths
    assert (actor.ppo_max_token_len_per_gpu, actor.log_prob_max_token_len_per_gpu) == micro_batches
    assert (config.calculator.diff_stride, config.reward_score.overlong_buffer.len) == (stride, buffer)


@pytest.mark.parametrize(
    ("device", "processor", "cluster", "dtype"),
    [
        ("cpu", "flags : fpu avx2 avx512f", "", "float32"),
        ("cpu", "flags : fpu avx512_bf16", "", "bfloat16"),
        ("cpu", "Features : fp asimd bf16", "head:6379", "bfloat16"),
        ("cpu", "flags : fpu avx512f", "head:6379", "float32"),
        ("cuda", "flags : fpu", "", "bfloat16"),
        # Its machines may have GPUs.
        ("auto", "flags : fpu", "head:6379", "bfloat16"),
    ],
)
def test_a_pretrained_model_has_the_precision_of_its_device(device, processor, cluster, dtype, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name : some processor\n{processor}\n")
    monkeypatch.setattr("verl.config.load.PROCESSOR", file)
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    assert load("preset=foreign", f"device={device}").model.param_dtype == dtype


@pytest.mark.parametrize(
    ("override", "rate"), [("seed=1", 2e-3), ("model.path=my/pretrained", 1e-5), ("model=qwen2.5_1.5b", 1e-5)]
)
def test_fine_tuning_of_a_pretrained_model_has_its_learning_rate(override: str, rate: float):
    assert load_config(SFTConfig, "sft", [override]).optim.lr == rate


def test_a_pretrained_models_settings():
    foreign, small = load("preset=foreign"), load("preset=small")
    assert foreign.model.gradient_checkpointing and foreign.actor.use_dynamic_bsz and foreign.uses_reference
    assert small.model.shares_prompts and small.actor.use_dynamic_bsz and not small.uses_reference
    assert small.data.train_batch_size == small.actor.ppo_mini_batch_size == 8
    assert (small.rollout.dtype, small.rollout.temperature) == (small.model.param_dtype, 0.6)


def test_the_papers_settings():
    config = load("preset=paper")
    actor, signal, trainer = config.actor, config.reward_manager, config.trainer
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, config.data.max_prompt_length) == (48, 24, 512)
    assert (actor.optim.lr_scheduler_type, actor.optim.lr_warmup_steps, actor.kl_loss_coef) == ("constant", 0, 0.001)
    assert (config.rollout.temperature, config.calculator.metric_indices) == (1.0, [1, 2])
    assert (signal.kappa, signal.gain, signal.ema_alpha, signal.aux_fix) == (2.0, 2.0, 0.3, True)
    assert (trainer.total_epochs, trainer.save_freq, trainer.test_freq) == (2, 40, 10)


@pytest.mark.parametrize(
    ("overrides", "clip_range", "aggregation"),
    [
        (["actor.policy_loss=gspo"], (3e-4, 4e-4), "seq-mean-token-mean"),
        (["actor.policy_loss=gspo", "actor.clip_ratio_high=1e-3"], (3e-4, 1e-3), "seq-mean-token-mean"),
        (["actor.policy_loss=gspo", "preset=paper"], (3e-4, 4e-4), "seq-mean-token-mean"),
        (["actor.policy_loss=gspo", "actor.loss_agg_mode=token-mean"], (3e-4, 4e-4), "token-mean"),
        (["actor.policy_loss=cispo"], (1.0, 0.2), "token-mean"),  # MiniMax-M1: no lower bound
        (["actor.policy_loss=sapo"], (0.2, 0.2), "seq-mean-token-mean"),
        (["actor.policy_loss=gmpo"], (0.4, 0.4), "seq-mean-token-mean"),
        (["experiment=dapo"], (0.2, 0.28), "token-mean"),
        # A clip range of tokens, which no response reaches.
        (["experiment=dapo", "actor.policy_loss=gspo"], (0.2, 0.28), "token-mean"),
    ],
)
def test_a_policy_loss_brings_its_clip_range_and_aggregation(overrides, clip_range, aggregation):
    actor = load(*overrides).actor
    assert (actor.clip_range, actor.loss_aggregation) == (clip_range, aggregation)
    assert actor.clips_nothing == (overrides == ["experiment=dapo", "actor.policy_loss=gspo"])


@pytest.mark.parametrize(
    ("method", "field", "on_cpu", "on_cuda"),
    [("saves_in_background", "async_save", False, True), ("deals_by_counts", "deterministic", True, False)],
)
def test_null_is_decided_by_the_device(method: str, field: str, on_cpu: bool, on_cuda: bool):
    trainer = load().trainer
    assert getattr(trainer, field) is None
    assert (getattr(trainer, method)("cpu"), getattr(trainer, method)("cuda")) == (on_cpu, on_cuda)
    for wanted in (True, False):
        chosen = replace(trainer, **{field: wanted})
        assert getattr(chosen, method)("cpu") is getattr(chosen, method)("cuda") is wanted
