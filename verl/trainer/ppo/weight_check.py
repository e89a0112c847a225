"""Checks that engines sample with the policy's weights.

An engine with outdated weights, or with a misplaced layer, adapter or expert, still samples plausible text. The only
symptom is ineffective training. At the engine's precision, a single update is too small to reveal outdated or misplaced
weights. Before the first step, the check therefore changes every weight by 20 % and then restores it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from verl.batch import Batch
from verl.cluster.failures import WorkerError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.requests import ResponseRequests, resolve_dtype, response_stream
from verl.single_controller.roles import PolicyWorkers

ROWS = 8
"""Number of responses that each engine samples for the check. Each response ends after one engine call."""
NOISY = -1
"""Version number of the perturbed weights."""


class Tolerance(NamedTuple):
    """Largest allowed mean difference between engine and policy log-probabilities. The larger limit applies."""

    absolute: float
    """Limit in nats."""
    relative: float
    """Limit relative to the change in log-probabilities that the perturbation causes."""


EXACT, ROUNDED = Tolerance(1e-3, 1e-3), Tolerance(0.1, 0.1)
"""Tolerances for float32, and for engines or trainers that compute in 16 bits.

With 16 bits, rounding may change a router's choices. Only wrong layers, heads, adapters or models are detected.
"""


def tolerance_of(config: PPOConfig, device_type: str) -> Tolerance | None:
    """Return the tolerance for the run's precision, or None if engine and trainer differ by design.

    Engine and trainer differ by design if the engine uses quantization or samples from a modified distribution.
    """
    rollout = config.rollout
    sampling, kwargs = rollout.train_kwargs, rollout.engine_kwargs
    if sampling != unfiltered(sampling) or kwargs.get("quantization") or kwargs.get("kv_cache_dtype", "auto") != "auto":
        return None
    is_exact = resolve_dtype(rollout.dtype, device_type == "cpu") == config.model.param_dtype == "float32"
    return EXACT if is_exact else ROUNDED


def unfiltered(sampling: SamplingConfig) -> SamplingConfig:
    """Return ``sampling`` without filters and repetition penalty."""
    return replace(sampling, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)


def check_weights(config: PPOConfig, policy: PolicyWorkers, records: Sequence[PromptRecord], step: int) -> None:
    """Check the engines' log-probabilities under perturbed weights, then restore the weights of ``step``.

    The check is skipped if the engines share the policy's weights, or if :func:`tolerance_of` returns None. Raises
    ``WorkerError`` if an engine's log-probabilities differ from the policy's.
    """
    tolerance = tolerance_of(config, policy.workers.device_type)
    if config.rollout.name == "hf" or tolerance is None:
        return
    policy.workers.run("perturb_weights")
    policy.sync_weights(NOISY)
    batch, engines = _sample(config, policy, records)
    policy.finish_generation()
    noisy = policy.compute_logprobs(batch).logprobs
    policy.workers.run("restore_weights")
    # Score again before the engines wake up and take memory.
    moved = (policy.compute_logprobs(batch).logprobs - noisy).abs()
    policy.sync_weights(step)
    wrong = (batch.rollout_logprobs - noisy).abs()
    for engine in engines.unique().tolist():
        # Tokens on which the noise breaks the model are no test of the engine.
        tokens = (engines == engine).repeat_interleave(batch.response_lengths) & moved.isfinite()
        if not tokens.any():
            continue
        difference, limit = wrong[tokens].mean().item(), tolerance.relative * moved[tokens].mean().item()
        if not difference <= max(tolerance.absolute, limit):
            raise WorkerError(
                f"engine {engine} of rollout.name={config.rollout.name} does not sample with the policy's weights: "
                f"with noise on all of them, its log-probabilities differ from the policy's by {difference:.2g} nats; "
                "rollout.name=hf samples with the policy itself; rollout.check_weights=false skips this check"
            )


def _sample(config: PPOConfig, policy: PolicyWorkers, records: Sequence[PromptRecord]) -> tuple[Batch, Tensor]:
    """Sample short responses to the first prompts. Return the responses and each response's engine index, [B] int64."""
    num_engines = len(policy.engines.living) // config.rollout.tensor_parallel_size
    prompts = [records[i % len(records)] for i in range(ROWS * num_engines)]
    requests = ResponseRequests(
        rows=range(len(prompts)),
        prompt_ids=[record.input_ids for record in prompts],
        streams=[response_stream(config.seed, record.uid, i) for i, record in enumerate(prompts)],
        sampling=replace(config.rollout.train_kwargs, n=1),
    )
    parts: list[Batch] = []
    generation = policy.generation(requests, parts.append, lambda ended: True)
    cut, _ = generation.run()
    if policy.conversations is not None:
        policy.engines.run("rollout.take_rank_metrics")  # engines of conversations keep hidden states until asked
    sampled = [part.columns("rollout_logprobs", "request", "tokens") for part in [*parts, *cut]]
    batch = Batch.join([part for part in sampled if "rollout_logprobs" in part])
    engine_of = {request: engine for engine, dealt in enumerate(generation.queue.dealt) for request in dealt}
    return batch.without("request"), torch.tensor([engine_of[request] for request in batch.request.tolist()])
