"""The estimate of scripts/estimate_memory.py, against docs/memory.md and numbers worked out by hand."""

import runpy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2Model

from verl.config import PPOConfig, load_config
from verl.config.ppo import SamplingConfig
from verl.models.output_head import score_logits
from verl.rollout.decoding import draw, logits_processors

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
    one = 20 * 3584 + 8 * 18944 + 4 * 3584
    assert backward["activations"] == pytest.approx(8 * 2048 * (28 * 3584 * 2 + one) / 1e9)
    whole = phases(script, "model.gradient_checkpointing=false")["update, backward"]
    assert whole["activations"] == pytest.approx(8 * 2048 * 28 * one / 1e9)
    assert backward["logits"] == pytest.approx(20 * 1024 * 152064 / 1e9)
    assert "engine" not in backward and found["generate"]["engine"] == 32
    # What docs/memory.md says of the preset.
    sums = {name: round(sum(parts.values())) for name, parts in found.items()}
    assert sums == {"generate": 49, "logprobs": 23, "update, backward": 38, "update, step": 25, "sync": 53}


MODELS = {
    "qwen2.5_1.5b": (1536, 8960, 28, 1536, 256, 151936, True),
    "llama3.2_3b": (3072, 8192, 28, 3072, 1024, 128256, True),
    "mistral_7b": (4096, 14336, 32, 4096, 1024, 32768, False),
    "qwen2.5_7b": QWEN_7B,
}


def test_the_table_of_configs_is_what_the_tool_says(script):
    rows = [line for line in (ROOT / "configs" / "README.md").read_text().splitlines() if line.count("|") == 6]
    for name, sizes in MODELS.items():
        peaks = []
        for gpus in (1, 2, 4, 8):
            config = load_config(PPOConfig, "ppo_trainer", [*PAPER, f"trainer.n_gpus_per_node={gpus}"])
            found = script["estimate"](config, script["Shape"](*sizes), 80.0)
            peak = round(max(sum(parts.values()) for parts in found.values()))
            peaks.append(f"{peak}" if peak <= 80 else f"**{peak}**")
        assert f"| `{name}` | {' | '.join(peaks)} |" in rows


@pytest.mark.parametrize(
    ("overrides", "phase", "total"),
    [
        (["model.gradient_checkpointing=false"], "update, backward", 140),
        (["model.gradient_checkpointing=false", "actor.micro_batch_size_per_gpu=1"], "update, backward", 44),
        (["actor.micro_batch_size_per_gpu=16"], "update, backward", 45),
        (["model.fsdp.param_offload=true"], "generate", 42),
        (["model.fsdp.param_offload=true"], "update, backward", 34),
        (["model.fsdp.optimizer_offload=true"], "update, backward", 30),
        (["model.fsdp.optimizer_offload=true"], "update, step", 25),
        (["model.fsdp.fsdp_size=4"], "update, backward", 57),
        (["model.logits_chunk_size=0"], "update, backward", 72),
        (["model.ulysses_sequence_parallel_size=2", "model.use_remove_padding=true"], "update, backward", 34),
        (["model.lora.rank=32"], "update, backward", 19),
        (["model.lora.rank=32"], "update, step", 6),
        (["rollout.free_cache_engine=false"], "update, backward", 70),
    ],
)
def test_switches_as_documented(script, overrides, phase, total):
    assert round(sum(phases(script, *overrides)[phase].values())) == total


def test_a_budget_of_tokens_is_that_of_each_worker(script):
    dynamic = ["actor.use_dynamic_bsz=true", "model.use_remove_padding=true"]
    one, two = (phases(script, *dynamic, f"model.ulysses_sequence_parallel_size={size}") for size in (1, 2))
    assert one["update, backward"]["activations"] == two["update, backward"]["activations"]
    assert one["logprobs"]["logits"] == two["logprobs"]["logits"]


