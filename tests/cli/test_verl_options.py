"""veRL's command lines: every option of its trainer.

``verl_defaults.tsv`` holds them with their defaults, at veRL's commit b178a3cd56f58b2d502255daba591e92833930a7.
"""

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.cli.verl_command import ACTOR, CORRECTION, ROLLOUT, composed, leaves
from verl.cli.release_flags import FLAGS, translate
from verl.cli.values import FlagError
from verl.cli.verl_options import OPTIONS, SCHEMA, lookup
from verl.config import PPOConfig, load_config
from verl.config.errors import ConfigError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEFAULTS = dict(line.split("\t") for line in (HERE / "verl_defaults.tsv").read_text().splitlines())
HOME = os.environ["HOME"]
MODEL = "actor_rollout_ref.model.path=some/model"


def config_of(*arguments: str) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", translate(arguments))


def test_every_option_of_verls_trainer_is_translated_accepted_or_refused_by_name():
    assert len(DEFAULTS) == 556
    unknown = [key for key in DEFAULTS if lookup(key) is None]
    assert unknown == []


def test_every_row_names_options_of_ours_and_says_what_it_does():
    for key, option in (OPTIONS | FLAGS).items():
        ours = [name.removeprefix("++") for name in option.to]
        assert all(name in SCHEMA or name.rpartition(".")[0] in SCHEMA for name in ours), key
        assert {option.unless, option.read_with} <= OPTIONS.keys() | {""}, key
        assert option.describe() and not re.search(r"[\n|]|\$(ours|theirs|above)", option.describe()), key


def test_verls_defaults_change_nothing_in_the_preset_which_is_them():
    given = [f"{key}={value}" for key, value in DEFAULTS.items() if value != "???"]
    assert len(given) == 554
    ours, preset = (leaves(composed(*arguments)) for arguments in (given, ["preset=verl"]))
    # auto is cuda wherever there is a GPU
    assert {key: (ours[key], preset[key]) for key in preset if ours[key] != preset[key]} == {"device": ("cuda", "auto")}


def test_the_preset_holds_what_verl_does_without_an_option():
    found = leaves(composed("preset=verl"))
    assert (found["data.template"], found["reward_model.rule_weight"]) == ("chat", 0.0)
    assert (found["reward_manager.add_adv"], found["reward_manager.add_reward"]) == (False, False)
    assert config_of("preset=verl").model.path == f"{HOME}/models/deepseek-llm-7b-chat"


