"""Runs that do not fit their GPUs are refused before anything is loaded, with options that make them fit."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from verl.config import PPOConfig, load_config
from verl.config.errors import ConfigError
from verl.run.memory import Shape, Shapes, shape_of
from verl.run.memory_check import check_memory, fitting_changes

QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip


def options(folder: Path, *overrides: str) -> PPOConfig:
    """The paper's preset with padded rows, for Qwen2.5-7B on 8 GPUs."""
    QWEN_7B.save_pretrained(folder)
    padded = ["model.use_remove_padding=false", "actor.use_dynamic_bsz=false", "actor.micro_batch_size_per_gpu=8"]
    start = ["preset=paper", "experiment=verl_grpo", "trainer=gpus8", f"model.path={folder}", *padded]
    return load_config(PPOConfig, "ppo_trainer", [*start, *overrides])


def found(config: PPOConfig, device_gb: float) -> list[str]:
    lines: list[str] = []
    check_memory(config, device_gb, lines.append)
    return lines


def test_what_does_not_fit_is_refused_and_told_how_it_would(tmp_path: Path):
    config = options(tmp_path)
    assert found(config, 85.0) == []
    greedy = options(tmp_path, "model.gradient_checkpointing=false")
    with pytest.raises(ConfigError) as error:
        check_memory(greedy, 80.0, print)
    assert str(error.value) == (
        "trainer.check_memory=True: update, backward: needs about 137.9 GB of a GPU with 80.0 (activations 109.0, "
        "moments 7.6, parameters 3.8); actor.micro_batch_size_per_gpu=2 would take 56.2 GB; "
        "or set it to false to try all the same"
    )
    # An engine that leaves too little: another phase, another option.
    with pytest.raises(
        ConfigError, match=r"^trainer\.check_memory=True: sync: .*\(engine 76\.0, .*utilization=0\.\d+ "
    ):
        check_memory(options(tmp_path, "rollout.gpu_memory_utilization=0.95"), 80.0, print)


def test_near_the_edge_there_is_a_warning(tmp_path: Path):
    config = options(tmp_path, "rollout.gpu_memory_utilization=0.7")
    (line,) = found(config, 80.0)
    assert line.startswith("warning: sync: needs about 73.8 GB of a GPU with 80.0 (engine 56.0, ")
    assert line.endswith("; rollout.gpu_memory_utilization=0.65 would take 69.8 GB")


def test_changes_that_are_told_of_are_enough_or_none_are_known(tmp_path: Path):
    shapes = Shapes(Shape.of(QWEN_7B))
    # On one GPU the master weights, gradients and moments of all parameters are at work in the step.
    alone = options(tmp_path, "trainer.n_gpus_per_node=1")
    with pytest.raises(ConfigError, match=r"needs about \d+\.\d GB of a GPU with 80\.0"):
        check_memory(alone, 80.0, print)
    told = fitting_changes(config := options(tmp_path, "actor.micro_batch_size_per_gpu=64"), shapes, 80.0)
    field, _, value = told.partition(" ")[0].partition("=")
    assert field == "actor.micro_batch_size_per_gpu" and int(value) < 64
    fixed = replace(config, actor=replace(config.actor, micro_batch_size_per_gpu=int(value)))
    assert found(fixed, 80.0) == []
    with pytest.raises(ConfigError, match=r"; more GPUs or adapters \(model\.lora\.rank=32\)"):
        check_memory(options(tmp_path, "rollout.free_cache_engine=false"), 1.0, print)


def test_only_models_that_the_terms_describe_are_checked(tmp_path: Path, small_config):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    models = {
        "llama": LlamaConfig(**sizes, **heads),
        "mixtral": MixtralConfig(**sizes, **heads, num_local_experts=4),
        "gpt2": GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16),
    }
    for name, config in models.items():
        config.save_pretrained(tmp_path / name)
        shape = shape_of(replace(small_config.model, path=str(tmp_path / name)))
        assert (shape is not None) == (name == "llama"), name
