"""Configs that load, and the message of each that does not (refusals.txt)."""

import re
from dataclasses import FrozenInstanceError, asdict
from functools import partial

import pytest

from tests.tables import cases
from verl.config import CONFIG_DIR, ConfigError, PPOConfig, SFTConfig, load, load_config
from verl.config.load import compose_config, parse_config
from verl.config.rewards import RewardManagerConfig
from verl.config.signal import Rejection


@pytest.mark.slow
def test_every_yaml_loads():
    for path in CONFIG_DIR.glob("*/*.yaml"):
        if path.parent.name not in ("evaluation", "experiment"):  # test_evaluation.py and tests/recipes have these
            load_config(PPOConfig, "ppo_trainer", [f"{path.parent.name}={path.stem}"])
    assert {path.stem for path in CONFIG_DIR.glob("*.yaml")} == {"ppo_trainer", "sft", "evaluation", "analysis"}
    assert load_config(SFTConfig, "sft").data.messages_key == "messages"


CORRECTION = "algorithm.rollout_correction"
GPG = "actor.bypass_mode=true actor.policy_loss=gpg"


def difference(first: PPOConfig, second: PPOConfig, group: str) -> dict[str, object]:
    """The options of a group that have another value in the second config, with that value."""
    old, new = asdict(getattr(first, group)), asdict(getattr(second, group))
    return {name: new[name] for name in old if old[name] != new[name]}


def test_released_code_differs_in_known_defects():
    shipped = load_config(PPOConfig, "ppo_trainer", ["experiment=verl_grpo"])
    released = load_config(PPOConfig, "ppo_trainer", ["experiment=released_code"])
    differing = partial(difference, shipped, released)
    defects = {"max_seq_len", "metrics_dtype", "on_nonfinite"}
    assert differing("calculator").keys() == defects | {"metric_indices", "diff_stride"}
    assert differing("reward_score").keys() == {"mode"}
    defects = {"phi_without_reward", "baseline_start", "shaping_placement"}
    # The same indicators in another order.
    assert differing("reward_manager").keys() == defects | {"aux_fix", "indicator_names", "w_explore", "w_exploit"}
    weights = {"Effective Rank diff 2": (0.0, 0.0), "Effective Rank diff": (0.0, 1.0), "Effective Rank": (1.0, 0.0)}
    for side in (shipped.reward_manager, released.reward_manager):
        pairs = zip(side.w_explore, side.w_exploit, strict=True)
        assert dict(zip(side.indicator_names, pairs, strict=True)) == weights
    assert differing("actor") == differing("algorithm") == differing("rollout") == {}


def test_stopping_early_needs_validation(refused):
    for override in ("data.val_files=[]", "trainer.test_freq=-1"):
        with refused("trainer.stop_at_sequence_probability=0.5: ... set data.val_files..."):
            load_config(SFTConfig, "sft", ["trainer.stop_at_sequence_probability=0.5", override])


def test_what_an_engine_and_a_model_may_be_told_goes_through():
    overrides = ["+rollout.engine_kwargs.additional_config.a.b=1", "+rollout.engine_kwargs.block_size=32"]
    overrides += ["+model.override_config.rope_scaling={rope_type:yarn,factor:4.0}", "rollout.stop=[x,'\n\n']"]
    config = load_config(PPOConfig, "ppo_trainer", [*overrides, "rollout.min_p=0.1", "algorithm=gae"])
    assert config.rollout.engine_kwargs == {"additional_config": {"a": {"b": 1}}, "block_size": 32}
    assert config.model.override_config == {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert config.critic.model.override_config == config.model.override_config
    assert config.rollout.train_kwargs.min_p == 0.1 and config.rollout.stop == ["x", "\n\n"]


@pytest.mark.parametrize(
    ("epochs", "limit", "expected"),
    [
        (10, 80, "80 steps: trainer.total_training_steps=80 comes before trainer.total_epochs=10 (210 steps, 21 each)"),
        (2, 80, "42 steps: trainer.total_epochs=2 (42 steps, 21 each) before trainer.total_training_steps=80"),
        (2, 42, "42 steps: trainer.total_epochs=2 (42 steps, 21 each)"),
        (2, 0, "42 steps: trainer.total_epochs=2 (42 steps, 21 each)"),
    ],
)
def test_one_line_says_what_ends_the_run(epochs: int, limit: int, expected: str):
    overrides = [f"trainer.total_epochs={epochs}", f"trainer.total_training_steps={limit}"]
    note = load_config(PPOConfig, "ppo_trainer", overrides).trainer.length_note(21)
    assert note == f"the run ends after {expected}"


@pytest.mark.parametrize(
    ("rules", "bounds", "expected"),
    [
        ("null", "null", []),
        ("token_k1", "2.0", [("token_k1", 0.5, 2.0)]),
        ("seq_mean_k1", "'0.999_1.001'", [("seq_mean_k1", 0.999, 1.001)]),
        ("'token_k1,seq_max_k2'", "'0.25_4.0,2'", [("token_k1", 0.25, 4.0), ("seq_max_k2", None, 2.0)]),
        ("[token_k2,seq_sum_k3]", "0.5", [("token_k2", None, 0.5), ("seq_sum_k3", None, 0.5)]),
    ],
)
def test_rejection_rules_are_written_as_in_verl(rules: str, bounds: str, expected: list[Rejection]):
    config = load_config(
        PPOConfig, "ppo_trainer", [f"{CORRECTION}.rollout_rs={rules}", f"{CORRECTION}.rollout_rs_threshold={bounds}"]
    )
    assert config.algorithm.rollout_correction.rejections == expected


def test_config_values_are_coerced_once():
    config = load_config(PPOConfig, "ppo_trainer", ["rollout.temperature=2", "trainer.logger=wandb"])
    assert config.rollout.temperature == 2.0 and type(config.rollout.temperature) is float
    assert config.trainer.logger == ["wandb"]
    with pytest.raises(FrozenInstanceError):
        config.actor.optim.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "before", "in_update"),
    [
        ("", True, True),
        ("actor.bypass_mode=true", False, False),
        ("actor.bypass_mode=true calculator.metric_indices_add=[avg_logits_entropy]", True, False),
        ("actor.bypass_mode=true calculator.source=actor", True, False),
        (f"actor.bypass_mode=true {CORRECTION}.rollout_token_veto_threshold=1e-4", True, False),
        ("actor.bypass_mode=true algorithm=optimal_token_baseline", True, False),
        (f"{GPG} {CORRECTION}.rollout_is=token", False, False),
        (f"{GPG} {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_batch_normalize=true", True, False),
        (f"{CORRECTION}.rollout_is=sequence model.lora.rank=4 algorithm=gae", True, True),
        (f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_batch_normalize=true", True, False),
        ("calculator.metric_indices_add=[avg_logits_entropy]", True, False),
        ("calculator.source=actor", True, False),
        (f"{CORRECTION}.rollout_token_veto_threshold=1e-4", True, False),
        ("algorithm=optimal_token_baseline", True, False),
        ("algorithm.use_kl_in_reward=true", True, False),
        ("algorithm=gae algorithm.use_pf_ppo=true", True, False),
        ("model.lora.rank=4 model.lora.dropout=0.1", True, False),
    ],
)
def test_responses_are_scored_where_something_needs_it(options: str, before: bool, in_update: bool):
    config = load_config(PPOConfig, "ppo_trainer", options.split())
    assert (config.needs_logprobs, config.first_update_scores) == (before, in_update)


