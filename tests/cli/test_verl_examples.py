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

# veRL's group, ours, and names that are the same in both; apart from the translator's own table.
SAME_NAMES = [
    ("data", "data", "train_batch_size max_prompt_length max_response_length truncation filter_overlong_prompts"),
    (
        ACTOR,
        "actor",
        "optim.lr optim.weight_decay ppo_mini_batch_size ppo_max_token_len_per_gpu clip_ratio_high entropy_coeff "
        "kl_loss_coef kl_loss_type use_kl_loss use_dynamic_bsz",
    ),
    (ACTOR, "model", "ulysses_sequence_parallel_size"),
    (f"{ACTOR}.fsdp_config", "model.fsdp", "fsdp_size param_offload optimizer_offload"),
    (f"{REF}.fsdp_config", "ref", "param_offload"),
    ("actor_rollout_ref.model", "model", "path use_remove_padding lora_adapter_path"),
    (ROLLOUT, "rollout", "n temperature name gpu_memory_utilization val_kwargs.n val_kwargs.top_p"),
    ("algorithm", "algorithm", "kl_ctrl.kl_coef adv_estimator use_kl_in_reward filter_groups.enable"),
    (CORRECTION, CORRECTION, "rollout_token_veto_threshold"),
    ("critic", "critic", "optim.lr model.path model.use_remove_padding"),
    ("critic.model.fsdp_config", "critic.model.fsdp", "param_offload"),
    ("reward_model", "reward_model", "enable model.path"),
    ("+reward_model.reward_kwargs.overlong_buffer_cfg", "reward_score.overlong_buffer", "enable len penalty_factor"),
    (
        "trainer",
        "trainer",
        "n_gpus_per_node nnodes save_freq total_epochs total_training_steps experiment_name project_name "
        "val_before_train",
    ),
]
OURS = {f"{theirs}.{name}": f"{ours}.{name}" for theirs, ours, names in SAME_NAMES for name in names.split()} | {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "actor.micro_batch_size_per_gpu",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "critic.ppo_micro_batch_size_per_gpu": "critic.micro_batch_size_per_gpu",
    f"{CORRECTION}.rollout_is": "actor.tis_level",
    f"{CORRECTION}.rollout_is_threshold": "actor.tis_cap",
    f"{CORRECTION}.rollout_is_batch_normalize": "actor.tis_normalize",
    f"{CORRECTION}.bypass_mode": "actor.bypass_mode",
}
"""veRL's option -> ours, which has the value that a command names."""


def read(text: str) -> bool | float | str:
    """A value as a person reads it."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text


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
    named = {theirs: ours for theirs, ours in OURS.items() if options.get(theirs, "null") != "null"}
    assert len(named) >= 17
    for theirs, ours in named.items():
        assert found[ours] == read(options[theirs]), (theirs, ours)
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
