"""The estimate of memory, against docs/memory.md and numbers worked out by hand."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config, Qwen2Model

from verl.config import PPOConfig, load_config
from verl.models.output_head import Scoring, logprobs_and_entropy
from verl.run import memory

QWEN_7B = memory.Shape(3584, 18944, 28, 3584, 512, 152064, False)
PARAMETERS = 28 * 3584 * 65024 + 2 * 152064 * 3584
"""28 layers of 3584 x (2 x 3584 + 2 x 512 + 3 x 18944), embedding and head of 152064 x 3584 each."""
PRESET = ["preset=paper", "experiment=verl_grpo", "trainer=gpus8"]
LAYER = 20 * 3584 + 8 * 18944 + 4 * 512
"""Bytes of one layer's activations, a token of packed rows."""


def phases(*overrides: str, judge: memory.Shape | None = None) -> dict[str, dict[str, float]]:
    """GB by phase and holder of Qwen2.5-7B with the paper's preset on 8 GPUs of 80 GB."""
    config = load_config(PPOConfig, "ppo_trainer", [*PRESET, *overrides])
    critic = QWEN_7B if config.uses_critic else None
    return memory.estimate(config, memory.Shapes(QWEN_7B, critic, judge), 80.0)


def test_qwen_7b_on_eight_gpus():
    found = phases()
    assert QWEN_7B.parameters == PARAMETERS == 7_615_283_200
    backward = found["update, backward"]
    expected = {"parameters": 4 * PARAMETERS / 8, "gradients": 4 * PARAMETERS / 8, "moments": PARAMETERS}
    # As many tokens as 8 of the longest sequences have: the inputs of 28 layers, and all activations of one.
    expected |= {"activations": 8 * 2048 * (28 * 3584 * 2 + LAYER), "logits": 20 * 1024 * 152064}
    assert {name: 1e9 * backward[name] for name in expected} == pytest.approx(expected)
    assert "engine" not in backward and found["generate"]["engine"] == 32
    # What docs/memory.md says of the preset.
    sums = {name: round(sum(parts.values())) for name, parts in found.items()}
    assert sums == {"generate": 47, "logprobs": 23, "update, backward": 36, "update, step": 23, "sync": 50}


MODELS = {
    "qwen2.5_1.5b": (1536, 8960, 28, 1536, 256, 151936, True),
    "llama3.2_3b": (3072, 8192, 28, 3072, 1024, 128256, True),
    "mistral_7b": (4096, 14336, 32, 4096, 1024, 32768, False),
    "qwen2.5_7b": (3584, 18944, 28, 3584, 512, 152064, False),
}


def test_the_table_of_configs_is_what_the_tool_says():
    rows = [line for line in (ROOT / "configs" / "README.md").read_text().splitlines() if line.count("|") == 6]
    for name, sizes in MODELS.items():
        peaks = []
        for gpus in (1, 2, 4, 8):
            config = load_config(PPOConfig, "ppo_trainer", [*PRESET, f"trainer.n_gpus_per_node={gpus}"])
            found = memory.estimate(config, memory.Shapes(memory.Shape(*sizes)), 80.0)
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
        (["actor.use_dynamic_bsz=false", "actor.micro_batch_size_per_gpu=16"], "update, backward", 43),
        (["model.fsdp.param_offload=true"], "generate", 42),
        (["model.fsdp.param_offload=true"], "update, backward", 34),
        (["model.fsdp.optimizer_offload=true"], "generate", 40),
        (["model.fsdp.optimizer_offload=true"], "update, backward", 28),
        (["model.fsdp.optimizer_offload=true"], "update, step", 23),
        (["model.fsdp.fsdp_size=4"], "update, backward", 53),
        (["model.logits_chunk_size=0"], "update, backward", 70),
        (["model.logits_chunk_size=0"], "logprobs", 71),
        (["model.ulysses_sequence_parallel_size=2"], "update, backward", 36),
        (["model.ulysses_sequence_parallel_size=2", "actor.ppo_max_token_len_per_gpu=8192"], "update, backward", 32),
        (["model.lora.rank=32"], "update, backward", 17),
        (["model.lora.rank=32"], "update, step", 4),
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
        (["rollout.name=hf"], "generate", "engine", None),
        (["rollout.name=hf"], "update, backward", "engine", None),
        (["rollout.kv_cache_memory_mb=4096"], "generate", "engine", 2 * PARAMETERS + 4096 * 2**20),
    ],
)
def test_memory_by_holder(overrides, phase, holder, num_bytes):
    found = phases(*overrides)[phase].get(holder)
    assert found == (num_bytes and pytest.approx(num_bytes / 1e9))


