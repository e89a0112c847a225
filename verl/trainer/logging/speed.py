"""Speed and memory metrics per phase, and profiler traces.

Metrics that veRL also logs have the same names as in veRL. ``<phase>`` is ``gen``, ``old_log_prob``, and so on.

- ``timing_s/<phase>``: seconds per phase; their sum is ``timing_s/step`` (= ``perf/time_per_step``). If engines have
  separate devices, the sum excludes their work during the update but includes ``timing_s/trainer_wait``, the time that
  the trainer spent waiting for the engines; ``timing_s/engine_wait`` is the engines' idle time
- ``perf/<phase>_throughput``: tokens per second per worker. ``gen`` counts sampled tokens; other phases count prompt
  and response tokens each time they are processed
- ``perf/total_num_tokens``: prompt and response tokens in the step's batch; ``perf/throughput``: the same number per
  second per worker
- ``perf/tflops/<phase>``: model FLOPs per second per worker, in units of 10^12; ``perf/mfu/<phase>``: model FLOPs
  utilization if the device's peak is known, with veRL's phase names ``actor``, ``actor_infer`` and ``critic``
- ``perf/memory/<phase>_gb``, and on GPUs ``perf/memory/<phase>_reserved_gb``: peak memory of the worker that used the
  most (:class:`MemoryPeak`); ``perf/memory/driver_gb``: the driver's resident memory; all in units of 10^9 bytes
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from verl.cluster.failures import OutOfMemory, WorkerError, driver_memory_line, is_out_of_memory
from verl.config.common import ModelConfig
from verl.config.ppo import PPOConfig
from verl.models.info import ModelInfo
from verl.single_controller.profiling import MemoryPeak, resident_bytes
from verl.single_controller.worker_group import WorkerGroup

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
"""Maps part of a GPU's name to its peak dense bfloat16 throughput with float32 accumulation, in 10^12 operations per
second. The first match wins. Source: NVIDIA's data sheets for HGX B200, GH200, H200, H100, A100, A10, L40S, L40 and L4.
For Hopper, Ada and Blackwell, NVIDIA lists twice these values (with sparsity). H800 and A800 match H100 and A100."""

MFU_NAMES = {"update_actor": "actor", "old_log_prob": "actor_infer", "update_critic": "critic"}
"""Maps each phase to its name in veRL's ``perf/mfu`` metrics."""

BATCH = "batch"
"""Key for the token counts of a step's whole batch."""

FORWARD, UPDATE, UPDATE_LORA = 1, 3, 2
"""Number of passes over the weight matrices. A backward pass counts as two passes, for the gradients of inputs and
weights. With LoRA, it counts as one, because the weights are frozen and the adapters are negligible."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Attributes of ``transformers`` configs that contain the number of experts."""


class Work(NamedTuple):
    """Token counts of a phase, used to compute the number of model operations."""

    tokens: float
    """Number of tokens."""
    context: float
    """Sum of squared sequence lengths, for the cost of attention."""

    @classmethod
    def of(cls, lengths: Tensor, cached: Tensor | int = 0) -> "Work":
        """Return the token counts of sequences of ``lengths`` [B], excluding the first ``cached`` tokens of each."""
        return cls(float((lengths - cached).sum()), float((lengths.double() ** 2 - cached**2).sum()))


class StepRecord(NamedTuple):
    """Time, token counts and peak memory of a step's phases."""

    seconds: dict[str, float]
    work: dict[str, Work]
    """Token counts of each phase that processes tokens, summed over all workers."""
    peaks: dict[str, MemoryPeak]
    """Peak memory of each phase that uses workers (maximum over all workers)."""
    background: dict[str, float]
    """Seconds spent in phases that run in parallel on separate devices and do not count towards the step's time."""

    @property
    def busy(self) -> dict[str, float]:
        """Seconds spent in each phase, including background phases."""
        names = dict.fromkeys([*self.seconds, *self.background])
        return {name: self.seconds.get(name, 0.0) + self.background.get(name, 0.0) for name in names}


