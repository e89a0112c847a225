"""veRL's command lines: every option of its trainer.

``verl_defaults.tsv`` holds them with their defaults, at veRL's commit b178a3cd56f58b2d502255daba591e92833930a7.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.cli.verl_command import ACTOR, CORRECTION, REF, ROLLOUT, composed, leaves
from verl.cli.release_flags import translate
from verl.cli.values import FlagError
from verl.cli.verl_conversions import SCHEMA
from verl.cli.verl_options import OPTIONS, lookup
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
    for key, option in OPTIONS.items():
        assert option.meaning and "\n" not in option.meaning and "|" not in option.meaning, key


def test_verls_defaults_change_nothing_in_the_preset_which_is_them():
    given = [f"{key}={value}" for key, value in DEFAULTS.items() if value != "???"]
    assert len(given) == 554
    ours, preset = (leaves(composed(*arguments)) for arguments in (given, ["preset=verl"]))
    # auto is cuda wherever there is a GPU
    assert {key: (ours[key], preset[key]) for key in preset if ours[key] != preset[key]} == {"device": ("cuda", "auto")}


@pytest.mark.parametrize("group", sorted({key.partition(".")[0] for key in DEFAULTS}))
def test_each_default_alone_is_taken(group: str):
    for key, value in DEFAULTS.items():
        if key.startswith(f"{group}.") and value != "???":
            assert translate([MODEL, f"{key}={value}"])[0] == "preset=verl", key


# veRL's defaults that the preset must hold, apart from how the translator reads them.
PRESET = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.template": "chat",
    "data.truncation": "error",
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.use_kl_in_reward": False,
    "actor.ppo_mini_batch_size": 256,
    "actor.ppo_epochs": 1,
    "actor.policy_loss": "ppo_clip",
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_c": 3.0,
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coeff": 0.0,
    "actor.use_kl_loss": False,
    "actor.kl_loss_type": "low_var_kl",
    "actor.tis_level": "none",
    "actor.tis_normalize": False,
    "actor.optim.lr": 1e-6,
    "actor.optim.betas": [0.9, 0.999],
    "actor.optim.weight_decay": 0.01,
    "actor.optim.lr_scheduler_type": "constant",
    "actor.optim.lr_warmup_steps": 0,
    "actor.optim.grad_clip": 1.0,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.model.use_remove_padding": False,
    "model.use_remove_padding": True,
    "model.gradient_checkpointing": True,
    "model.lora.rank": 0,
    "model.fsdp.param_offload": False,
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "rollout.tensor_parallel_size": 2,
    "rollout.gpu_memory_utilization": 0.5,
    "rollout.val_kwargs.temperature": 0.0,
    "reward_manager.add_adv": False,
    "reward_manager.add_reward": False,
    "reward_score.overlong_buffer.enable": False,
    "reward_model.enable": False,
    "reward_model.rule_weight": 0.0,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": 0,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.default_local_dir": "checkpoints/verl_examples/gsm8k",
    "trainer.logger": ["console", "wandb"],
}


def test_the_preset_holds_verls_defaults():
    found = leaves(composed("preset=verl"))
    assert {key: found[key] for key in PRESET} == PRESET
    assert config_of("preset=verl").model.path == f"{os.environ['HOME']}/models/deepseek-llm-7b-chat"


# A value in veRL's command -> the option and the value that ours has.
MEANT = [
    (
        "data.train_files=['~/a.parquet', '/x/b c.parquet']",
        "data.train_files",
        [f"{HOME}/a.parquet", "/x/b c.parquet"],
    ),
    ("data.train_files=\"['/a.parquet','/b.parquet']\"", "data.train_files", ["/a.parquet", "/b.parquet"]),
    ("data.val_files=/a.parquet", "data.val_files", ["/a.parquet"]),
    ("data.val_max_samples=7", "data.val_sample_size", 7),
    ("data.seed=3", "seed", 3),
    ("data.truncation='middle'", "data.truncation", "middle"),
    (
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "data.apply_chat_template_kwargs.enable_thinking",
        False,
    ),
    ('trainer.logger=["console","tensorboard"]', "trainer.logger", ["console", "tensorboard"]),
    ("trainer.logger=\"['console','wandb']\"", "trainer.logger", ["console", "wandb"]),
    ("trainer.logger=console", "trainer.logger", ["console"]),
    ("trainer.total_training_steps=null", "trainer.total_training_steps", 0),
    ("trainer.total_training_steps=None", "trainer.total_training_steps", 0),
    ("trainer.total_training_steps=9", "trainer.total_training_steps", 9),
    ("trainer.save_freq=0", "trainer.save_freq", -1),
    ("trainer.test_freq=False", "trainer.test_freq", -1),
    ("trainer.test_freq=5", "trainer.test_freq", 5),
    ("trainer.test_freq=-5", "trainer.test_freq", -1),
    ("trainer.remove_previous_ckpt_in_save=True", "trainer.max_ckpt_to_keep", 1),
    ("trainer.critic_warmup=3", "trainer.critic_warmup", 2),
    ("trainer.critic_warmup=0", "trainer.critic_warmup", 0),
    ("trainer.max_actor_ckpt_to_keep=2", "trainer.max_ckpt_to_keep", 2),
    ("trainer.max_actor_ckpt_to_keep=null", "trainer.max_ckpt_to_keep", 0),
    ("trainer.device=cpu", "device", "cpu"),
    ("trainer.default_local_dir=~/runs", "trainer.default_local_dir", f"{HOME}/runs"),
    ("actor_rollout_ref.model.lora_adapter_path=~/a", "model.lora_adapter_path", f"{HOME}/a"),
    ("actor_rollout_ref.model.lora_adapter_path=null", "model.lora_adapter_path", None),
    ("actor_rollout_ref.model.lora_rank=8", "model.lora.rank", 8),
    ("actor_rollout_ref.model.target_modules='[q_proj,v_proj]'", "model.lora.target_modules", ["q_proj", "v_proj"]),
    ("+actor_rollout_ref.model.override_config.rope_theta=5", "model.override_config.rope_theta", 5),
    ("+actor_rollout_ref.model.override_config.attn_implementation=eager", "model.attn_implementation", "eager"),
    (f"{ACTOR}.fsdp_config.param_offload=True", "model.fsdp.param_offload", True),
    (f"{ACTOR}.fsdp_config.offload_policy=True", "model.fsdp.optimizer_offload", True),
    (f"{ACTOR}.fsdp_config.fsdp_size=32", "model.fsdp.fsdp_size", -1),
    (f"{ACTOR}.fsdp_config.fsdp_size=8", "model.fsdp.fsdp_size", 8),
    (f"{ACTOR}.fsdp_config.fsdp_size=4", "model.fsdp.fsdp_size", 4),
    ("critic.model.fsdp_config.fsdp_size=16", "critic.model.fsdp.fsdp_size", -1),
    ("reward_model.model.fsdp_config.fsdp_size=16", "reward_model.model.fsdp.fsdp_size", -1),
    (f"{ACTOR}.fsdp_config.dtype=fp32", "model.param_dtype", "float32"),
    (f"{REF}.fsdp_config.param_offload=True", "ref.param_offload", True),
    ("critic.model.fsdp_config.param_offload=True", "critic.model.fsdp.param_offload", True),
    (f"{ACTOR}.ulysses_sequence_parallel_size=4", "model.ulysses_sequence_parallel_size", 4),
    (f"{ACTOR}.ppo_micro_batch_size=64", "actor.micro_batch_size_per_gpu", 8),
    (f"{ACTOR}.ppo_micro_batch_size=4", "actor.micro_batch_size_per_gpu", 1),
    (f"{ROLLOUT}.log_prob_micro_batch_size=32", "actor.log_prob_micro_batch_size_per_gpu", 4),
    (f"{ACTOR}.optim.lr_warmup_steps=10", "actor.optim.lr_warmup_steps", 40),
    ("critic.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps", 40),
    (f"{ACTOR}.optim.warmup_style=cosine", "actor.optim.lr_scheduler_type", "cosine"),
    (f"{ACTOR}.grad_clip=0.5", "actor.optim.grad_clip", 0.5),
    (f"{ACTOR}.clip_ratio=0.1", "actor.clip_ratio_high", 0.1),
    (f"{ACTOR}.clip_ratio_low=10", "actor.clip_ratio_low", 1.0),
    (f"{ACTOR}.policy_loss.loss_mode=gspo", "actor.loss_agg_mode", "seq-mean-token-mean"),
    (f"{ACTOR}.policy_loss.loss_mode=cispo", "actor.clip_ratio_c", None),
    (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "actor.policy_loss", "gmpo"),
    (f"{ACTOR}.checkpoint.save_contents=['model','hf_model']", "trainer.save_hf_model", True),
    (f"{ROLLOUT}.tensor_model_parallel_size=4", "rollout.tensor_parallel_size", 4),
    (f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32", "rollout.engine_kwargs.block_size", 32),
    (f"{ROLLOUT}.quantization=fp8", "rollout.engine_kwargs.quantization", "fp8"),
    (f"{CORRECTION}.rollout_is=token", "actor.tis_level", "token"),
    (f"{CORRECTION}.rollout_is_batch_normalize=true", "actor.tis_normalize", True),
    (f"{CORRECTION}.rollout_is=null", "actor.tis_level", "none"),
    (f"{CORRECTION}.rollout_is_threshold=3.0", "actor.tis_cap", 3.0),
    (f"{CORRECTION}.rollout_token_veto_threshold=1e-4", f"{CORRECTION}.rollout_token_veto_threshold", 1e-4),
    (f"{CORRECTION}.bypass_mode=true", "actor.bypass_mode", True),
    (f"{ACTOR}.loss_mode=clip_cov", "actor.policy_loss", "clip_cov"),
    (f"{ACTOR}.kl_cov_ratio=0.1", "actor.kl_cov_ratio", 0.1),
    (f"{ACTOR}.policy_loss.loss_mode=kl_cov", "actor.policy_loss", "kl_cov"),
    (f"{ACTOR}.policy_loss.clip_cov_ub=4.0", "actor.clip_cov_ub", 4.0),
    (f"{ACTOR}.policy_loss.ppo_kl_coef=1", "actor.ppo_kl_coef", 1.0),
    (f"{ACTOR}.policy_loss.loss_mode=gpg", "actor.policy_loss", "gpg"),
    (f"{ACTOR}.policy_loss.loss_mode=sapo", "actor.loss_agg_mode", "seq-mean-token-mean"),
    (f"{ACTOR}.tau_neg=1.5", "actor.tau_neg", 1.5),
    ("algorithm.use_pf_ppo=True", "algorithm.use_pf_ppo", True),
    ("algorithm.pf_ppo.reweight_method=max_min", "algorithm.pf_ppo.reweight_method", "max_min"),
    ("algorithm.adv_estimator=tir_optimal_token_baseline", "algorithm.adv_estimator", "tir_optimal_token_baseline"),
    (f"{CORRECTION}.rollout_rs=sequence", f"{CORRECTION}.rollout_rs", "seq_sum_k1"),
    (f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs", "seq_mean_k1"),
    ("algorithm.filter_groups.max_num_gen_batches=-1", "algorithm.filter_groups.max_num_gen_batches", 0),
    ("algorithm.filter_groups.max_num_gen_batches=null", "algorithm.filter_groups.max_num_gen_batches", 0),
    (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "actor.loss_agg_mode", "seq-mean-token-mean"),
    (f"{ACTOR}.optim.betas='[0.9, 0.95]'", "actor.optim.betas", [0.9, 0.95]),
    (f"{ACTOR}.optim.betas=(0.9,0.95)", "actor.optim.betas", [0.9, 0.95]),
    (f"{ACTOR}.optim.clip_grad=0.5", "actor.optim.grad_clip", 0.5),
    (f"{ACTOR}.optim.lr_scheduler_type=null", "actor.optim.lr_scheduler_type", "constant"),
    (f"{ROLLOUT}.top_k=0", "rollout.top_k", -1),
    (f"{ROLLOUT}.top_k=50", "rollout.top_k", 50),
    (f"{ROLLOUT}.val_kwargs.top_k=0", "rollout.val_kwargs.top_k", -1),
    (f"{ROLLOUT}.val_kwargs.n=4", "rollout.val_kwargs.n", 1),  # greedy unless it has a temperature
    (f"{ROLLOUT}.prompt_length=${{data.max_prompt_length}}", "preset", "verl"),
    ("+reward_model.reward_kwargs.max_resp_len=${data.max_response_length}", "preset", "verl"),
    # Earlier names.
    (f"{ACTOR}.checkpoint.contents=['model','hf_model']", "trainer.save_hf_model", True),
    (f"{ACTOR}.use_token_level_loss=True", "actor.loss_agg_mode", "token-mean"),
    (f"{ROLLOUT}.n_val=1", "rollout.val_kwargs.n", 1),
    (f"{ROLLOUT}.val_temperature=0.6", "rollout.val_kwargs.temperature", 0.6),
    ("custom_reward_function.overlong_buffer.len=64", "reward_score.overlong_buffer.len", 64),
    ("algorithm.adv_estimator=rloo_vectorized", "algorithm.adv_estimator", "rloo"),
    ("algorithm.filter_groups.metric=acc", "algorithm.filter_groups.metric", "acc"),
    ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=64", "reward_score.overlong_buffer.len", 64),
    ("reward_model.overlong_buffer.penalty_factor=0.5", "reward_score.overlong_buffer.penalty_factor", 0.5),
    ("reward_model.enable=True", "reward_model.max_length", 1024),
    ("custom_reward_function.path=my/reward.py", "reward_score.custom_functions", ["*=my/reward.py:compute_score"]),
    ("reward.custom_reward_function.path=a.py", "reward_score.custom_functions", ["*=a.py:compute_score"]),
    ("reward.num_workers=8", "reward_score.num_workers", 8),
    ("algorithm.mask_truncated_samples=True", "trainer.remove_clip", True),
    (f"{ROLLOUT}.n_val=8", "rollout.val_kwargs.n", 1),
    (f"{ROLLOUT}.val_temperature=0.6", "rollout.val_kwargs.temperature", 0.6),
    (f"{ACTOR}.checkpoint.contents=['model','hf_model']", "trainer.save_hf_model", True),
    ("reward_model.num_workers=8", "reward_score.num_workers", 8),
]


@pytest.mark.parametrize(("argument", "option", "value"), MEANT, ids=[argument for argument, *_ in MEANT])
def test_a_value_means_here_what_it_means_in_verl(argument: str, option: str, value: Any):
    parsed = OverridesParser.create().parse_overrides(translate([MODEL, argument]))
    assert {override.key_or_group: override.value() for override in parsed}[option] == value
    assert {override.key_or_group for override in parsed} - {"preset"} <= SCHEMA | {option}


def test_values_that_depend_on_others():
    sizes = ["trainer.n_gpus_per_node=8", "trainer.nnodes=2", f"{ACTOR}.ulysses_sequence_parallel_size=4"]
    tree = composed(
        *sizes, f"{ACTOR}.ppo_micro_batch_size=64", "reward_model.enable=true", "data.max_prompt_length=100"
    )
    assert tree.actor.micro_batch_size_per_gpu == 16  # 64 over 16 / 4 groups of workers
    assert tree.reward_model.max_length == 612
    steps = [f"{ACTOR}.optim.lr_warmup_steps=10", f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.ppo_epochs=2"]
    assert composed(*steps, "data.train_batch_size=512").actor.optim.lr_warmup_steps == 320
    tree = composed(
        f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_c=10", f"{ACTOR}.loss_agg_mode=token-mean"
    )
    assert (tree.actor.clip_ratio_c, tree.actor.loss_agg_mode) == (None, "seq-mean-token-mean")
    tree = composed(f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3")
    assert (tree.actor.clip_ratio_low, tree.actor.clip_ratio_high) == (0.1, 0.3)
    tree = composed("custom_reward_function.name=f", "custom_reward_function.path=a.py")
    assert list(tree.reward_score.custom_functions) == ["*=a.py:f"]
    given = ["+custom_reward_function.reward_kwargs.threshold=0.5", "+custom_reward_function.reward_kwargs.names=[a,b]"]
    tree = composed("custom_reward_function.path=a.py", *given)
    assert tree.reward_score.custom_kwargs == {"threshold": 0.5, "names": ["a", "b"]}
    tree = composed(MODEL, "trainer.resume_mode=resume_path", "trainer.resume_from_path=/x/global_step_3")
    assert (tree.trainer.resume_mode, tree.trainer.resume_from_path) == ("path", "/x/global_step_3")


EARLIER_VETO = "algorithm.rollout_is_veto_threshold=1e-4"

# Options of one command -> ours and its value.
TOGETHER = [
    ([f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=null"], "actor.clip_ratio_low", 0.3),
    ([f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=null"], "actor.clip_ratio_low", 0.2),
    ([f"{ACTOR}.policy_loss.loss_mode=geo_mean", f"{ACTOR}.clip_ratio_low=1.5"], "actor.clip_ratio_low", 1.5),
    ([f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=1.0"], "actor.optim.grad_clip", 0.5),
    (
        [f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type=constant"],
        "actor.optim.lr_scheduler_type",
        "cosine",
    ),
    # Bounds of p_trainer / p_rollout, the inverse of ours.
    (
        [
            f"{CORRECTION}.rollout_rs=token",
            f"{CORRECTION}.rollout_rs_threshold=5.0",
            f"{CORRECTION}.rollout_rs_threshold_lower=0.8",
        ],
        f"{CORRECTION}.rollout_rs_threshold",
        "0.2_1.25",
    ),
    (
        [f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs_threshold=4"],
        f"{CORRECTION}.rollout_rs_threshold",
        "0.25_4",
    ),
    (
        [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.8_5.0"],
        f"{CORRECTION}.rollout_rs_threshold",
        "0.8_5.0",
    ),
    (["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=3.0"], "actor.tis_cap", 3.0),
    (
        [
            "algorithm.rollout_is=True",
            "algorithm.rollout_is_threshold=4",
            "algorithm.rollout_is_mode=mask",
            "algorithm.rollout_is_level=geometric",
            "algorithm.rollout_is_threshold_lower=0.8",
        ],
        f"{CORRECTION}.rollout_rs_threshold",
        "0.25_1.25",
    ),
    (["algorithm.rollout_is=False", "algorithm.rollout_is_threshold=3.0"], "actor.tis_level", "none"),
    (["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=0"], "actor.tis_level", "none"),
    ([f"{ACTOR}.policy_loss.kl_cov_ratio=null", f"{ACTOR}.kl_cov_ratio=0.1"], "actor.kl_cov_ratio", 0.1),
    ([f"{ACTOR}.policy_loss.clip_cov_ratio=null"], "actor.clip_cov_ratio", 2e-4),
    ([EARLIER_VETO, "algorithm.rollout_is_threshold=3.0"], f"{CORRECTION}.rollout_token_veto_threshold", None),
    ([EARLIER_VETO, "algorithm.rollout_is=True"], f"{CORRECTION}.rollout_token_veto_threshold", None),
    (
        [EARLIER_VETO, "algorithm.rollout_is=True", "algorithm.rollout_is_threshold=3.0"],
        f"{CORRECTION}.rollout_token_veto_threshold",
        1e-4,
    ),
    ([f"{ACTOR}.tis_imp_ratio_cap=0"], "actor.tis_level", "none"),
    (["critic.model.path=${actor_rollout_ref.model.path}"], "critic.model.path", "some/model"),
    (
        ["trainer.experiment_name='n${actor_rollout_ref.rollout.n}_b${data.train_batch_size}'", f"{ROLLOUT}.n=6"],
        "trainer.experiment_name",
        "n6_b1024",
    ),
    (
        [f"{ACTOR}.ppo_micro_batch_size=${{data.train_batch_size}}", "data.train_batch_size=512"],
        "actor.micro_batch_size_per_gpu",
        64,
    ),
    ([f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.temperature=0.6"], "rollout.val_kwargs.n", 4),
    (
        ["+data.apply_chat_template_kwargs={enable_thinking: false}"],
        "data.apply_chat_template_kwargs.enable_thinking",
        False,
    ),
    (["+actor_rollout_ref.model.override_config={rope_theta: 5}"], "model.override_config.rope_theta", 5),
    (["actor_rollout_ref.model.override_config=null"], "model.override_config", {}),
    (["critic.enable=True", "algorithm.adv_estimator=gae"], "algorithm.adv_estimator", "gae"),
    (["critic.enable=False", "algorithm.adv_estimator=rloo"], "algorithm.adv_estimator", "rloo"),
]


@pytest.mark.parametrize(("arguments", "option", "value"), TOGETHER, ids=[" ".join(row[0]) for row in TOGETHER])
def test_options_mean_the_same_together_in_any_order(arguments: list[str], option: str, value: Any):
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


# Options of ppo_trainer.yaml in releases from February to November 2025 that b178a3c no longer has, and their defaults.
FORMER_DEFAULTS = """
actor_rollout_ref.actor.checkpoint.contents=['model','optimizer','extra']
actor_rollout_ref.actor.fsdp_config.grad_offload=False
actor_rollout_ref.ref.model=null
actor_rollout_ref.rollout.chat_scheduler=null
actor_rollout_ref.rollout.engine_kwargs.swap_space=null
actor_rollout_ref.rollout.update_weights_bucket_megabytes=512
actor_rollout_ref.rollout.use_fire_sampling=False
algorithm.rollout_correction.use_policy_gradient=False
algorithm.rollout_is=False
algorithm.rollout_is_level=token
algorithm.rollout_is_mode=truncate
algorithm.rollout_is_threshold=null
algorithm.rollout_is_threshold_lower=null
critic.checkpoint.contents=['model','optimizer','extra']
critic.model.fsdp_config.grad_offload=False
reward_model.model.fsdp_config.min_num_params=0
trainer.controller_nsight_options.cuda-graph-trace=graph
trainer.worker_nsight_options.capture-range-end=null
""".split("\n")[1:-1]


def test_defaults_of_former_releases_change_nothing():
    assert leaves(composed(MODEL, *FORMER_DEFAULTS)) == leaves(composed(MODEL))


# What is refused -> a part of the message.
REFUSED = [
    (f"{ROLLOUT}.name=sglang", "rollout.name=sglang: the engine sglang is not supported; use vllm"),
    (f"{ACTOR}.strategy=megatron", "Megatron needs veRL"),
    (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "Megatron is not supported"),
    (f"{ROLLOUT}.multi_turn.enable=True", "a response is one turn"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=x.yaml", "rollout by agents"),
    (f"{ROLLOUT}.logprobs_mode=raw_logprobs", "training needs the log-probabilities"),
    (f"{ROLLOUT}.response_length=99", "data.max_response_length=512 sets it"),
    (f"{ROLLOUT}.max_model_len=1000", "the longest prompt and response have 1024 tokens"),
    (f"{ROLLOUT}.ignore_eos=true", "end-of-sequence"),
    (f"{ACTOR}.freeze_vision_tower=true", "models that read images"),
    (f"{ACTOR}.fsdp_config.model_dtype=fp16", "master weights are always float32"),
    ("model_engine=megatron", "Megatron needs veRL"),
    (f"{ROLLOUT}.use_fire_sampling=true", "every token is drawn at the same temperature"),
    (f"{ACTOR}.optim.optimizer=SGD", "the optimizer is AdamW"),
    (f"{ACTOR}.shuffle=True", "mini-batches are taken in the batch's order"),
    ("critic.loss_agg_mode=seq-mean-token-sum", "the mean over tokens"),
    ("reward_model.reward_manager=batch", "responses are scored one by one"),
    ("trainer.device=npu", "must be cuda or cpu"),
    ("actor_rollout_ref.model.override_config={attn_implementation: eager}", "set override_config.attn_implementation"),
    ("critic.enable=False", "gae alone has a critic"),
    ("+ray_kwargs.ray_init.runtime_env.env_vars.SCORE=strict", "the environment of the shell"),
    ("trainer.rejection_sample=True", "set its enable"),
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
        ([*BYPASS, f"{CORRECTION}.use_policy_gradient=True"], "gpg", None, "sequence"),
        ([*BYPASS[1:], f"{CORRECTION}.use_policy_gradient=True"], "ppo_clip", 3.0, "sequence"),
    ],
)
def test_bypass_mode_decides_the_loss(options: list[str], loss: str, dual_clip: float | None, level: str):
    for arguments in (options, options[::-1]):
        actor = config_of(MODEL, "data.train_files=a", f"{ROLLOUT}.n=2", *arguments).actor
        assert (actor.policy_loss, actor.clip_ratio_c, actor.tis_level) == (loss, dual_clip, level)
        assert actor.bypass_mode is (BYPASS[0] in options)
    with pytest.raises(FlagError, match="loss_type=dpo: must be ppo_clip or reinforce"):
        translate([*BYPASS, f"{CORRECTION}.loss_type=dpo"])


def test_pf_ppo_is_left_out_where_verl_does_not_read_it():
    assert composed(
        f"{ROLLOUT}.n=2", "algorithm.adv_estimator=grpo", "algorithm.use_pf_ppo=True"
    ).algorithm.use_pf_ppo is (False)


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


def test_options_of_other_versions_are_known():
    """Commands of TinyZero, Logic-RL and DeepScaleR, and of versions before and after, have them."""
    earlier = [
        *(f"{ACTOR}.fsdp_config.grad_offload=True", "critic.model.fsdp_config.grad_offload=True"),
        *(f"{ROLLOUT}.swap_space=16", f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=16", "trainer.default_hdfs_dir=null"),
        *(f"{ACTOR}.fsdp_config.model_dtype=bf16", "+trainer.val_before_train=False", "model_engine=dp"),
    ]
    before, after = composed(MODEL, "trainer.val_before_train=false"), composed(MODEL, *earlier)
    assert before == after


def test_the_page_has_every_option_and_a_stale_one_is_told(tmp_path: Path, monkeypatch, capsys):
    script = runpy.run_path(str(ROOT / "scripts" / "make_from_verl.py"))
    assert script["main"](["--check"]) == 0, capsys.readouterr().err
    rows = {line.split("`")[1] for line in script["PAGE"].read_text().splitlines() if line.startswith("| `")}
    for key in DEFAULTS:
        parts = key.split(".")
        groups = {f"{'.'.join(parts[:length])}.*" for length in range(1, len(parts))}
        assert rows & {key, *groups}, key
    stale = tmp_path / "page.md"
    stale.write_text(script["PAGE"].read_text().replace("`data.val_sample_size`", "`data.other`"))
    monkeypatch.setitem(script["main"].__globals__, "PAGE", stale)
    assert script["main"](["--check"]) == 1
    assert "run: python scripts/make_from_verl.py" in capsys.readouterr().err
    assert script["main"]([]) == 0
    assert stale.read_text() == (ROOT / "docs" / "from_verl.md").read_text()
