"""Whether a run fits its GPUs, by the estimate, before it loads anything; and which options would make it fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.run.memory import Shapes, estimate, shape_of

REFUSED, WARNED = 1.1, 0.9
"""Shares of a GPU's memory: what is above the first does not run, what is above the second may not. The estimate leaves
out fragments and temporaries, and counts a guess for CUDA."""
LARGEST = 3
"""Terms of the estimate that are named."""


def check_memory(config: PPOConfig, device_gb: float, say: Callable[[str], None]) -> None:
    """Compare the estimate with the memory of the smallest GPU, in 10^9 bytes; what is near the edge is said.

    Models whose sizes the estimate does not know are not counted, and a run of such a policy passes.

    Raises:
        ConfigError: the estimate is clearly above; the message has the largest terms, and which options to change.
    """
    policy = shape_of(config.model)
    if policy is None:
        return
    critic = shape_of(config.critic.model) if config.uses_critic else None
    judge = shape_of(config.reward_model.model) if config.uses_reward_model else None
    shapes = Shapes(policy, critic, judge)
    phase, parts = _peak(config, shapes, device_gb)
    total = sum(parts.values())
    if total <= WARNED * device_gb:
        return
    largest = sorted(parts.items(), key=lambda part: -part[1])[:LARGEST]
    terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
    needs = f"{phase}: needs about {total:.1f} GB of a GPU with {device_gb:.1f} ({terms})"
    fix = fitting_changes(config, shapes, device_gb)
    if total <= REFUSED * device_gb:
        say(f"warning: {needs}, which is near its edge; {fix}")
        return
    raise ConfigError(f"trainer.check_memory=True: {needs}; {fix}; or set it to false to try all the same")


def fitting_changes(config: PPOConfig, shapes: Shapes, device_gb: float) -> str:
    """In words, options that take the estimate below the warning, the cheapest ones that do, or as far as they can."""
    made: dict[str, Any] = {}
    total = _total(config, shapes, device_gb)
    while total > WARNED * device_gb:
        found = [
            (_total(changed, shapes, device_gb), field, value, changed)
            for field, values in _candidates(config)
            for value, changed in _first_that_fits(config, field, values, shapes, device_gb)
        ]
        enough = [candidate for candidate in found if candidate[0] <= WARNED * device_gb]
        lowest = enough[:1] or sorted(found, key=lambda candidate: candidate[0])[:1]
        # What helps little is not worth its price.
        if not lowest or lowest[0][0] > total - 0.01 * device_gb:
            break
        total, field, value, config = lowest[0]
        made[field] = value
    options = " ".join(f"{field}={str(value).lower()}" for field, value in made.items())
    parts = [f"{options} would take {total:.1f} GB"] if made else []
    if total > WARNED * device_gb:
        parts.append("more GPUs or adapters (model.lora.rank=32) would take less")
    return "; ".join(parts)


def _candidates(config: PPOConfig) -> Iterator[tuple[str, Sequence[Any]]]:
    """Options that save memory, the cheapest first, with other values for each from the one that saves least."""
    actor, rollout, longest = config.actor, config.rollout, config.max_sequence_length
    parallel = config.model.ulysses_sequence_parallel_size
    if actor.use_dynamic_bsz:
        fewest = -(-longest // parallel)
        for name in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"):
            yield f"actor.{name}", _halves(getattr(actor, name), fewest)
    else:
        for name in ("micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"):
            yield f"actor.{name}", _halves(getattr(actor, name), 1)
    if config.uses_critic and config.critic.use_dynamic_bsz:
        tokens, parallel = config.critic.ppo_max_token_len_per_gpu, config.critic.model.ulysses_sequence_parallel_size
        yield "critic.ppo_max_token_len_per_gpu", _halves(tokens, -(-longest // parallel))
    elif config.uses_critic:
        yield "critic.micro_batch_size_per_gpu", _halves(config.critic.micro_batch_size_per_gpu, 1)
    yield "rollout.update_weights_bucket_megabytes", _halves(rollout.update_weights_bucket_megabytes, 128)
    if rollout.name != "vllm":
        yield "rollout.max_num_seqs", _halves(rollout.max_num_seqs, 1)
    elif rollout.kv_cache_memory_mb:
        yield "rollout.kv_cache_memory_mb", _halves(rollout.kv_cache_memory_mb, 1024)
    else:
        steps = [n / 100 for n in range(95, 15, -5)]
        yield "rollout.gpu_memory_utilization", [n for n in steps if n < rollout.gpu_memory_utilization]
    yield "rollout.free_cache_engine", [True]
    trained = {"model": config.model} | ({"critic.model": config.critic.model} if config.uses_critic else {})
    for prefix, model in trained.items():
        yield f"{prefix}.logits_chunk_size", [] if model.logits_chunk_size else [1024]
        for switch in ("gradient_checkpointing", "fsdp.optimizer_offload", "fsdp.param_offload"):
            yield f"{prefix}.{switch}", [True]


def _halves(value: int, fewest: int) -> list[int]:
    found = []
    while (value := value // 2) >= fewest:
        found.append(value)
    return found


def _first_that_fits(
    config: PPOConfig, field: str, values: Sequence[Any], shapes: Shapes, device_gb: float
) -> list[tuple[Any, PPOConfig]]:
    """The first value under which the run fits, or else the first that saves as much as any; with the config."""
    best: list[tuple[Any, PPOConfig]] = []
    least = float("inf")
    for value in values:
        try:
            changed = _changed(config, field, value)
        except ConfigError:  # it contradicts another option
            continue
        total = _total(changed, shapes, device_gb)
        if total < least - 0.01 * device_gb:
            best, least = [(value, changed)], total
        if total <= WARNED * device_gb:
            break
    return best


def _changed(config: Any, field: str, value: Any) -> Any:
    first, _, rest = field.partition(".")
    return replace(config, **{first: _changed(getattr(config, first), rest, value) if rest else value})


def _peak(config: PPOConfig, shapes: Shapes, device_gb: float) -> tuple[str, dict[str, float]]:
    phases = estimate(config, shapes, device_gb)
    return max(phases.items(), key=lambda phase: sum(phase[1].values()))


def _total(config: PPOConfig, shapes: Shapes, device_gb: float) -> float:
    return sum(_peak(config, shapes, device_gb)[1].values())