# A value in veRL's command -> the option and the value that ours has.
MEANT = [
    (
        "data.train_files=['~/a.parquet', '/x/b c.parquet']",
        "data.train_files",
        [f"{HOME}/a.parquet", "/x/b c.parquet"],
    ),
    ("data.train_files=\"['/a.parquet','/b.parquet']\"", "data.train_files", ["/a.parquet", "/b.parquet"]),
    ("data.seed=3", "seed", 3),
    ("data.truncation='middle'", "data.truncation", "middle"),
    (
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "data.apply_chat_template_kwargs.enable_thinking",
        False,
    ),
    ('trainer.logger=["console","tensorboard"]', "trainer.logger", ["console", "tensorboard"]),
    ("trainer.logger=\"['console','wandb']\"", "trainer.logger", ["console", "wandb"]),
    ("trainer.total_training_steps=null", "trainer.total_training_steps", 0),
    ("trainer.save_freq=0", "trainer.save_freq", -1),
    ("trainer.test_freq=False", "trainer.test_freq", -1),
    ("trainer.test_freq=-5", "trainer.test_freq", -1),
    ("trainer.critic_warmup=3", "trainer.critic_warmup", 2),
    ("trainer.critic_warmup=0", "trainer.critic_warmup", 0),
    ("trainer.max_actor_ckpt_to_keep=null", "trainer.max_ckpt_to_keep", 0),
    ("trainer.device=cpu", "device", "cpu"),
    ("trainer.default_local_dir=~/runs", "trainer.default_local_dir", f"{HOME}/runs"),
    ("actor_rollout_ref.model.lora_adapter_path=~/a", "model.lora_adapter_path", f"{HOME}/a"),
    ("actor_rollout_ref.model.lora_adapter_path=null", "model.lora_adapter_path", None),
    ("actor_rollout_ref.model.target_modules='[q_proj,v_proj]'", "model.lora.target_modules", ["q_proj", "v_proj"]),
    ("+actor_rollout_ref.model.override_config.rope_theta=5", "model.override_config.rope_theta", 5),
    ("+actor_rollout_ref.model.override_config.attn_implementation=eager", "model.attn_implementation", "eager"),
    (f"{ACTOR}.fsdp_config.offload_policy=True", "model.fsdp.optimizer_offload", True),
    (f"{ACTOR}.fsdp_config.fsdp_size=32", "model.fsdp.fsdp_size", -1),
    (f"{ACTOR}.fsdp_config.fsdp_size=8", "model.fsdp.fsdp_size", 8),
    ("critic.model.fsdp_config.fsdp_size=16", "critic.model.fsdp.fsdp_size", -1),
    ("reward_model.model.fsdp_config.fsdp_size=16", "reward_model.model.fsdp.fsdp_size", -1),
    (f"{ACTOR}.fsdp_config.dtype=fp32", "model.param_dtype", "float32"),
    (f"{ACTOR}.ppo_micro_batch_size=64", "actor.micro_batch_size_per_gpu", 8),
    (f"{ACTOR}.ppo_micro_batch_size=4", "actor.micro_batch_size_per_gpu", 1),
    (f"{ROLLOUT}.log_prob_micro_batch_size=32", "actor.log_prob_micro_batch_size_per_gpu", 4),
    (f"{ACTOR}.optim.lr_warmup_steps=10", "actor.optim.lr_warmup_steps", 40),
    (f"{ACTOR}.optim.warmup_style=cosine", "actor.optim.lr_scheduler_type", "cosine"),
    (f"{ACTOR}.clip_ratio=0.1", "actor.clip_ratio_high", 0.1),
    (f"{ACTOR}.clip_ratio_low=10", "actor.clip_ratio_low", 1.0),
    (f"{ACTOR}.policy_loss.loss_mode=gspo", "actor.loss_agg_mode", "seq-mean-token-mean"),
    (f"{ACTOR}.policy_loss.loss_mode=cispo", "actor.clip_ratio_c", None),
    (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "actor.policy_loss", "gmpo"),
    (f"{ACTOR}.checkpoint.save_contents=['model','hf_model']", "trainer.save_hf_model", True),
    (f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32", "rollout.engine_kwargs.block_size", 32),
    (f"{ROLLOUT}.quantization=fp8", "rollout.engine_kwargs.quantization", "fp8"),
    (f"{CORRECTION}.rollout_is=token", "actor.tis_level", "token"),
    (f"{CORRECTION}.rollout_is=null", "actor.tis_level", "none"),
    (f"{ACTOR}.policy_loss.loss_mode=sapo", "actor.loss_agg_mode", "seq-mean-token-mean"),
    (f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs", "seq_mean_k1"),
    ("algorithm.filter_groups.max_num_gen_batches=-1", "algorithm.filter_groups.max_num_gen_batches", 0),
    (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "actor.loss_agg_mode", "seq-mean-token-mean"),
    (f"{ACTOR}.optim.betas='[0.9, 0.95]'", "actor.optim.betas", [0.9, 0.95]),
    (f"{ACTOR}.optim.betas=(0.9,0.95)", "actor.optim.betas", [0.9, 0.95]),
    (f"{ACTOR}.optim.clip_grad=0.5", "actor.optim.grad_clip", 0.5),
    (f"{ACTOR}.optim.lr_scheduler_type=null", "actor.optim.lr_scheduler_type", "constant"),
    (f"{ROLLOUT}.top_k=0", "rollout.top_k", -1),
    (f"{ROLLOUT}.val_kwargs.top_k=0", "rollout.val_kwargs.top_k", -1),
    (f"{ROLLOUT}.val_kwargs.n=4", "rollout.val_kwargs.n", 1),  # greedy unless it has a temperature
    (f"{ROLLOUT}.prompt_length=${{data.max_prompt_length}}", "preset", "verl"),
    ("+reward_model.reward_kwargs.max_resp_len=${data.max_response_length}", "preset", "verl"),
    ("algorithm.adv_estimator=rloo_vectorized", "algorithm.adv_estimator", "rloo"),
    ("algorithm.filter_groups.metric=acc", "algorithm.filter_groups.metric", "acc"),
    ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=64", "reward_score.overlong_buffer.len", 64),
    ("reward_model.enable=True", "reward_model.max_length", 1024),
    ("custom_reward_function.path=my/reward.py", "reward_score.custom_functions", ["*=my/reward.py:compute_score"]),
    ("reward_model.num_workers=8", "reward_score.num_workers", 8),
]


@pytest.mark.parametrize(("argument", "option", "value"), MEANT, ids=[argument for argument, *_ in MEANT])
def test_a_value_means_here_what_it_means_in_verl(argument: str, option: str, value: Any):
    parsed = OverridesParser.create().parse_overrides(translate([MODEL, argument]))
    assert {override.key_or_group: override.value() for override in parsed}[option] == value
    assert {override.key_or_group for override in parsed} - {"preset"} <= SCHEMA | {option}


# Options of one command -> ours and its value. In option names "actor" and "rollout" stand for veRL's groups.
TOGETHER = [
    ("actor.clip_ratio=0.3 actor.clip_ratio_low=null", "actor.clip_ratio_low", 0.3),
    ("actor.clip_ratio=0.1 actor.clip_ratio_high=0.3", "actor.clip_ratio_low", 0.1),
    ("actor.clip_ratio=0.1 actor.clip_ratio_high=0.3", "actor.clip_ratio_high", 0.3),
    ("actor.policy_loss.loss_mode=gspo actor.clip_ratio_low=null", "actor.clip_ratio_low", 0.2),
    ("actor.policy_loss.loss_mode=geo_mean actor.clip_ratio_low=1.5", "actor.clip_ratio_low", 1.5),
    ("actor.policy_loss.loss_mode=gspo actor.clip_ratio_c=10", "actor.clip_ratio_c", None),
    ("actor.policy_loss.loss_mode=gspo actor.loss_agg_mode=token-mean", "actor.loss_agg_mode", "seq-mean-token-mean"),
    ("actor.policy_loss.clip_cov_ratio=null", "actor.clip_cov_ratio", 2e-4),
    ("actor.grad_clip=0.5 actor.optim.clip_grad=1.0", "actor.optim.grad_clip", 0.5),
    (
        "actor.optim.warmup_style=cosine actor.optim.lr_scheduler_type=constant",
        "actor.optim.lr_scheduler_type",
        "cosine",
    ),
    # 10 steps of 512 / 32 mini-batches, each taken twice.
    (
        "actor.optim.lr_warmup_steps=10 actor.ppo_mini_batch_size=32 actor.ppo_epochs=2 data.train_batch_size=512",
        "actor.optim.lr_warmup_steps",
        320,
    ),
    # 64 over 16 / 4 groups of workers.
    (
        "trainer.nnodes=2 actor.ulysses_sequence_parallel_size=4 actor.ppo_micro_batch_size=64",
        "actor.micro_batch_size_per_gpu",
        16,
    ),
    ("reward_model.enable=true data.max_prompt_length=100", "reward_model.max_length", 612),
    # Bounds of p_trainer / p_rollout, the inverse of ours.
    (
        "rs=token rs_threshold=5.0 rs_threshold_lower=0.8",
        "algorithm.rollout_correction.rollout_rs_threshold",
        "0.2_1.25",
    ),
    ("rs=geometric rs_threshold=4", "algorithm.rollout_correction.rollout_rs_threshold", "0.25_4"),
    ("rs=token_k1 rs_threshold=0.8_5.0", "algorithm.rollout_correction.rollout_rs_threshold", "0.8_5.0"),
    ("critic.model.path=${actor_rollout_ref.model.path}", "critic.model.path", "some/model"),
    (
        "trainer.experiment_name='n${actor_rollout_ref.rollout.n}_b${data.train_batch_size}' rollout.n=6",
        "trainer.experiment_name",
        "n6_b1024",
    ),
    (
        "actor.ppo_micro_batch_size=${data.train_batch_size} data.train_batch_size=512",
        "actor.micro_batch_size_per_gpu",
        64,
    ),
    ("rollout.val_kwargs.n=4 rollout.val_kwargs.temperature=0.6", "rollout.val_kwargs.n", 4),
    (
        "+data.apply_chat_template_kwargs={enable_thinking:false}",
        "data.apply_chat_template_kwargs.enable_thinking",
        False,
    ),
    ("+actor_rollout_ref.model.override_config={rope_theta:5}", "model.override_config.rope_theta", 5),
    ("actor_rollout_ref.model.override_config=null", "model.override_config", {}),
    ("custom_reward_function.name=f custom_reward_function.path=a.py", "reward_score.custom_functions", ["*=a.py:f"]),
    (
        "custom_reward_function.path=a.py +custom_reward_function.reward_kwargs.t=0.5 "
        "+custom_reward_function.reward_kwargs.names=[a,b]",
        "reward_score.custom_kwargs",
        {"t": 0.5, "names": ["a", "b"]},
    ),
    ("trainer.resume_mode=resume_path trainer.resume_from_path=/x/global_step_3", "trainer.resume_mode", "path"),
    (
        "trainer.resume_mode=resume_path trainer.resume_from_path=/x/global_step_3",
        "trainer.resume_from_path",
        "/x/global_step_3",
    ),
    ("critic.enable=True algorithm.adv_estimator=gae", "algorithm.adv_estimator", "gae"),
    ("critic.enable=False algorithm.adv_estimator=rloo", "algorithm.adv_estimator", "rloo"),
]
SHORT = {"actor.": f"{ACTOR}.", "rollout.": f"{ROLLOUT}.", "rs": f"{CORRECTION}.rollout_rs"}


@pytest.mark.parametrize(("command", "option", "value"), TOGETHER)
def test_options_mean_the_same_together_in_any_order(command: str, option: str, value: Any):
    arguments = [re.sub(r"^(actor\.|rollout\.|rs)", lambda found: SHORT[found[0]], word) for word in command.split()]
    assert OmegaConf.select(composed(MODEL, *arguments), option) == value
    forward, backward = ({o.partition("=")[0]: o for o in translate([MODEL, *a])} for a in (arguments, arguments[::-1]))
    assert backward == forward


def test_only_gmpos_lower_clip_may_be_above_1():
    gmpo = [f"{ACTOR}.policy_loss.loss_mode=geo_mean", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"]
    assert config_of(*gmpo, f"{ACTOR}.clip_ratio_low=1.5").actor.clip_range == (1.5, 0.2)
    with pytest.raises(ConfigError, match="actor.clip_ratio_low=1.5: must be in .0, 1.; with gmpo it may be greater"):
        config_of(*gmpo[1:], "actor.clip_ratio_low=1.5")


def test_a_critic_whose_loss_would_follow_the_policys_is_told(capsys: pytest.CaptureFixture[str]):
    followed = "note: the critic's loss stays the mean over tokens; in veRL critic.loss_agg_mode follows"
    translate([MODEL, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"])
    assert followed in capsys.readouterr().err
    translate([MODEL, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", "algorithm.adv_estimator=grpo"])
    translate([MODEL, f"{ACTOR}.loss_agg_mode=token-mean"])
    assert followed not in capsys.readouterr().err


# What is refused -> a part of the message.
REFUSED = [
    (f"{ROLLOUT}.name=sglang", "rollout.name=sglang: other engines are not supported; use vllm"),
    (f"{ACTOR}.strategy=megatron", "Megatron needs veRL"),
    (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "Megatron is not supported"),
    (f"{ROLLOUT}.multi_turn.enable=True", "a response is one turn"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=x.yaml", "rollout by agents"),
    (f"{ROLLOUT}.logprobs_mode=raw_logprobs", "training needs the log-probabilities"),
    (f"{ROLLOUT}.response_length=99", "data.max_response_length=512 sets it"),
    (f"{ROLLOUT}.ignore_eos=true", "end-of-sequence"),
    (f"{ACTOR}.freeze_vision_tower=true", "models that read images"),
    (f"{ACTOR}.fsdp_config.model_dtype=fp16", "master weights are always float32"),
    ("model_engine=megatron", "Megatron needs veRL"),
    (f"{ACTOR}.optim.optimizer=SGD", "the optimizer is AdamW"),
    (f"{ACTOR}.use_token_level_loss=True", "unknown option; did you mean"),
    (f"{ROLLOUT}.mode=server", "in veRL with either mode; must be sync or async"),
    (f"{ACTOR}.shuffle=True", "mini-batches are taken in the batch's order"),
    ("critic.loss_agg_mode=seq-mean-token-sum", "the mean over tokens"),
    ("reward_model.reward_manager=batch", "responses are scored one by one"),
    ("trainer.device=npu", "must be cuda or cpu"),
    ("actor_rollout_ref.model.override_config={attn_implementation: eager}", "set override_config.attn_implementation"),
    ("critic.enable=False", "gae alone has a critic"),
    ("+ray_kwargs.ray_init.runtime_env.env_vars.SCORE=strict", "the environment of the shell"),
    ("trainer.total_epoch=3", "did you mean trainer.total_epochs?"),
    ("actor_rollout_ref.actor.optim.learning_rate=1", "unknown option; did you mean"),
    ("actor_rollout_ref.actor={optim: 1}", "set the options of this group one by one"),
    ("~actor_rollout_ref.actor.clip_ratio", "cannot be deleted"),
]


@pytest.mark.parametrize(("argument", "message"), REFUSED, ids=[argument for argument, _ in REFUSED])
def test_what_is_not_here_is_refused_by_name(argument: str, message: str):
    with pytest.raises(FlagError) as error:
        translate([MODEL, argument])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(argument.partition("=")[0].lstrip("+~") if "~" not in argument else "~")


BYPASS = [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=sequence"]


@pytest.mark.parametrize(
    ("options", "loss", "dual_clip", "level"),
    [
        ([*BYPASS], "ppo_clip", 3.0, "none"),
        ([*BYPASS, f"{CORRECTION}.loss_type=ppo_clip", f"{ACTOR}.policy_loss.loss_mode=gspo"], "ppo_clip", 3.0, "none"),
        ([*BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{ACTOR}.clip_ratio_c=10.0"], "gpg", None, "sequence"),
        ([*BYPASS[1:], f"{CORRECTION}.loss_type=reinforce"], "ppo_clip", 3.0, "sequence"),
    ],
)
def test_bypass_mode_decides_the_loss(options: list[str], loss: str, dual_clip: float | None, level: str):
    for arguments in (options, options[::-1]):
        actor = config_of(MODEL, "data.train_files=a", f"{ROLLOUT}.n=2", *arguments).actor
        assert (actor.policy_loss, actor.clip_ratio_c, actor.tis_level) == (loss, dual_clip, level)
        assert actor.bypass_mode is (BYPASS[0] in options)
    with pytest.raises(FlagError, match="loss_type=dpo: must be ppo_clip or reinforce"):
        translate([*BYPASS, f"{CORRECTION}.loss_type=dpo"])


def test_a_configuration_file_of_verls_is_dropped_if_it_is_the_preset():
    assert translate([MODEL, "--config-path", "./config", "--config-name=ppo_trainer.yaml", "--cfg", "job"])[-2:] == [
        "--cfg",
        "job",
    ]
    assert "-cp" not in translate([MODEL, "-cp", "verl/trainer/config", "-cn", "ppo_trainer"])
    for flag in ("--config-path=/my/settings", "--config-dir=/my/settings"):
        with pytest.raises(FlagError, match=f"^{flag}: files there are not read; give their values on the command"):
            translate([MODEL, flag, "--config-name=ppo_trainer"])
    with pytest.raises(FlagError, match="ppo_megatron_trainer: Megatron is not supported"):
        translate([MODEL, "--config-name=ppo_megatron_trainer"])


def test_our_own_options_stand_beside_verls():
    tree = composed(MODEL, "reward_manager=verl", "calculator.layers=[-2]", "actor.optim.eps=1e-6", "data.template=raw")
    assert tree.reward_manager.add_adv and list(tree.calculator.layers) == [-2]
    assert (tree.actor.optim.eps, tree.data.template, tree.model.path) == (1e-6, "raw", "some/model")
    assert composed(f"{ROLLOUT}.n=8", "model=qwen2.5_1.5b", "trainer=gpus4").model.path == "Qwen/Qwen2.5-1.5B"
    assert composed(f"{ROLLOUT}.n=8", "experiment=dapo").algorithm.filter_groups.enable
    flags = composed(f"{ROLLOUT}.n=8", "--learning_rate", "3e-6")
    assert (flags.actor.optim.lr, flags.rollout.n, flags.trainer.total_epochs) == (3e-6, 8, 30)


def test_a_preset_of_the_users_stays_and_our_own_commands_are_left_alone(capsys: pytest.CaptureFixture[str]):
    assert translate([f"{ROLLOUT}.n=8", "preset=paper"]) == ["rollout.n=8", "preset=paper"]
    ours = ["trainer.test_freq=5", "algorithm.gamma=1.0", "critic.model.path=x", "critic.model.override_config.a=1"]
    assert translate(ours) == ours
    assert translate(["trainer.save_freq=0"]) == ["trainer.save_freq=0"]  # ours: after the last step
    assert capsys.readouterr().err == ""


def test_one_line_says_why_an_option_has_no_effect(capsys: pytest.CaptureFixture[str]):
    translate(
        [MODEL, f"{ROLLOUT}.layered_summon=True", "data.use_shm=True", f"{ROLLOUT}.mode=async", f"{ACTOR}.ppo_epochs=1"]
    )
    assert capsys.readouterr().err.splitlines() == [
        f"note: {ROLLOUT}.layered_summon: no effect: weights are always gathered a few at a time",
        "note: data.use_shm: no effect: speed only; results are the same",
        f"note: {ROLLOUT}.mode: no effect: all responses of a step are sampled with its weights before the update, as "
        "in veRL with either mode",
        "note: a command of veRL's: options that it leaves out have veRL's defaults, preset=verl",
    ]


def test_the_page_has_every_option_and_a_stale_one_is_told(tmp_path: Path, monkeypatch, capsys):
    script = runpy.run_path(str(ROOT / "scripts" / "make_from_verl.py"))
    assert script["main"](["--check"]) == 0, capsys.readouterr().err
    page = script["PAGE"].read_text()
    for key in DEFAULTS:
        parts = key.split(".")
        groups = (".".join(parts[:length]) for length in range(1, len(parts)))
        assert f"`{key}`" in page or any(f"`{group}.*`" in page for group in groups), key
    stale = tmp_path / "page.md"
    stale.write_text(page.replace("`data.val_sample_size`", "`data.other`"))
    monkeypatch.setitem(script["main"].__globals__, "PAGE", stale)
    assert script["main"](["--check"]) == 1
    assert "run: python scripts/make_from_verl.py" in capsys.readouterr().err
    assert script["main"]([]) == 0
    assert stale.read_text() == (ROOT / "docs" / "from_verl.md").read_text()