@dataclass(eq=False)
class PhaseTimer:
    """Timer that measures the wall time, token counts and peak memory of named phases."""

    on_enter: Callable[[str], None]
    """Callback that receives the name of each phase when it starts."""
    take_peak: Callable[[], MemoryPeak | None] = lambda: None
    """Function that returns the workers' peak memory since its last call, or None if they were idle."""

    def __post_init__(self) -> None:
        self._step = StepRecord({}, {}, {}, {})
        self.totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time and peak memory of the ``with`` block under the phase ``name``.

        Raises ``OutOfMemory`` if this process runs out of memory.
        """
        self.on_enter(name)
        self.take_peak()  # discard the peak of work outside phases
        started = time.perf_counter()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, WorkerError) or not is_out_of_memory(error):
                raise
            raise OutOfMemory(driver_memory_line(error, name)) from error
        finally:
            elapsed = time.perf_counter() - started
            seconds, peaks = self._step.seconds, self._step.peaks
            seconds[name] = seconds.get(name, 0.0) + elapsed
            self.totals[name] = self.totals.get(name, 0.0) + elapsed
            if (peak := self.take_peak()) is not None:
                peaks[name] = peak.joined(peaks.get(name))

    def count(self, name: str, work: Work) -> None:
        """Add token counts to the phase ``name``."""
        before = self._step.work.get(name, Work(0.0, 0.0))
        self._step.work[name] = Work(before.tokens + work.tokens, before.context + work.context)

    def add_background(self, record: StepRecord) -> None:
        """Add the background measurements of another timer."""
        for name, seconds in record.seconds.items():
            self._step.background[name] = self._step.background.get(name, 0.0) + seconds
        for name, work in record.work.items():
            self.count(name, work)
        for name, peak in record.peaks.items():
            self._step.peaks[name] = peak.joined(self._step.peaks.get(name))

    def take_step(self) -> StepRecord:
        """Return the measurements since the last call."""
        step, self._step = self._step, StepRecord({}, {}, {}, {})
        return step


def peak_tflops(config: float, device_name: str, dtype: str) -> float | None:
    """Return a device's peak throughput in 10^12 operations per second, or None if unknown.

    A nonzero ``config`` (``trainer.peak_tflops``) is returned. Otherwise, the peak is known only for ``bfloat16``.
    """
    if config:
        return config
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True)
class ModelCost:
    """Operation count of a decoder-only transformer, from PaLM's formula (arXiv 2204.02311, appendix B).

    A forward pass takes 2 N + 4 L H Q T operations per token, with N parameters, L layers, H heads of width Q, and T
    tokens of context. A backward pass takes twice as many. The formula assumes that all tokens attend to the whole
    sequence. Recomputation (gradient checkpointing) and padding are not counted, so they lower the utilization.
    """

    num_parameters: float
    """Number N of weights that multiply each token. N includes the output head, tied or not, but excludes the embedding
    table and the inactive experts of a mixture of experts."""
    attention_width: int
    """Product L H Q of layers, heads and head width, or 0 for a model without attention."""

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelCost":
        """Compute the cost of a causal language model without loading its weights."""
        info = ModelInfo.of(config)
        shape = info.text_config
        heads = getattr(shape, "num_attention_heads", 0)
        width = getattr(shape, "head_dim", None) or shape.hidden_size // max(1, heads)
        return cls(_num_multiplied(info.causal_model, shape), info.num_layers * heads * width)

    @staticmethod
    def update_passes(config: ModelConfig) -> int:
        """Return the number of passes over the weight matrices in an update."""
        return UPDATE_LORA if config.trains_adapters else UPDATE

    def without_head(self, config: ModelConfig) -> "ModelCost":
        """Return the cost of a critic, whose head has a single output."""
        shape = ModelInfo.of(config).text_config
        head = (shape.vocab_size - 1) * shape.hidden_size
        return ModelCost(self.num_parameters - head, self.attention_width)

    def flops(self, tokens: float, context: float, passes: int) -> float:
        """Return the number of operations. ``tokens`` and ``context`` are defined in :class:`Work`."""
        # Attention has no weights to freeze, so its backward pass always costs two passes.
        attention = FORWARD if passes == FORWARD else UPDATE
        return passes * 2 * self.num_parameters * tokens + attention * 4 * self.attention_width * context


def _num_multiplied(model: PreTrainedModel, shape: Any) -> float:
    """Return the number of weights that multiply each token."""
    embedding = model.get_input_embeddings().get_parameter("weight")
    head = model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.numel()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    number = next((n for key in NUM_EXPERTS if (n := getattr(shape, key, None))), None)
    idle = experts * (1 - shape.num_experts_per_tok / number) if number and experts else 0
    return sum(p.numel() for p in model.parameters()) - looked_up - idle


@dataclass(frozen=True)
class StepMetrics:
    """Callable that converts a :class:`StepRecord` to this module's metrics."""

    world_size: int
    """Number of workers that run the models."""
    passes: Mapping[str, tuple[ModelCost, int]]
    """Maps each phase to the cost of its model and the number of passes over the weight matrices."""
    peak: float | None
    """Peak throughput of a worker's device in 10^12 operations per second, or None if unknown."""
    pool_size: int = 0
    """Number of workers with separate engines, or 0 if the workers of the models also sample."""

    def __call__(self, record: StepRecord) -> dict[str, float]:
        """Return the metrics of one step."""
        step_seconds, busy = sum(record.seconds.values()), record.busy
        metrics = {f"timing_s/{name}": seconds for name, seconds in busy.items()}
        metrics |= {"timing_s/step": step_seconds, "perf/time_per_step": step_seconds}
        for name, work in record.work.items():
            if name not in busy:
                continue
            num_workers = self.pool_size if self.pool_size and name == "gen" else self.world_size
            worker_seconds = busy[name] * num_workers
            metrics[f"perf/{name}_throughput"] = work.tokens / worker_seconds
            if name in self.passes:
                cost, passes = self.passes[name]
                tflops = cost.flops(work.tokens, work.context, passes) / worker_seconds / 1e12
                metrics[f"perf/tflops/{name}"] = tflops
                if self.peak is not None:
                    metrics[f"perf/mfu/{MFU_NAMES.get(name, name)}"] = tflops / self.peak
        if BATCH in record.work:
            tokens = record.work[BATCH].tokens
            num_workers = self.world_size + self.pool_size
            metrics |= {"perf/total_num_tokens": tokens, "perf/throughput": tokens / step_seconds / num_workers}
        return metrics | self._memory(record)

    @staticmethod
    def _memory(record: StepRecord) -> dict[str, float]:
        metrics = {"perf/memory/driver_gb": resident_bytes() / GB}
        for name, peak in record.peaks.items():
            metrics[f"perf/memory/{name}_gb"] = peak.used / GB
            if peak.reserved != peak.used:
                metrics[f"perf/memory/{name}_reserved_gb"] = peak.reserved / GB
        return metrics


