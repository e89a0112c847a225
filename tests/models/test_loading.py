"""Reading a checkpoint parameter by parameter, without the whole model in memory."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tests.kit import TINY, save_random_model
from verl.models.loading import load_sharded_model, tensors_in_files

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
READ: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**TINY),
    "tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "llama3": LlamaConfig(**TINY, rope_parameters=ROPE | {"original_max_position_embeddings": 64}),
    "phi3": Phi3Config(**TINY),
    "gpt2": GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16),
    "experts": Qwen3MoeConfig(**TINY, **EXPERTS),
    "experts under another name": MixtralConfig(**TINY, num_local_experts=3),
}


def saved(config: PreTrainedConfig, folder: Path) -> str:
    return save_random_model(config, folder, dtype=torch.bfloat16, max_shard_size="20KB")


@pytest.mark.parametrize("name", READ)
def test_parameters_in_files_match_transformers(name: str, tmp_path: Path):
    path = saved(READ[name], tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    empty = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map="meta")
    read = tensors_in_files(empty, path)
    assert read is not None
    expected = dict(chain(whole.named_parameters(), whole.named_buffers()))
    assert [place for place, _ in chain(empty.named_parameters(), empty.named_buffers())] == list(expected)
    for place, value in expected.items():
        assert torch.equal(read(place).to(value.dtype), value), place


def test_buffer_that_a_model_computes_is_not_read_from_files(tmp_path: Path):
    path = saved(Gemma2Config(**TINY), tmp_path)
    assert tensors_in_files(AutoModelForCausalLM.from_pretrained(path, device_map="meta"), path) is None


@pytest.mark.parametrize(("name", "rank"), [("qwen2", 0), ("qwen2", 2), ("experts", 0), ("experts", 2)])
def test_sharded_model_is_never_built_whole(name: str, rank: int, model_config, single_mesh, tmp_path: Path):
    path = saved(READ[name], tmp_path / "model")
    config = replace(model_config, path=path, lora=replace(model_config.lora, rank=rank))
    with mock.patch.object(
        AutoModelForCausalLM, "from_pretrained", wraps=AutoModelForCausalLM.from_pretrained
    ) as build:
        torch.manual_seed(1)
        model = load_sharded_model(config, single_mesh, trainable=True)
    # With adapters once more, for their shapes.
    assert {call.kwargs.get("device_map") for call in build.call_args_list} == {"meta"}
    with mock.patch("verl.models.loading.tensors_in_files", lambda *_: None):
        torch.manual_seed(1)
        whole = load_sharded_model(config, single_mesh, trainable=True)
    for (place, value), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(value.full_tensor(), expected.full_tensor()), place
