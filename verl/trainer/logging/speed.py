"""What the log says of a step's speed and memory: seconds, tokens a second, FLOPs utilisation, peak memory by phase.

Names are veRL's where it has one; ``<phase>`` is ``gen``, ``old_log_prob``, ``update_actor`` and so on.

- ``timing_s/<phase>``, ``timing_s/step`` (their sum, also ``perf/time_per_step``): seconds
- ``perf/<phase>_throughput``: tokens a second and worker; of ``gen`` the sampled tokens, of all others prompt and
  response, each as often as it is read
- ``perf/total_num_tokens``: prompt and response tokens of the step's batch; ``perf/throughput``: these a second of the
  whole step and worker
- ``perf/tflops/<phase>``: 10^12 model operations a second and worker; ``perf/mfu/<phase>``: their share of a device's
  peak speed, where that is known; veRL calls the phases ``actor``, ``actor_infer`` and ``critic`` here
- ``perf/memory/<phase>_gb`` and on GPUs ``perf/memory/<phase>_reserved_gb``: peak of the worker that used most, see
  :class:`MemoryPeak`; ``perf/memory/driver_gb``: the driver's resident memory; all in 10^9 bytes
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from verl.config.common import ModelConfig
from verl.config.ppo import PPOConfig
from verl.models.info import ModelInfo
from verl.single_controller.profiling import resident_bytes
from verl.trainer.logging.timing import StepRecord

GB = 1e9

PEAK_TFLOPS = {
    "B200": 2250,
    "GH200": 989,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
}
"""GPU, as its name has it, to its peak in bfloat16 with float32 sums and without sparsity, 10^12 operations a second.
From NVIDIA's data sheets of the HGX B200, GH200, H200, H100, A100, A10, L40S, L40 and L4; for Hopper, Ada and Blackwell
they give figures with sparsity, twice these. H800 and A800 compute as H100 and A100. Of two names that fit, the first
counts."""

MFU_NAMES = {"update_actor": "actor", "old_log_prob": "actor_infer", "update_critic": "critic"}
"""Phases whose utilisation veRL logs under other names."""

BATCH = "batch"
"""What the tokens of a step's prompts and responses are counted under, whichever models read them."""

FORWARD = 1
UPDATE = 3
"""Passes over the matrices: a backward pass takes two, for the gradients of inputs and of weights."""
UPDATE_LORA = 2
"""Without the gradients of frozen weights; those of the adapters are left out."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How ``transformers`` configs call the number of a mixture's experts."""


def peak_tflops(config: float, device_name: str, dtype: str) -> float | None:
    """A device's peak speed, 10^12 operations a second.

    ``config`` (``trainer.peak_tflops``) if that is not 0; else by the device's name, for products in ``bfloat16``. None
    where it is not known.
    """
    if config:
        return config
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True)
class ModelCost:
    """Operations of a decoder-only transformer, as PaLM counts them (arXiv 2204.02311, appendix B).

    A forward pass takes 2 N + 4 L H Q T operations a token: N parameters, L layers of H heads of width Q, T tokens of
    context; backward twice that. Attention is counted as if every token saw the whole sequence. What is computed again
    (gradient checkpointing) and what serves padding is not counted, and so lowers the utilisation.
    """

    num_parameters: float
    """N: weights of matrix products. The output head counts once, tied or not; an embedding that is only looked up does
    not; of a mixture's experts those that a token passes."""
    attention_width: int
    """L H Q; 0 for a model without attention."""

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelCost":
        """The cost of a causal language model, from its shape; no weights are read."""
        info = ModelInfo.of(config)
        shape = info.text_config
        heads = getattr(shape, "num_attention_heads", 0)
        width = getattr(shape, "head_dim", None) or shape.hidden_size // max(1, heads)
        return cls(_num_multiplied(info.causal_model, shape), info.num_layers * heads * width)

    def without_head(self, config: ModelConfig) -> "ModelCost":
        """The same body with a head of one output, as a critic has."""
        shape = ModelInfo.of(config).text_config
        head = (shape.vocab_size - 1) * shape.hidden_size
        return ModelCost(self.num_parameters - head, self.attention_width)

    def flops(self, tokens: float, context: float, passes: int) -> float:
        """Operations on ``tokens`` tokens whose sequences' squared lengths add up to ``context``."""
        # Attention has no weights that could be frozen: its backward pass takes two whatever is trained.
        attention = FORWARD if passes == FORWARD else UPDATE
        return passes * 2 * self.num_parameters * tokens + attention * 4 * self.attention_width * context


