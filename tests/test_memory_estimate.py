"""The estimate of memory, against docs/memory.md and numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from tests.kit import ppo_config
from verl.run import memory


def shape(hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool) -> Qwen2Config:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv}
    return Qwen2Config(**sizes, **heads_of, vocab_size=vocabulary, tie_word_embeddings=tied)


QWEN_7B = shape(3584, 18944, 28, 28, 4, 152064, False)
PARAMETERS = 28 * 3584 * 65024 + 2 * 152064 * 3584
"""28 layers of 3584 x (2 x 3584 + 2 x 512 + 3 x 18944), embedding and head of 152064 x 3584 each."""
PRESET = ["preset=paper", "experiment=verl_grpo", "trainer=gpus8"]
TAUGHT = ["experiment=sdpo"]
TWO_TEACHERS = ["teacher.model.path=/m", 'teacher.by_source=["a=/a","b=/a"]', "teacher.loss=jsd"]
OFFLOADED = "teacher.model.fsdp.param_offload=true"
LAYER = 20 * 3584 + 8 * 18944 + 4 * 512
"""Bytes of one layer's activations, a token of packed rows."""


def phases(*overrides: str) -> dict[str, dict[str, float]]:
    """GB by phase and holder of Qwen2.5-7B with the paper's preset on 8 GPUs of 80 GB."""
    config = ppo_config(*PRESET, *overrides)
    return memory.estimate(config, 80.0, dict.fromkeys(config.models, QWEN_7B))


def test_qwen_7b_on_eight_gpus():
    found = phases()
    assert memory.parameters_of(QWEN_7B)[0] == PARAMETERS == 7_615_283_200
    backward = found["update, backward"]
    expected = {"parameters": 4 * PARAMETERS / 8, "gradients": 4 * PARAMETERS / 8, "moments": PARAMETERS}
    # As many tokens as 8 of the longest sequences have: the inputs of 28 layers, and all activations of one.
    expected |= {"activations": 8 * 2048 * (28 * 3584 * 2 + LAYER), "logits": 20 * 1024 * 152064}
    assert {name: 1e9 * backward[name] for name in expected} == pytest.approx(expected)
    engine = {"engine weights", "hidden states", "KV cache"}
    assert not engine & backward.keys() and sum(found["generate"][name] for name in engine) == pytest.approx(32)
    # What docs/memory.md says of the preset.
    sums = {name: round(sum(parts.values())) for name, parts in found.items()}
    assert sums == {"generate": 47, "logprobs": 23, "update, backward": 36, "update, step": 23, "sync": 50}


MODELS = {
    "qwen2.5_1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "llama3.2_3b": (3072, 8192, 28, 24, 8, 128256, True),
    "mistral_7b": (4096, 14336, 32, 32, 8, 32768, False),
    "qwen2.5_7b": (3584, 18944, 28, 28, 4, 152064, False),
}


def test_table_of_configs_is_what_the_tool_says():
    rows = [line for line in (ROOT / "configs" / "README.md").read_text().splitlines() if line.count("|") == 6]
    for name, sizes in MODELS.items():
        peaks = []
        for gpus in (1, 2, 4, 8):
            config = ppo_config(*PRESET, f"trainer.n_gpus_per_node={gpus}")
            found = memory.estimate(config, 80.0, {"model": shape(*sizes)})
            peak = round(max(sum(parts.values()) for parts in found.values()))
            peaks.append(f"{peak}" if peak <= 80 else f"**{peak}**")
        assert f"| `{name}` | {' | '.join(peaks)} |" in rows


@pytest.mark.parametrize(
    ("overrides", "phase", "total"),
    [
        (["model.gradient_checkpointing=false"], "update, backward", 132),
        (["model.gradient_checkpointing=false", "actor.ppo_max_token_len_per_gpu=2048"], "update, backward", 42),
        (["actor.ppo_max_token_len_per_gpu=32768"], "update, backward", 43),
        (["actor.use_dynamic_bsz=false"], "update, backward", 36),
        (["model.fsdp.param_offload=true"], "generate", 42),
        (["model.fsdp.optimizer_offload=true"], "update, backward", 28),
        (["model.fsdp.optimizer_offload=true"], "update, step", 23),
        (["model.fsdp.fsdp_size=4"], "update, backward", 53),
        (["model.logits_chunk_size=0"], "update, backward", 70),
        (["model.ulysses_sequence_parallel_size=2", "actor.ppo_max_token_len_per_gpu=8192"], "update, backward", 32),
        (["model.lora.rank=32"], "update, backward", 17),
        (["rollout.free_cache_engine=false"], "update, backward", 68),
    ],
)
def test_switches_as_documented(overrides, phase, total):
    assert round(sum(phases(*overrides)[phase].values())) == total