def test_text_with_nul_is_refused(refused):
    tree = compose_config(PPOConfig, "ppo_trainer")
    tree.trainer.default_local_dir = "a\0b"
    with refused("...must not hold the character NUL..."):
        parse_config(PPOConfig, tree)


@pytest.mark.parametrize(("overrides", "message"), cases("config/refusals.txt"))
def test_a_wrong_option_is_named_with_its_value_and_fix(overrides: str, message: str, refused):
    with refused(f"{message}..."):
        load_config(PPOConfig, "ppo_trainer", overrides.split())


def test_a_group_that_is_made_in_code_is_checked_too():
    values = load_config(PPOConfig, "ppo_trainer").reward_manager.__dict__
    for option, (value, message) in {
        "kappa": (0.5, "kappa=0.5: must be at least 1"),
        "w_explore": ([], "w_explore=[]: needs one weight per indicator"),
        "hypothesis_type": ("PlanC", "hypothesis_type='PlanC': must be one of PlanB, FixTwo, FixOne"),
    }.items():
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            RewardManagerConfig(**values | {option: value})


# Two workers hold the sequence together; a critic alone needs no group; nothing is shaped.
ALLOWED = """\
actor.use_dynamic_bsz=true model.use_remove_padding=true model.ulysses_sequence_parallel_size=2 \
data.max_prompt_length=80 data.max_response_length=120 actor.ppo_max_token_len_per_gpu=100
rollout.n=1
experiment=grpo calculator.enable=false"""


@pytest.mark.parametrize("overrides", ALLOWED.splitlines())
def test_what_a_similar_config_may_do(overrides: str):
    load_config(PPOConfig, "ppo_trainer", overrides.split())


@pytest.mark.parametrize(
    ("overrides", "mistakes"),
    [
        (
            "actor.optim.lr=-1 rollout.n=0 data.train_batch_size=x trainer.nnodes=0",
            ["data.train_batch_size='x'", "actor.optim.lr=-1.0", "rollout.n=0", "trainer.nnodes=0"],
        ),
        # An inherited value's mistake is reported once.
        (
            "actor.micro_batch_size_per_gpu=0 critic.micro_batch_size_per_gpu=-1",
            ["actor.micro_batch_size_per_gpu=0", "critic.micro_batch_size_per_gpu=-1"],
        ),
        # Between options, too.
        ("actor.ppo_mini_batch_size=64 trainer.critic_warmup=1", ["actor.ppo_mini_batch_size=64"]),
        (
            "actor.ppo_mini_batch_size=64 rollout.tensor_parallel_size=3",
            ["actor.ppo_mini_batch_size=64", "rollout.tensor_parallel_size=3"],
        ),
    ],
)
def test_independent_mistakes_are_reported_together(overrides: str, mistakes: list[str]):
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, "ppo_trainer", overrides.split())
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == mistakes


def test_notes_on_lengths_are_of_the_runs_own_model(capsys: pytest.CaptureFixture[str], monkeypatch):
    def notes(*overrides: str) -> list[str]:
        load.fitting.cache_clear()
        load._FITTED.clear()
        load_config(PPOConfig, "ppo_trainer", [*overrides])
        return capsys.readouterr().err.splitlines()

    # Hydra evaluates the preset's lengths for the embedded model, too, before it applies the command line.
    assert notes("preset=small", "model.path=org/model") == notes("preset=foreign", "model.path=org/model") == []
    assert notes("preset=foreign") == [
        "note: data.max_prompt_length=170 of the preset's 512: the model takes 512 tokens in all",
        "note: data.max_response_length=341 of the preset's 1024: the model takes 512 tokens in all",
    ]
    # What the command line sets is no preset's.
    assert len(notes("preset=foreign", "data.max_prompt_length=99")) == 1