def _num_multiplied(model: PreTrainedModel, shape: Any) -> float:
    """Weights that one token is multiplied with."""
    embedding = model.get_input_embeddings().get_parameter("weight")
    head = model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.numel()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    number = next((n for key in NUM_EXPERTS if (n := getattr(shape, key, None))), None)
    idle = experts * (1 - shape.num_experts_per_tok / number) if number and experts else 0
    return sum(p.numel() for p in model.parameters()) - looked_up - idle


class StepMetrics:
    """Turns what a :class:`PhaseTimer` counted into the scalars that this module's first lines list."""

    def __init__(
        self, world_size: int, batch_phase: str, passes: Mapping[str, tuple[ModelCost, int]], peak: float | None
    ) -> None:
        """
        Args:
            world_size: number of workers.
            batch_phase: what every token of the step's batch is counted under once; a phase, or work of no phase.
            passes: for each phase whose operations are counted, the model and how often its matrices are passed.
            peak: 10^12 operations a second of one worker's device; None where that is not known.
        """
        self._world_size = world_size
        self._batch_phase = batch_phase
        self._passes = dict(passes)
        self._peak = peak

    def __call__(self, record: StepRecord) -> dict[str, float]:
        """The scalars of one step."""
        step_seconds = sum(record.seconds.values())
        metrics = {f"timing_s/{name}": seconds for name, seconds in record.seconds.items()}
        metrics |= {"timing_s/step": step_seconds, "perf/time_per_step": step_seconds}
        for name, work in record.work.items():
            if name not in record.seconds:
                continue
            worker_seconds = record.seconds[name] * self._world_size
            metrics[f"perf/{name}_throughput"] = work.tokens / worker_seconds
            if name in self._passes:
                cost, passes = self._passes[name]
                tflops = cost.flops(work.tokens, work.context, passes) / worker_seconds / 1e12
                metrics[f"perf/tflops/{name}"] = tflops
                if self._peak is not None:
                    metrics[f"perf/mfu/{MFU_NAMES.get(name, name)}"] = tflops / self._peak
        if self._batch_phase in record.work:
            tokens = record.work[self._batch_phase].tokens
            metrics |= {"perf/total_num_tokens": tokens, "perf/throughput": tokens / step_seconds / self._world_size}
        return metrics | self._memory(record)

    @staticmethod
    def _memory(record: StepRecord) -> dict[str, float]:
        metrics = {"perf/memory/driver_gb": resident_bytes() / GB}
        for name, peak in record.peaks.items():
            metrics[f"perf/memory/{name}_gb"] = peak.used / GB
            if peak.reserved != peak.used:
                metrics[f"perf/memory/{name}_reserved_gb"] = peak.reserved / GB
        return metrics


def step_metrics(config: PPOConfig, world_size: int, device_name: str) -> StepMetrics:
    """How the speed of the phases of a run on so many workers is counted."""
    policy = ModelCost.of(config.model)
    update = UPDATE_LORA if config.model.trains_adapters else UPDATE
    passes = {name: (policy, FORWARD) for name in ("gen", "old_log_prob", "ref")}
    passes["update_actor"] = (policy, update)
    if config.uses_critic:
        model = config.critic.model
        critic = ModelCost.of(model).without_head(model)
        passes["values"] = (critic, FORWARD)
        passes["update_critic"] = (critic, UPDATE_LORA if model.trains_adapters else UPDATE)
    peak = peak_tflops(config.trainer.peak_tflops, device_name, config.model.param_dtype)
    return StepMetrics(world_size, BATCH, passes, peak)
