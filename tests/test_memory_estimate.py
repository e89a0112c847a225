"""The estimate of scripts/estimate_memory.py, against docs/memory.md and numbers worked out by hand."""

import runpy

import pytest
import torch
from conftest import ROOT
from transformers import Qwen2Config, Qwen2Model

from verl.config import PPOConfig, load_config

QWEN_7B = (3584, 18944, 28, 3584, 512, 152064, False)
PAPER = ["preset=paper", "experiment=verl_grpo", "trainer=gpus8"]


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "estimate_memory.py"))


def phases(script: dict, *overrides: str) -> dict[str, dict[str, float]]:
    config = load_config(PPOConfig, "ppo_trainer", [*PAPER, *overrides])
    return script["estimate"](config, script["Shape"](*QWEN_7B), 80.0)


def test_qwen_7b_on_eight_gpus(script):
    found = phases(script)
    # 28 layers of 3584 x (2 x 3584 + 2 x 512 + 3 x 18944), embedding and head of 152064 x 3584 each.
    parameters = 28 * 3584 * 65024 + 2 * 152064 * 3584
    assert script["Shape"](*QWEN_7B).parameters == parameters == 7_615_283_200
    backward = found["update, backward"]
    assert backward["parameters"] == backward["gradients"] == pytest.approx(4 * parameters / 8 / 1e9)
    assert backward["moments"] == pytest.approx(parameters / 1e9)
    # 8 sequences: the inputs of 28 layers, and all activations of one.
    one = 20 * 3584 + 8 * 18944 + 4 * 512
    assert backward["activations"] == pytest.approx(8 * 2048 * (28 * 3584 * 2 + one) / 1e9)
    whole = phases(script, "model.gradient_checkpointing=false")["update, backward"]
    assert whole["activations"] == pytest.approx(8 * 2048 * 28 * one / 1e9)
    assert backward["logits"] == pytest.approx(16 * 1024 * 152064 / 1e9)
    assert "engine" not in backward and found["generate"]["engine"] == 32
    # What docs/memory.md says of the preset.
    sums = {name: round(sum(parts.values())) for name, parts in found.items()}
    assert sums == {"generate": 49, "logprobs": 22, "update, backward": 37, "update, step": 25, "sync": 51}


@pytest.mark.parametrize(
    ("overrides", "phase", "total"),
    [
        (["model.gradient_checkpointing=false"], "update, backward", 134),
        (["model.gradient_checkpointing=false", "actor.micro_batch_size_per_gpu=1"], "update, backward", 43),
        (["actor.micro_batch_size_per_gpu=16"], "update, backward", 44),
        (["model.fsdp.param_offload=true"], "generate", 42),
        (["model.fsdp.param_offload=true"], "update, backward", 33),
        (["model.fsdp.optimizer_offload=true"], "update, backward", 30),
        (["model.fsdp.optimizer_offload=true"], "update, step", 25),
        (["model.fsdp.fsdp_size=4"], "update, backward", 56),
        (["model.logits_chunk_size=0"], "update, backward", 65),
        (["model.ulysses_sequence_parallel_size=2", "model.use_remove_padding=true"], "update, backward", 34),
        (["model.lora.rank=32"], "update, backward", 19),
        (["model.lora.rank=32"], "update, step", 6),
        (["rollout.free_cache_engine=false"], "update, backward", 69),
    ],
)
def test_switches_as_documented(script, overrides, phase, total):
    assert round(sum(phases(script, *overrides)[phase].values())) == total


def test_a_budget_of_tokens_is_that_of_each_worker(script):
    dynamic = ["actor.use_dynamic_bsz=true", "model.use_remove_padding=true"]
    one, two = (phases(script, *dynamic, f"model.ulysses_sequence_parallel_size={size}") for size in (1, 2))
    assert one["update, backward"]["activations"] == two["update, backward"]["activations"]
    assert one["logprobs"]["logits"] == two["logprobs"]["logits"]


def test_activations_are_what_autograd_saves(script, small_config):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = script["Shape"](64, 192, 2, 64, 32, 50, True)
    num_tokens = 32
    saved = []
    for layers in (1, 3):
        model = Qwen2Model(Qwen2Config(**sizes, num_hidden_layers=layers, vocab_size=50)).bfloat16().eval()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages, kept = {}, []

        def pack(tensor, storages=storages, kept=kept, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
                kept.append(tensor)  # so that no other tensor gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
        saved.append(sum(storages.values()))
    config = load_config(PPOConfig, "ppo_trainer", ["model.param_dtype=bfloat16"]).model
    assert (saved[1] - saved[0]) == pytest.approx(shape.activations(num_tokens, config), rel=0.03)