@pytest.mark.parametrize(
    ("overrides", "phase", "holder", "num_bytes"),
    [
        (["model.gradient_checkpointing=false"], "update, backward", "activations", 8 * 2048 * 28 * LAYER),
        # Cache of 2 x 28 layers x 512 columns in bfloat16 for 256 sequences of 2048 tokens, and no engine.
        (["rollout.name=hf"], "generate", "KV cache", 2 * 28 * 512 * 2 * 256 * 2048),
        (["rollout.name=hf"], "generate", "whole policy", 2 * PARAMETERS),
        (["rollout.name=hf"], "generate", "engine weights", None),
        (["rollout.name=hf"], "update, backward", "KV cache", None),
        (["rollout.kv_cache_memory_mb=4096"], "generate", "engine weights", 2 * PARAMETERS),
        (["rollout.kv_cache_memory_mb=4096"], "generate", "KV cache", 4096 * 2**20),
        (["rollout.nnodes=1", "rollout.n_gpus_per_node=8"], "generate", "moments", None),
        # The policy is its own teacher, without or with a moving average in float32.
        ([*TAUGHT, "teacher.update_rate=1"], "generate", "teacher", None),
        ([*TAUGHT, "teacher.update_rate=1"], "update, backward", "logits", 3 * 20 * 1024 * 152064),
        (TAUGHT, "generate", "teacher", 4 * PARAMETERS / 8),
        ([*TAUGHT, "teacher.model.fsdp.param_offload=true"], "generate", "teacher", 0.0),
        ([*TAUGHT, "teacher.model.fsdp.param_offload=true"], "update, backward", "teacher", 4 * PARAMETERS / 8),
        # Two teachers in bfloat16, one of them for two sources. Offloaded, one at a time is on the device.
        (TWO_TEACHERS, "generate", "teacher", 2 * 2 * PARAMETERS / 8),
        (TWO_TEACHERS, "update, backward", "teacher", 2 * 2 * PARAMETERS / 8),
        ([*TWO_TEACHERS, OFFLOADED], "generate", "teacher", 0.0),
        ([*TWO_TEACHERS, OFFLOADED], "update, backward", "teacher", 2 * PARAMETERS / 8),
        # The critic's update: 16 bytes a parameter over 8 workers; 12 of them in other phases.
        (["algorithm=gae"], "critic, step", "temporary", PARAMETERS / 2),
        (["algorithm=gae"], "critic, step", "critic moments", PARAMETERS),
        (["algorithm=gae"], "generate", "critic parameters", PARAMETERS / 2),
        (["algorithm=gae"], "critic, backward", "parameters", PARAMETERS / 2),
        (["reward_score.judge.enable=true", "reward_score.judge.model.path=frozen"], "judge", "judge", 0.3 * 80e9),
    ],
)
def test_memory_by_holder(overrides, phase, holder, num_bytes):
    found = phases(*overrides)[phase].get(holder)
    assert found == (num_bytes if not num_bytes else pytest.approx(num_bytes / 1e9))


def test_run_near_the_edge_of_its_gpus_is_warned(tmp_path: Path):
    QWEN_7B.save_pretrained(tmp_path)

    def warning(*overrides: str) -> str:
        config = ppo_config(*PRESET, f"model.path={tmp_path}", *overrides)
        return memory.memory_warning(config, 80.0)

    assert warning() == ""
    line = warning("rollout.gpu_memory_utilization=0.7")
    assert line.startswith("warning: sync: needs about 73.8 GB of a GPU with 80.0 (KV cache ")
    assert "; if memory runs out: lower rollout.gpu_memory_utilization; use more workers" in line
    line = warning("model.gradient_checkpointing=false")
    assert line.startswith("warning: update, backward: needs about 132.3 GB")
    assert "; if memory runs out: lower actor.micro" in line


def test_only_models_that_the_terms_describe_are_estimated(tmp_path: Path, small_config):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    models = {
        "llama": LlamaConfig(**sizes, **heads),
        "mixtral": MixtralConfig(**sizes, **heads, num_local_experts=4),
        "gpt2": GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16),
    }
    for name, config in models.items():
        config.save_pretrained(tmp_path / name)
        known = memory.shape_of(replace(small_config.model, path=str(tmp_path / name)))
        assert (known is not None) == (name == "llama"), name