@pytest.mark.parametrize("packed", [False, True])
def test_activations_are_what_autograd_saves(packed):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    num_tokens = 16
    # Padding comes with a mask, packed rows have none.
    mask = torch.tensor([[packed] + [True] * (num_tokens - 1)]).long()
    totals = []
    for layers in (1, 3):
        model = Qwen2Model(Qwen2Config(**sizes, num_hidden_layers=layers, vocab_size=50)).bfloat16().eval()
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), attention_mask=mask, use_cache=False)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        totals.append(sum(saved[address].untyped_storage().nbytes() for address in saved.keys() - weights))
    overrides = ["model.param_dtype=bfloat16", f"model.use_remove_padding={packed}"]
    config = load_config(PPOConfig, "ppo_trainer", overrides).model
    shape = memory.Shape(64, 192, 2, 64, 32, 50, True)
    assert totals[1] - totals[0] == pytest.approx(shape.activations(num_tokens, config), rel=0.03)


class Memory(TorchDispatchMode):
    """Bytes that the tensors made within take at one time, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and (address := tensor.untyped_storage()._cdata) not in self.seen:
                self.seen.add(address)
                self.now += (size := tensor.untyped_storage().nbytes())
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self.forget, address, size)
        return output

    def forget(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now -= size


def peak(run: Callable[[], Any]) -> int:
    """Most bytes that a run's new tensors take at one time."""
    with Memory() as used:
        run()
    return used.most


@pytest.mark.parametrize(("dtype", "entropy"), [("bfloat16", False), ("bfloat16", True), ("float32", False)])
def test_logits_take_what_is_said(dtype, entropy):
    num_tokens, vocabulary = 64, 8192
    states, head = (torch.randn(n, 4, dtype=getattr(torch, dtype)) for n in (num_tokens, vocabulary))
    head.requires_grad_()

    def score(states: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(states @ head.T, torch.arange(num_tokens), Scoring(0.8, entropy))

    def learn() -> None:
        logprobs, entropies = checkpoint(score, states, use_reentrant=False)
        (logprobs.sum() + (entropies.sum() if entropy else 0)).backward()

    scored = memory.ITEMSIZE[dtype] + memory.LOGITS_BYTES
    learned = memory.ENTROPY_BYTES if entropy else scored
    numbers = num_tokens * vocabulary
    assert peak(torch.no_grad()(partial(score, states))) / numbers == pytest.approx(scored, rel=0.03)
    assert peak(learn) / numbers == pytest.approx(learned, rel=0.03)


def test_a_run_near_the_edge_of_its_gpus_is_warned(tmp_path: Path):
    Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip

    def warning(*overrides: str) -> str:
        config = load_config(PPOConfig, "ppo_trainer", [*PRESET, f"model.path={tmp_path}", *overrides])
        return memory.memory_warning(config, 80.0)

    assert warning() == ""
    line = warning("rollout.gpu_memory_utilization=0.7")
    assert line.startswith("warning: sync: needs about 73.8 GB of a GPU with 80.0 (engine 56.0, ")
    assert "; if memory runs out: lower rollout.gpu_memory_utilization; use more workers" in line
    line = warning("model.gradient_checkpointing=false")
    assert (
        line.startswith("warning: update, backward: needs about 132.3 GB")
        and "; if memory runs out: lower actor.micro" in line
    )


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
        shape = memory.shape_of(replace(small_config.model, path=str(tmp_path / name)))
        assert (shape is not None) == (name == "llama"), name
