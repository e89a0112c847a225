"""Example commands that veRL publishes, and their options in ``verl_examples.jsonl``.

They are those of commit b178a3cd56f58b2d502255daba591e92833930a7, or of its recipes.
"""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.cli.verl_command import ACTOR, CORRECTION, EXAMPLES, REF, ROLLOUT, composed, leaves

HERE = Path(__file__).parent

# veRL's option -> ours, and how the value is read from its text; apart from the translator's own table.
NUMBERS = {
    "data.train_batch_size": "data.train_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
    f"{ACTOR}.optim.lr": "actor.optim.lr",
    f"{ACTOR}.optim.weight_decay": "actor.optim.weight_decay",
    f"{ACTOR}.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "actor.micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    f"{ACTOR}.clip_ratio_high": "actor.clip_ratio_high",
    f"{ACTOR}.entropy_coeff": "actor.entropy_coeff",
    f"{ACTOR}.kl_loss_coef": "actor.kl_loss_coef",
    f"{ACTOR}.fsdp_config.fsdp_size": "model.fsdp.fsdp_size",
    f"{ACTOR}.ulysses_sequence_parallel_size": "model.ulysses_sequence_parallel_size",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    f"{ROLLOUT}.n": "rollout.n",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    f"{ROLLOUT}.val_kwargs.n": "rollout.val_kwargs.n",
    f"{ROLLOUT}.val_kwargs.top_p": "rollout.val_kwargs.top_p",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_ctrl.kl_coef",
    "critic.optim.lr": "critic.optim.lr",
    "critic.ppo_micro_batch_size_per_gpu": "critic.micro_batch_size_per_gpu",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward_score.overlong_buffer.len",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": "reward_score.overlong_buffer.penalty_factor",
    f"{CORRECTION}.rollout_is_threshold": "actor.tis_cap",
    f"{CORRECTION}.rollout_token_veto_threshold": f"{CORRECTION}.rollout_token_veto_threshold",
    "trainer.n_gpus_per_node": "trainer.n_gpus_per_node",
    "trainer.nnodes": "trainer.nnodes",
    "trainer.save_freq": "trainer.save_freq",
    "trainer.total_epochs": "trainer.total_epochs",
    "trainer.total_training_steps": "trainer.total_training_steps",
}
WORDS = {
    "actor_rollout_ref.model.path": "model.path",
    "algorithm.adv_estimator": "algorithm.adv_estimator",
    f"{ACTOR}.kl_loss_type": "actor.kl_loss_type",
    f"{ROLLOUT}.name": "rollout.name",
    "critic.model.path": "critic.model.path",
    "reward_model.model.path": "reward_model.model.path",
    "data.truncation": "data.truncation",
    "actor_rollout_ref.model.lora_adapter_path": "model.lora_adapter_path",
    "trainer.experiment_name": "trainer.experiment_name",
    "trainer.project_name": "trainer.project_name",
    f"{CORRECTION}.rollout_is": "actor.tis_level",
}
SWITCHES = {
    f"{ACTOR}.use_kl_loss": "actor.use_kl_loss",
    f"{ACTOR}.use_dynamic_bsz": "actor.use_dynamic_bsz",
    f"{ACTOR}.fsdp_config.param_offload": "model.fsdp.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload": "model.fsdp.optimizer_offload",
    f"{REF}.fsdp_config.param_offload": "ref.param_offload",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": "model.use_remove_padding",
    "algorithm.use_kl_in_reward": "algorithm.use_kl_in_reward",
    f"{CORRECTION}.bypass_mode": "actor.bypass_mode",
    f"{CORRECTION}.rollout_is_batch_normalize": "actor.tis_normalize",
    "algorithm.filter_groups.enable": "algorithm.filter_groups.enable",
    "critic.model.use_remove_padding": "critic.model.use_remove_padding",
    "critic.model.fsdp_config.param_offload": "critic.model.fsdp.param_offload",
    "data.filter_overlong_prompts": "data.filter_overlong_prompts",
    "reward_model.enable": "reward_model.enable",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable": "reward_score.overlong_buffer.enable",
    "trainer.val_before_train": "trainer.val_before_train",
}


@cache
def example_leaves(name: str) -> dict[str, Any]:
    return leaves(composed(*(f"{key}={value}" for key, value in EXAMPLES[name].items())))


def test_there_are_examples_of_every_kind():
    text = {name: json.dumps(options) for name, options in EXAMPLES.items()}
    kinds = ["grpo", "gae", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    for kind in [*kinds, "cispo", "geo_mean", "gpg", "optimal_token_baseline", "reinforce"]:
        assert any(f'"{kind}"' in options for options in text.values()), kind
    parts = ["lora_rank", "lora_adapter_path", "token_veto_threshold", "reward_model.enable", "overlong_buffer_cfg"]
    for part in [*parts, "0.5B", "72B"]:
        assert any(part in options for options in text.values()), part


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_published_command_gives_the_values_it_names(name: str):
    found, options = example_leaves(name), EXAMPLES[name]
    checked = 0
    for table, read in ((NUMBERS, float), (WORDS, str), (SWITCHES, lambda text: text.lower() == "true")):
        for theirs, ours in table.items():
            if theirs in options and options[theirs] != "null":
                assert found[ours] == read(options[theirs]), (theirs, ours)
                checked += 1
    assert checked >= 17
    assert found["data.train_files"] == [
        part.strip("' ") for part in options["data.train_files"].strip("[]").split(",")
    ]
    assert found["reward_manager.add_adv"] is False


@pytest.mark.slow
def test_train_sh_shows_the_configuration_of_verls_command():
    name = "tuning/0.5b/qwen2-0.5b_grpo-lora_1_h100_fsdp_vllm"
    options = [f"{key}={value}" for key, value in EXAMPLES[name].items()]
    command = ["bash", "train.sh", *options, "--cfg", "job", "--resolve"]
    shown = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    tree = shown.stdout[shown.stdout.index("data:\n") :]  # setup.sh may speak first
    assert leaves(OmegaConf.create(tree)) == example_leaves(name)