@pytest.mark.parametrize("packed", [False, True])
def test_activations_are_what_autograd_saves(script, packed):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = script["Shape"](64, 192, 2, 64, 32, 50, True)
    num_tokens = 16
    # Padding comes with a mask, packed rows have none.
    mask = torch.tensor([[packed] + [True] * (num_tokens - 1)]).long()
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
            model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), attention_mask=mask, use_cache=False)
        saved.append(sum(storages.values()))
    overrides = ["model.param_dtype=bfloat16", f"model.use_remove_padding={packed}"]
    config = load_config(PPOConfig, "ppo_trainer", overrides).model
    assert (saved[1] - saved[0]) == pytest.approx(shape.activations(num_tokens, config), rel=0.03)


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


@pytest.mark.parametrize(("dtype", "entropy"), [("bfloat16", False), ("bfloat16", True), ("float32", False)])
def test_logits_take_what_is_said(script, dtype, entropy):
    num_tokens, vocabulary = 64, 8192
    states, head = (torch.randn(n, 4, dtype=getattr(torch, dtype)) for n in (num_tokens, vocabulary))
    head.requires_grad_()
    targets = torch.arange(num_tokens)

    def score(states: Tensor) -> tuple[Tensor, Tensor]:
        logits = states @ head.T
        return score_logits(logits, targets, 0.8, entropy)

    def peak(run: Callable[[], Any]) -> float:
        with Memory() as memory:
            run()
        return memory.most / num_tokens / vocabulary

    def learn() -> None:
        logprobs, entropies = checkpoint(score, states, use_reentrant=False)
        (logprobs.sum() + (entropies.sum() if entropy else 0)).backward()

    scored = script["ITEMSIZE"][dtype] + script["LOGITS_BYTES"]
    assert peak(torch.no_grad()(partial(score, states))) == pytest.approx(scored, rel=0.03)
    assert peak(learn) == pytest.approx(script["ENTROPY_BYTES"] if entropy else scored, rel=0.03)


def test_drawing_a_token_takes_what_is_said(script):
    logits, sampling = torch.randn(16, 8192).bfloat16(), SamplingConfig(1, 0.8, 0.9, 50)
    with Memory() as memory, torch.no_grad():
        output = logits.clone()
        distribution = logits_processors(sampling)(None, output.float()).log_softmax(dim=-1)
        draw(distribution, torch.zeros(16, dtype=torch.float64))
    assert memory.most / logits.numel() == pytest.approx(script["SAMPLING_BYTES"], rel=0.05)


def test_what_else_a_run_can_hold(script):
    policy = phases(script)["generate"]["parameters"]
    shape = script["Shape"](*QWEN_7B)
    overrides = [*PAPER, "reward_model.enable=true", "reward_model.model.path=judge"]
    config = load_config(PPOConfig, "ppo_trainer", overrides)
    for parts in script["estimate"](config, shape, 80.0, shape).values():
        assert parts["reward model"] == policy
    # Cache of 2 x 28 layers x 512 columns in bfloat16 for 256 sequences of 2048 tokens, and no engine.
    through_transformers = phases(script, "rollout.name=hf")
    assert through_transformers["generate"]["KV cache"] == pytest.approx(2 * 28 * 512 * 2 * 256 * 2048 / 1e9)
    assert through_transformers["generate"]["whole policy"] == pytest.approx(2 * shape.parameters / 1e9)
    assert not any("engine" in parts for parts in through_transformers.values())
    fixed = phases(script, "rollout.kv_cache_memory_mb=4096")["generate"]["engine"]
    assert fixed == pytest.approx((2 * shape.parameters + 4096 * 2**20) / 1e9)
    # A critic that keeps its activations is what needs most.
    both = phases(script, "algorithm=gae", "critic.model.gradient_checkpointing=false")
    backward = both["critic, backward"]
    assert backward["activations"] == pytest.approx(shape.activations(8 * 2048, config.model) / 1e9 * 28, rel=1)
    assert max(both, key=lambda name: sum(both[name].values())) == "critic, backward"
