"""What run_ppo finds wrong before it starts anything."""

import json
from dataclasses import replace

import pytest
import ray
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from verl.checkpoint.folders import begin_checkpoint, complete_checkpoint
from verl.config import PPOConfig
from verl.config.errors import ConfigError
from verl.trainer.ppo.run import run_ppo


def refused(config: PPOConfig, message: str) -> None:
    was_running = ray.is_initialized()
    with pytest.raises(ConfigError, match=message):
        run_ppo(config)
    assert ray.is_initialized() == was_running


def with_critic(config: PPOConfig, **model: object) -> PPOConfig:
    critic = replace(config.critic, model=replace(config.critic.model, **model))
    return replace(config, algorithm=replace(config.algorithm, adv_estimator="gae"), critic=critic)


def test_a_reward_function_that_is_not_there(small_config):
    scoring = replace(small_config.reward_score, custom_functions=["*=no_such_module:score"])
    refused(replace(small_config, reward_score=scoring), "importing no_such_module raised ModuleNotFoundError")


def test_a_warm_up_without_end(small_config):
    config = with_critic(small_config)
    trainer = replace(config.trainer, critic_warmup=2)
    refused(replace(config, trainer=trainer), "^trainer.critic_warmup=2: the run has 2 steps, and none would be left")


def test_a_critic_of_another_vocabulary(small_config, tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    refused(with_critic(small_config, path=str(tmp_path)), "^critic.model.path=.*: its tokenizer is not that of model")


def test_a_reward_model_without_a_tokenizer(small_config, tiny_model, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    judge = replace(small_config.reward_model, enable=True, model=replace(small_config.model, path=str(tmp_path)))
    refused(replace(small_config, reward_model=judge), "^reward_model.model.path=.*: no tokenizer there")


def test_sequences_that_a_model_was_not_made_for(small_config):
    long = replace(small_config, data=replace(small_config.data, max_response_length=500))
    refused(long, r"^data.max_prompt_length\+data.max_response_length=\d+: model.path=.* takes sequences of 512 tokens")
    judge = replace(small_config.reward_model, enable=True, model=small_config.model, max_length=513)
    refused(
        replace(small_config, reward_model=judge), r"^reward_model.max_length=513: reward_model.model.path=.* takes"
    )


def test_another_order_of_prompts_than_the_checkpoints(small_config, tiny_model, tmp_path):
    folder = begin_checkpoint(tmp_path, 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    writer = HuggingFaceStorageWriter(str(folder / "actor" / "shards"), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    complete_checkpoint(folder, tmp_path, 1, json.dumps({"job": "ppo", "num_examples": 16, "shuffle": False}))
    trainer = replace(small_config.trainer, default_local_dir=str(tmp_path))
    refused(replace(small_config, trainer=trainer), "^data.shuffle=True: was False when .*/global_step_1 was written")


def test_layers_that_the_model_has_not(small_config):
    calculator = replace(small_config.calculator, layers=[0, 4])
    refused(
        replace(small_config, calculator=calculator),
        r"^calculator.layers=\[0, 4\]: the model has 4 layers, from -4 to 3$",
    )
