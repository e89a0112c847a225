"""Every experiment composes, says where it comes from, and is listed; the code that it names takes its options."""

import re
from pathlib import Path

import pytest
from conftest import ROOT, small_overrides
from transformers import PreTrainedTokenizerBase

from tests.kit import ppo_config
from verl.config import PPOConfig
from verl.method.calls import MethodCalls
from verl.rank.reward_manager import RewardManager
from verl.run.setup import check_method_and_loss
from verl.trainer.ppo.advantages import AdvantageEstimation
from verl.workers.policy_loss import CustomLoss, check_policy_loss

EXPERIMENTS = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
README = (ROOT / "configs" / "README.md").read_text()
OURS = "arithmetic_tools distill grpo ppo verl_grpo verl_grpo_async verl_ppo released_code released_code_later".split()


def checked_method(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> MethodCalls:
    """The method of a run whose loss, advantages and method fit each other."""
    loss = CustomLoss(config.actor)
    check_policy_loss(config, loss)
    AdvantageEstimation(config, RewardManager(config.reward_manager))
    method = MethodCalls(config, tokenizer, (), 10)
    check_method_and_loss(config, method, loss)
    return method


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_composes_with_the_papers_preset(path: Path, tiny_tokenizer):
    config = ppo_config("preset=paper", f"experiment={path.stem}")
    assert config.trainer.experiment_name == path.stem
    method = checked_method(config, tiny_tokenizer)
    assert (type(method.method).__module__ == "verl.method.method") == (config.trainer.method is None)
    if path.stem not in OURS:
        comment = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
        assert re.search(r"arXiv \d{4}\.\d{5}", comment), "name the source in the first comment"
    (row,) = (line for line in README.splitlines() if line.startswith(f"| `{path.stem}` |"))
    assert all(method.overrides(place) for place in re.findall(r"`(?:Method\.)?(\w+)`", row.split("|")[3])), row


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_fits_the_embedded_task(path: Path, tiny_tokenizer, tiny_model, arithmetic_prompts, tmp_path):
    overrides = [f"experiment={path.stem}", *small_overrides(tiny_model, arithmetic_prompts, tmp_path / "run")]
    # More than the overlong buffer of dapo, and a group in a micro-batch for pacs.
    options = ["data.max_response_length=64", "actor.micro_batch_size_per_gpu=4"]
    config = ppo_config(*overrides, *options)
    assert config.data.train_files and checked_method(config, tiny_tokenizer)