def step_metrics(config: PPOConfig, world_size: int, device_name: str, pool_size: int) -> StepMetrics:
    policy = ModelCost.of(config.model)
    passes = {name: (policy, FORWARD) for name in ("gen", "old_log_prob", "ref")}
    passes["update_actor"] = (policy, ModelCost.update_passes(config.model))
    if config.uses_critic:
        model = config.critic.model
        critic = ModelCost.of(model).without_head(model)
        passes["values"] = (critic, FORWARD)
        passes["update_critic"] = (critic, ModelCost.update_passes(model))
    if config.uses_teacher and not config.teacher.is_server:
        passes["teacher"] = (policy if config.teacher.is_policy else ModelCost.of(config.teacher.model), FORWARD)
    peak = peak_tflops(config.trainer.peak_tflops, device_name, config.model.param_dtype)
    return StepMetrics(world_size, passes, peak, pool_size)


@dataclass(frozen=True)
class StepProfiler:
    """Profiler of ``steps`` that writes one trace per worker to ``profile/step_N_rank_R.json.gz`` in a run's folder."""

    workers: WorkerGroup
    steps: Sequence[int]
    folder: Path
    log: Callable[[str], None]

    def begin(self, step: int) -> None:
        """Start profiling if ``step`` is one of the profiled steps."""
        if step in self.steps:
            self.workers.start_profile()

    def end(self, step: int) -> None:
        """Write the traces of ``step`` if it was profiled."""
        if step in self.steps:
            ranks = range(self.workers.world_size)
            self.workers.stop_profile([self.folder / "profile" / f"step_{step}_rank_{rank}.json.gz" for rank in ranks])
            self.log(
                f"profile of step {step}: {self.folder}/profile/step_{step}_rank_*.json.gz (https://ui.perfetto.dev)"
            )
