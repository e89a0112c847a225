"""Speed and memory of a step by phase, as the log says them, and profiler traces.

Names are veRL's where it has one; ``<phase>`` is ``gen``, ``old_log_prob``, ``update_actor`` and so on.

- ``timing_s/<phase>``, ``timing_s/step`` (their sum, also ``perf/time_per_step``): seconds. Where engines have devices
  of their own, what they do while the models learn is no part of that sum; ``timing_s/trainer_wait``, which is, says
  how long the models waited for the engines, and ``timing_s/engine_wait`` how long the engines had nothing to do
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
"""GPU, as its name has it, to its peak in bfloat16 with float32 sums and without sparsity, 10^12 operations a second.
From NVIDIA's data sheets of the HGX B200, GH200, H200, H100, A100, A10, L40S, L40 and L4; for Hopper, Ada and Blackwell
they give figures with sparsity, twice these. H800 and A800 compute as H100 and A100. Of two names that fit, the first
counts."""

MFU_NAMES = {"update_actor": "actor", "old_log_prob": "actor_infer", "update_critic": "critic"}
"""Phases whose utilisation veRL logs under other names."""

BATCH = "batch"
"""Key of the tokens of a step's prompts and responses, whichever models read them."""

FORWARD = 1
UPDATE = 3
"""Passes over the matrices: a backward pass takes two, for the gradients of inputs and of weights."""
UPDATE_LORA = 2
"""Without the gradients of frozen weights; those of the adapters are left out."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How ``transformers`` configs call the number of a mixture's experts."""


class Work(NamedTuple):
    """The tokens that a phase processed, which determine a transformer's operations."""

    tokens: float
    """Number of tokens."""
    context: float
    """Sum over sequences of the squared number of tokens; attention grows with it."""

    @classmethod
    def of(cls, lengths: Tensor, known: Tensor | int = 0) -> "Work":
        """Sequences of ``lengths`` [B] tokens, the first ``known`` of which ([B], or a number) are cached."""
        return cls(float((lengths - known).sum()), float((lengths.double() ** 2 - known**2).sum()))


class StepRecord(NamedTuple):
    """One step, by phase."""

    seconds: dict[str, float]
    work: dict[str, Work]
    """Over all workers; phases that read or write no tokens are left out."""
    peaks: dict[str, MemoryPeak]
    """Of the worker that used most; phases without workers are left out."""
    beside: dict[str, float]
    """Seconds of phases that ran beside the others, on devices of their own; they are no part of the step's time."""

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of every phase, wherever it ran."""
        names = dict.fromkeys([*self.seconds, *self.beside])
        return {name: self.seconds.get(name, 0.0) + self.beside.get(name, 0.0) for name in names}


class PhaseTimer:
    """Adds up wall time, work and peak memory of named phases.

    Args:
        on_enter: called with the phase's name when it begins, such as a progress bar's.
        take_peak: returns the workers' peak memory since its last call, None if they were idle.
    """

    def __init__(
        self, on_enter: Callable[[str], None], take_peak: Callable[[], MemoryPeak | None] = lambda: None
    ) -> None:
        self._on_enter = on_enter
        self._take_peak = take_peak
        self._step = StepRecord({}, {}, {}, {})
        self.totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time and the peak memory of the ``with`` block under ``name``.

        Raises:
            OutOfMemory: this process has no memory left.
        """
        self._on_enter(name)
        self._take_peak()  # drops the peak of work outside phases
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
            if (peak := self._take_peak()) is not None:
                peaks[name] = peak.joined(peaks.get(name))

    def count(self, name: str, work: Work) -> None:
        """Add work to the phase ``name`` of this step."""
        before = self._step.work.get(name, Work(0.0, 0.0))
        self._step.work[name] = Work(before.tokens + work.tokens, before.context + work.context)

    def add_beside(self, record: StepRecord) -> None:
        """Add what another timer counted beside this one's phases."""
        for name, seconds in record.seconds.items():
            self._step.beside[name] = self._step.beside.get(name, 0.0) + seconds
        for name, work in record.work.items():
            self.count(name, work)
        for name, peak in record.peaks.items():
            self._step.peaks[name] = peak.joined(self._step.peaks.get(name))

    def take_step(self) -> StepRecord:
        """Return the counts since the last call."""
        step, self._step = self._step, StepRecord({}, {}, {}, {})
        return step


def peak_tflops(config: float, device_name: str, dtype: str) -> float | None:
    """Return a device's peak speed, 10^12 operations a second.

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
        """Return the cost of a causal language model, from its shape; no weights are read."""
        info = ModelInfo.of(config)
        shape = info.text_config
        heads = getattr(shape, "num_attention_heads", 0)
        width = getattr(shape, "head_dim", None) or shape.hidden_size // max(1, heads)
        return cls(_num_multiplied(info.causal_model, shape), info.num_layers * heads * width)

    def without_head(self, config: ModelConfig) -> "ModelCost":
        """Return the same body with a head of one output, as a critic has."""
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
        self,
        world_size: int,
        passes: Mapping[str, tuple[ModelCost, int]],
        peak: float | None,
        pool_size: int = 0,
    ) -> None:
        """Prepare the metrics of steps.

        Args:
            world_size: number of workers that hold the models.
            passes: for each phase whose operations are counted, the model and how often its matrices are passed.
            peak: 10^12 operations a second of one worker's device; None where that is not known.
            pool_size: workers whose engines sample; 0: those of the models.
        """
        self._pool_size = pool_size
        self._world_size = world_size
        self._passes = dict(passes)
        self._peak = peak

    def __call__(self, record: StepRecord) -> dict[str, float]:
        """Return the scalars of one step."""
        step_seconds, busy = sum(record.seconds.values()), record.busy
        metrics = {f"timing_s/{name}": seconds for name, seconds in busy.items()}
        metrics |= {"timing_s/step": step_seconds, "perf/time_per_step": step_seconds}
        for name, work in record.work.items():
            if name not in busy:
                continue
            num_workers = self._pool_size if self._pool_size and name == "gen" else self._world_size
            worker_seconds = busy[name] * num_workers
            metrics[f"perf/{name}_throughput"] = work.tokens / worker_seconds
            if name in self._passes:
                cost, passes = self._passes[name]
                tflops = cost.flops(work.tokens, work.context, passes) / worker_seconds / 1e12
                metrics[f"perf/tflops/{name}"] = tflops
                if self._peak is not None:
                    metrics[f"perf/mfu/{MFU_NAMES.get(name, name)}"] = tflops / self._peak
        if BATCH in record.work:
            tokens = record.work[BATCH].tokens
            num_workers = self._world_size + self._pool_size
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
    return StepMetrics(world_size, passes, peak, pool_size)


class StepProfiler:
    """Has the workers write ``profile/step_N_rank_R.json.gz`` for the given steps.

    Args:
        steps: counted from 1.
        folder: the run's folder.
        say: prints a line.
    """

    def __init__(self, workers: WorkerGroup, steps: Sequence[int], folder: Path, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._steps = frozenset(steps)
        self._folder = folder / "profile"
        self._say = say

    def begin(self, step: int) -> None:
        """Start recording if ``step`` is to be profiled."""
        if step in self._steps:
            self._workers.start_profile()

    def end(self, step: int) -> None:
        """Write the trace of ``step`` if it was recorded."""
        if step in self._steps:
            ranks = range(self._workers.world_size)
            self._workers.stop_profile([self._folder / f"step_{step}_rank_{rank}.json.gz" for rank in ranks])
            self._say(f"profile of step {step}: {self._folder}/step_{step}_rank_*.json.gz (https://ui.perfetto.dev)")
