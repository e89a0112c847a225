"""The recipes around sampling compose, and the classes that they name can be made."""

import pytest
from conftest import small_overrides

from verl.config import PPOConfig, load_config
from verl.trainer.ppo.hooks import SamplingHooks


@pytest.mark.parametrize("name", ["drive", "ead", "ghpo", "pcl", "rorecomp"])
def test_a_recipe_can_start(name, tiny_model, tiny_tokenizer, arithmetic_prompts, tmp_path):
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, tmp_path), f"experiment={name}"]
    config = load_config(PPOConfig, "ppo_trainer", overrides)
    assert config.trainer.experiment_name == name
    hooks = SamplingHooks(config, 10, [], tiny_tokenizer)
    made = [hooks.selector, hooks.regenerator, hooks.recomposer, hooks.schedule]
    assert sum(hook is not None for hook in made) == 1
