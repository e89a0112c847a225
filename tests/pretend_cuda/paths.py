"""Parts of a training step on the pretended GPU, whose numbers are compared with the CPU's; ``runs.py`` runs them.

Each path is a function of the device. It makes what it needs, lets ``gpu.waits`` begin, and runs one unit: two
micro-batches, one batch of responses, one token of decoding.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.pretend_cuda import stub  # isort: skip  # before torch

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from tests.pretend_cuda.pretend import GPU, Pretend, on_host
from verl.algorithms.losses import POLICY_LOSSES
from verl.batch import Batch
from verl.config import PPOConfig, load_config
from verl.config.common import ModelConfig
from verl.config.rollout import SamplingConfig
from verl.models import loading
from verl.models.lora import add_adapters, train_adapters_only
from verl.rank.calculator import RepresentationMetricsCalculator, capture_options
from verl.rank.stacks import StackedResponses
from verl.rollout.decoding import decode
from verl.workers import critic as critic_module
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from vllm_patches.buffer import RowBuffer
from vllm_patches.capture import ForwardStep, HiddenStateCapture
from vllm_patches.draw import draw
from vllm_patches.options import CaptureOptions

assert stub

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 4096}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

CLOSE = 0.05
"""Largest mean difference, in nats, of log-probabilities whose attention was rounded to bfloat16 in another order."""

AS_EXACT = 1e-6
"""The same of rank metrics: devices choose between two exact methods by their own speeds."""

folder = Path()


@cache
def model_path(kind: str) -> str:
    """The folder of a random model in bfloat16."""
    torch.manual_seed(0)
    made: Any = Qwen3MoeConfig(**SIZES, **MOE) if kind == "moe" else Qwen2Config(**SIZES)
    AutoModelForCausalLM.from_config(made).to(torch.bfloat16).save_pretrained(folder / kind)
    return str(folder / kind)


def config_of(*overrides: str, kind: str = "qwen2") -> PPOConfig:
    """The shipped options, for small micro-batches of a model in bfloat16."""
    rows = [f"{name}micro_batch_size_per_gpu=3" for name in ("actor.", "critic.", "actor.log_prob_")]
    sizes = ["trainer.n_gpus_per_node=1", "model.param_dtype=bfloat16", *rows]
    return load_config(PPOConfig, "ppo_trainer", [f"model.path={model_path(kind)}", *sizes, *overrides])


def on_device(
    model: PreTrainedModel, device: str, trainable: bool, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """The model, its parameters and buffers on ``device``, in the dtype in which FSDP would compute with it."""
    model = model.to(dtype).eval()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and device == "cuda":
                    moved = Pretend(tensor.detach().clone())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[name] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
    model.requires_grad_(trainable)
    return model


def load_model(config: ModelConfig, mesh: Any, trainable: bool, source: Any = None) -> PreTrainedModel:
    """In place of ``load_sharded_model``."""
    model = AutoModelForCausalLM.from_pretrained(config.path, **loading.pretrained_options(config, "cpu"))
    if config.trains_adapters:
        add_adapters(model, config)
    model = on_device(model, mesh.device_type, trainable)
    if config.trains_adapters:
        train_adapters_only(model)
    return model


def load_value_model(config: ModelConfig, mesh: Any, trainable: bool) -> PreTrainedModel:
    """In place of ``load_sharded_value_model``."""
    return on_device(loading._read_value_model(config, True, "cpu"), mesh.device_type, trainable)


def actor_of(config: PPOConfig, device: str) -> Actor:
    """The policy in training, unsharded."""
    mesh: Any = SimpleNamespace(device_type=device)
    with mock.patch("verl.models.policy.load_sharded_model", load_model):
        correction = config.algorithm.rollout_correction
        return Actor(config.actor, correction, config.model, mesh, 0.7, 10, max_response_length=20)


def episodes() -> Batch:
    """Six responses of 1 to 20 tokens, two to each of three prompts."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 500, (length,), generator=generator).tolist()

    prompts = [ids(12), ids(5), ids(9)]
    batch = Batch.of([prompts[i // 2] for i in range(6)], [ids(length) for length in (20, 3, 11, 1, 7, 20)])
    count = len(batch.response_tokens)
    old, reference, advantages = torch.randn(3, count, generator=generator)
    engine = -6.3 + 0.1 * old
    batch.fill(rollout_logprobs=engine, old_logprobs=engine + 0.01, ref_logprobs=engine - 0.02 * reference)
    return batch.fill(advantages=advantages, learn_mask=torch.ones(count, dtype=torch.bool))


def same(found: Tensor, expected: Tensor, most: float, what: str) -> None:
    """Check numbers of the device, which are read without a wait."""
    found, expected = on_host(found).double(), expected.double()
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, on the CPU {tuple(expected.shape)}"
    off = (found - expected).abs().nan_to_num(0.0).mean().item()
    assert off <= most and torch.equal(found.isnan(), expected.isnan()), f"{what}: off by {off:.3g} in the mean"


# --- The policy ---

LAYOUTS = {
    "padded": ["model.use_remove_padding=false"],
    "packed": ["model.use_remove_padding=true", "model.share_prompts=false"],
    "shared": ["model.use_remove_padding=true", "model.share_prompts=true"],
    "eager": ["model.use_remove_padding=true", "model.attn_implementation=eager"],
}


def scoring(gpu: GPU, *overrides: str, kind: str = "qwen2", most: float = CLOSE) -> None:
    """Log-probabilities of two micro-batches."""
    config = config_of(*overrides, kind=kind)
    expected = actor_of(config, "cpu").compute_logprobs(episodes())
    actor = actor_of(config, "cuda")
    gpu.waits.clear()
    scored = actor.compute_logprobs(episodes())
    same(scored.logprobs, expected.logprobs, most, "logprobs")
    same(scored.entropy, expected.entropy, most, "entropy")


def update(gpu: GPU, *overrides: str, kind: str = "qwen2", on_policy: bool = False) -> None:
    """One optimizer step over two micro-batches."""
    config = config_of(*overrides, "actor.entropy_coeff=0.01", kind=kind)
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        actor = actor_of(config, device)
        gpu.waits.clear()
        step = actor.update_on_policy if on_policy else actor.update
        found: Any = step(episodes(), len(episodes().response_tokens), 6)
        results.append(found[0] if on_policy else found)
    expected, found = results
    assert found.keys() == expected.keys() and found["actor/grad_norm"] > 0
    for name, value in expected.items():
        assert abs(found[name] - value) <= 0.05 * abs(value) + 0.02, f"{name}: {found[name]}, on the CPU {value}"


def states_measured(gpu: GPU) -> None:
    """Rank metrics of two micro-batches in the policy's forward pass, with all statistics of the head."""
    config = config_of(*LAYOUTS["packed"], "model.logits_chunk_size=16")
    calculator = RepresentationMetricsCalculator(config.calculator)
    actor = actor_of(config, "cuda")
    gpu.waits.clear()
    statistics = ["logsumexp", "mean_logprob", "sum_pi_squared"]
    scored = actor.compute_logprobs(episodes(), [0, -1], lambda states, _: calculator.measure(states), statistics)
    assert scored.mean_states.shape == (6, 2, 64) and all(name in scored for name in statistics)


def values(gpu: GPU, *overrides: str) -> None:
    """A critic's values of two micro-batches, and its step."""
    config = config_of("algorithm=gae", f"critic.model.path={model_path('qwen2')}", *overrides)
    config = replace(config, critic=replace(config.critic, model=replace(config.critic.model, param_dtype="bfloat16")))
    mesh: Any = SimpleNamespace(device_type="cuda")
    with mock.patch.object(critic_module, "load_sharded_value_model", load_value_model):
        critic = Critic(config.critic, mesh, 10)
    gpu.waits.clear()
    batch = critic.compute_values(episodes())
    same(batch.values, torch.zeros(62), 0.0, "values of a new head")
    metrics = critic.update(episodes().fill(values=batch.values, returns=torch.ones(62)), 62)
    assert metrics["critic/grad_norm"] > 0


# --- Rank metrics and the engine's plugin ---

CALCULATORS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "paper": {"metric_indices": [1, 2], "diff_stride": 40},
    "all metrics": {"metric_indices": [0, 1, 2, 3, 4]},
    "original": {"diff_calculator_method": "original"},
    "lowrank": {"zeroth_order_svd_method": "lowrank", "diff_svd_method": "lowrank", "svd_rank": 8},
    "prefixes": {"keep_prefixes": True},
    "masked": {"on_nonfinite": "mask"},
    "cut": {"max_seq_len": 64},
    "small workspace": {"workspace_mb": 1},
}


def responses() -> list[Tensor]:
    """Hidden states of two layers of six responses."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 2, 48, generator=generator).bfloat16() for n in (3, 70, 33, 150, 1, 2)]


def spectra(gpu: GPU, **changes: Any) -> None:
    """Metrics of one batch of six responses."""
    calculator = RepresentationMetricsCalculator(replace(config_of().calculator, **changes))
    expected = calculator.measure(responses())
    states: list[Tensor] = [Pretend(response) for response in responses()]
    gpu.waits.clear()
    found = calculator.measure(states)
    for name in expected.names:
        same(getattr(found, name), getattr(expected, name), AS_EXACT, name)


def stack(gpu: GPU) -> None:
    """Metrics of responses that are stacked as they come."""
    stacked = StackedResponses(config_of().calculator)
    states: list[Tensor] = [Pretend(response) for response in responses()]
    gpu.waits.clear()
    for response in states:
        stacked.add(response)
    assert stacked.metrics()


def captured(device: str, layers: int = 1, steps: int = 40, reduced: bool = True) -> HiddenStateCapture:
    """Eight requests with prompts of five tokens, each decoded for so many steps; part of them spill."""
    options = capture_options(config_of().calculator) if reduced else {"layers": [-1]}
    generator = torch.Generator().manual_seed(0)
    buffer = RowBuffer(layers, 32, torch.bfloat16, device, 6000)
    parsed = CaptureOptions.parse({"hidden_states": options})
    assert parsed is not None
    capture = HiddenStateCapture(parsed, buffer)
    names, output = [str(i) for i in range(8)], Pretend(torch.zeros(40, 32, dtype=torch.bfloat16))
    for name in names:
        capture.begin(name, 5)
    for step in range(steps):
        rows, last = (40, torch.arange(4, 40, 5, dtype=torch.int32)) if step == 0 else (16, None)
        states = torch.randn(rows, 32, generator=generator).bfloat16()
        computed = np.full(8, 0 if step == 0 else 4 + step)
        scheduled = np.full(8, 5 if step == 0 else 1)
        if device == "cuda":
            # As a CUDA graph, which writes every step's result to the same place.
            output[:rows].copy_(Pretend(states))
            states, last = output[:rows], None if last is None else Pretend(last)
        capture.record(ForwardStep(names, computed, scheduled, np.ones(8, dtype=bool), last, [states]))
    return capture


def recording(gpu: GPU) -> None:
    """Forty steps of eight requests."""
    captured("cuda")


def taking(gpu: GPU, reduced: bool = True) -> None:
    """Eight responses handed out."""
    wanted = [(str(i), 40) for i in range(8)]
    expected = captured("cpu", reduced=reduced).take(wanted)
    capture = captured("cuda", reduced=reduced)
    gpu.waits.clear()
    for found, response in zip(capture.take(wanted), expected, strict=True):
        assert found.keys() == response.keys() and not any(isinstance(value, Pretend) for value in found.values())
        for name, value in response.items():
            same(found[name], value, AS_EXACT, name)


def seeded_draws(gpu: GPU) -> None:
    """Sixteen tokens from streams."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(16, 5000, generator=generator)
    numbers = torch.rand(16, dtype=torch.float64, generator=generator)
    device = Pretend(weights.clone()), Pretend(numbers)
    gpu.waits.clear()
    same(draw(*device), draw(weights, numbers), 0.0, "tokens")


def sampling_step(gpu: GPU) -> None:
    """Five steps of vLLM's sampler of six requests, five of which have streams."""
    # Imported late: vLLM takes seconds.
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    from vllm_patches.sampler import StreamSampler

    def tokens(device: str, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        sampler, names = Sampler(logprobs_mode="processed_logprobs"), [str(i) for i in range(6)]
        sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
        requests = {
            name: SimpleNamespace(sampling_params=SamplingParams(extra_args={"stream": i + 7}), num_prompt_tokens=5)
            for i, name in enumerate(names)
        }
        batch = SimpleNamespace(req_ids=names, num_reqs=6, num_computed_tokens_cpu=np.full(6, 5))
        starts = SimpleNamespace(np=np.arange(7))
        runner: Any = SimpleNamespace(sampler=sampler, requests=requests, input_batch=batch, query_start_loc=starts)
        runner.device = torch.device(device)
        given = {"temperature": place(torch.ones(6)), "all_greedy": False, "all_random": True, "no_penalties": True}
        given |= {"max_num_logprobs": 0, "output_token_ids": [[] for _ in names], "generators": {}}
        given |= {"logitsprocs": LogitsProcessors(), "bad_words_token_ids": {}}
        absent = dict.fromkeys(inspect.signature(SamplingMetadata).parameters)
        metadata = SamplingMetadata(**absent | given)
        runner._sample = lambda logits, _: sampler.sample(logits, metadata)
        StreamSampler(runner)
        logits = torch.randn(5, 6, 700, generator=torch.Generator().manual_seed(0))
        gpu.waits.clear()
        return [runner._sample(place(step.clone()), None)[0] for step in logits]

    expected = tokens("cpu", lambda values: values)
    for found, on_cpu in zip(tokens("cuda", Pretend), expected, strict=True):
        same(found, on_cpu, 0.0, "tokens")


def decoding(gpu: GPU, **changes: Any) -> None:
    """Four responses of at most ten tokens by a model of transformers."""
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    sampling = SamplingConfig(n=1, **options | changes)
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 500, (4, 6), generator=generator), torch.ones(4, 6, dtype=torch.int64)
    mask[1, :3] = 0
    numbers = torch.rand(4, 10, dtype=torch.float64, generator=generator)
    found = []
    for device, place in (("cpu", lambda values: values), ("cuda", Pretend)):
        config = config_of().model
        model = AutoModelForCausalLM.from_pretrained(config.path, **loading.pretrained_options(config, "cpu"))
        # Exact enough for the same draws, with another attention kernel.
        model = on_device(model, device, False, torch.float32)
        inputs = [place(values) for values in (ids, mask, numbers)]
        gpu.waits.clear()
        found.append(decode(model, *inputs, sampling, [1, 2], [0, -1]))
    same(found[1].token_ids, found[0].token_ids, 0.0, "tokens")


DevicePath = Callable[[GPU], None]


def given(function: Callable[..., None], *args: Any, **kwargs: Any) -> DevicePath:
    """``function`` with all arguments but the device."""
    return lambda gpu: function(gpu, *args, **kwargs)


OFFLOADED = ["model.fsdp.param_offload=true", "model.fsdp.optimizer_offload=true"]
CHUNKED = "model.logits_chunk_size=7"
OF_LOSSES = {"dro": ["actor.dro_beta=1.0"]}
WIDE = ["actor.clip_ratio_low=0.9", "actor.clip_ratio_high=9"]
"""No token near the edge of a clip, where rounding would decide."""
LOSS_OPTIONS = {
    "tis by token": ["algorithm.rollout_correction.rollout_is=token", "actor.policy_loss=gpg"],
    "tis by response": ["algorithm.rollout_correction.rollout_is=sequence"],
    "unbiased kl": ["actor.use_kl_loss=true", "actor.use_unbiased_kl=true"],
    "kl k1": ["actor.use_kl_loss=true", "actor.kl_loss_type=k1"],
    "mean of responses": ["actor.loss_agg_mode=seq-mean-token-mean"],
    "bypass": ["actor.bypass_mode=true", "actor.policy_loss=gpg", "algorithm.rollout_correction.rollout_is=sequence"],
}
PATHS: dict[str, DevicePath] = {
    **{f"score, {name}": given(scoring, *options) for name, options in LAYOUTS.items()},
    "score, shared, chunked": given(scoring, *LAYOUTS["shared"], CHUNKED),
    "score, experts": given(scoring, *LAYOUTS["packed"], kind="moe"),
    "score, ranks and statistics": states_measured,
    **{f"update, {name}": given(update, *options) for name, options in LAYOUTS.items()},
    "update, packed, chunked": given(update, *LAYOUTS["packed"], CHUNKED),
    "update, shared, on policy": given(update, *LAYOUTS["shared"], on_policy=True),
    "update, adapters": given(update, *LAYOUTS["packed"], "model.lora.rank=4", CHUNKED),
    "update, offloaded": given(update, *LAYOUTS["packed"], *OFFLOADED),
    "update, experts": given(update, *LAYOUTS["packed"], kind="moe"),
    **{
        f"loss {name}": given(update, *LAYOUTS["packed"], *WIDE, f"actor.policy_loss={name}", *OF_LOSSES.get(name, ()))
        for name in POLICY_LOSSES
    },
    **{f"loss, {name}": given(update, *LAYOUTS["packed"], *options) for name, options in LOSS_OPTIONS.items()},
    "values, padded": given(values, "critic.model.use_remove_padding=false"),
    "values, packed": given(values, "critic.model.use_remove_padding=true"),
    **{f"spectra, {name}": given(spectra, **changes) for name, changes in CALCULATORS.items()},
    "spectra, stacked": stack,
    "capture, 40 steps": recording,
    "capture, taken reduced": taking,
    "capture, taken whole": given(taking, reduced=False),
    "draws": seeded_draws,
    "draws in vLLM's sampler": sampling_step,
    "decode": decoding,
    "decode, top p and k": given(decoding, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1),
    "decode, greedy": given(decoding, temperature=0.0),
}
"""Name -> what runs."""
