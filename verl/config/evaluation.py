"""Configuration of ``verl.trainer.main_eval``: the schema of ``configs/evaluation.yaml``.

The dataclasses are the schema, ``configs/`` holds the values.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl.config.checks import require, require_distinct, require_not_negative, require_positive
from verl.config.common import Device, EngineConfig, Logger, check_divides, require_seed
from verl.config.load import parse_config
from verl.config.signal import CalculatorConfig, RewardScoreConfig

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
"""A name that is safe as the name of a results folder."""

LAST = -1
"""Stands for a run's newest checkpoint in ``steps``."""


@dataclass(frozen=True)
class CandidateConfig:
    """A training run whose checkpoints are evaluated, or a single model."""

    path: str | None
    """A training run's folder (``trainer.default_local_dir``), one of its ``global_step_N``, or a model: a folder or a
    hub id. Null: the newest run below ``runs_dir`` that was trained from ``base``."""
    base: str | None
    """The model of step 0, before training; null: the one named in the run's ``config.yaml``."""
    steps: list[int]
    """Checkpoints of the run: 0 is the base model, -1 the newest. A single model is always step 0."""
    template: str
    """Prompt template, a key of ``verl.data.templates.TEMPLATES``; ``chat`` is the model's own."""
    max_response_length: int
    """Longest response in tokens; generation stops there, and the response counts as truncated."""

    def check(self, prefix: str) -> None:
        """Raise ``ConfigError`` naming ``prefix.<field>`` for values out of range."""
        require(len(self.steps) > 0, f"{prefix}.steps", self.steps, "name at least one; 0 is the base model")
        for step in self.steps:
            require(step >= LAST, f"{prefix}.steps", self.steps, "must be at least 0, or -1 for the newest")
        require_positive(f"{prefix}.max_response_length", self.max_response_length)


@dataclass(frozen=True)
class BenchmarkDataConfig:
    """Where the problems come from."""

    benchmark_dir: str | None
    """Folder of benchmark files, ``<name>.jsonl`` or ``<name>/test.jsonl``, which take precedence over the hub; your
    own files may have any name. Null: the hub alone."""
    fields: dict[str, dict[str, str]]
    """Names of fields that are not recognised: benchmark -> our field, such as ``question`` or ``answer`` (all of them:
    ``verl.evaluation.benchmarks.rows.FIELD_NAMES``) -> the file's field."""
    max_problems: int
    """Evaluate only this many problems of each benchmark, the first ones; -1: all."""
    few_shot: bool
    """Put worked examples before each question of the benchmarks that are usually evaluated this way."""

    def __post_init__(self) -> None:
        require(
            self.max_problems == -1 or self.max_problems > 0,
            "data.max_problems",
            self.max_problems,
            "must be -1 or at least 1",
        )


@dataclass(frozen=True)
class EvaluationEngineConfig(EngineConfig):
    """The vLLM engines."""

    trust_remote_code: bool
    """Allow code inside the model folder to run."""


@dataclass(frozen=True)
class EvaluationTrainerConfig:
    """The workers and the outputs of the evaluation."""

    project_name: str
    """Name of the project in trackers."""
    experiment_name: str
    """Name of the evaluation in trackers, and of its folder."""
    default_local_dir: str | None
    """Folder for everything that the evaluation writes; if it holds the same evaluation, finished or not, that is
    resumed. Null: ``<runs_dir>/evaluation/<experiment_name>/<what is evaluated>``."""
    logger: list[Logger]
    """Trackers besides ``metrics.jsonl``, which is always written: ``console``, ``tensorboard``, ``wandb``."""
    nnodes: int
    """Machines of the Ray cluster to use."""
    n_gpus_per_node: int | None
    """Workers per machine: one per GPU, or this many CPU processes. Null: the number of GPUs of this machine, or 2 CPU
    processes (1 with a single core), rounded down to whole engines."""

    def __post_init__(self) -> None:
        _require_name("trainer.experiment_name", self.experiment_name)
        require_positive("trainer.nnodes", self.nnodes)
        if self.n_gpus_per_node is not None:
            require_positive("trainer.n_gpus_per_node", self.n_gpus_per_node)


@dataclass(frozen=True)
class EvaluationConfig:
    """Everything one run of ``verl.trainer.main_eval`` depends on."""

    device: Device
    """``auto``: CUDA if there is a GPU, else the CPU; ``cpu`` and ``cuda`` force one."""
    seed: int
    """Seed of sampling. Every sample has its own random stream, fixed by the seed, the benchmark, the problem and the
    sample's number."""
    runs_dir: str
    """Folder in which training runs are found and evaluations are written."""
    benchmarks: list[str]
    """Names of benchmarks in ``verl.evaluation.benchmarks.BENCHMARKS``, or of files in ``data.benchmark_dir``."""
    n_sampling: int
    """Responses per problem. More than an earlier evaluation in the same folder had: only the missing ones are
    generated; fewer: the first ones are used."""
    temperatures: list[float]
    """Softmax temperatures, each an evaluation of its own; 0 is greedy."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps the whole distribution."""
    top_k: int
    """Number of most likely tokens kept; -1 keeps all."""
    compare_to: Literal["auto", "first", "step0"]
    """Baseline of the reported differences, at the same temperature: ``step0`` of the same run; the ``first`` model; or
    ``auto``: step 0 if the run has one, else the first model."""
    model: CandidateConfig
    """What to evaluate if ``runs`` is empty, and the defaults of every entry of ``runs``."""
    runs: dict[str, CandidateConfig]
    """What to compare: alias -> ``path``, ``base``, ``steps``, ``template``, ``max_response_length``; missing values
    are taken from ``model``."""
    data: BenchmarkDataConfig
    rollout: EvaluationEngineConfig
    calculator: CalculatorConfig
    reward_score: RewardScoreConfig
    trainer: EvaluationTrainerConfig

    def __post_init__(self) -> None:
        require_seed(self.seed)
        fix = "name at least one, or choose a set, such as evaluation=embedded"
        require(len(self.benchmarks) > 0, "benchmarks", self.benchmarks, fix)
        require_distinct("benchmarks", self.benchmarks)
        require_distinct("temperatures", self.temperatures)
        for name in self.benchmarks:
            _require_name("benchmarks", name)
        source, fix = self.calculator.source, "an evaluation has no actor; set calculator.source=rollout"
        require(source == "rollout", "calculator.source", source, fix)
        self.model.check("model")
        for alias, run in self.runs.items():
            _require_name("runs", alias)
            run.check(f"runs.{alias}")
            require(run.path is not None, f"runs.{alias}.path", None, "name a training run or a model")
        named = bool(self.runs) or self.model.path is not None or self.model.base is not None
        require(named, "model.path", None, "name a training run or a model")
        self._check_sampling()
        parallel, trainer = self.rollout.tensor_parallel_size, self.trainer
        if trainer.n_gpus_per_node is not None:
            workers = trainer.nnodes * trainer.n_gpus_per_node
            check_divides("rollout.tensor_parallel_size", parallel, "trainer.nnodes*trainer.n_gpus_per_node", workers)

    def _check_sampling(self) -> None:
        require(self.n_sampling >= 1, "n_sampling", self.n_sampling, "must be at least 1")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        require(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "must be -1 or at least 1")
        for temperature in self.temperatures:
            require_not_negative("temperatures", temperature)
            alike = temperature == 0 and self.n_sampling > 1
            fix = "greedy decoding (temperature 0) gives one response; set n_sampling=1"
            require(not alike, "n_sampling", self.n_sampling, fix)


def parse_evaluation_config(tree: DictConfig) -> EvaluationConfig:
    """As ``parse_config``; an entry of ``runs`` takes what it leaves out from ``model``, and a plain text is its path.

    Raises:
        ConfigError: as ``parse_config``.
    """
    runs: Any = tree.get("runs")
    if OmegaConf.is_dict(runs) and OmegaConf.is_dict(tree.get("model")):
        tree = OmegaConf.create({key: tree._get_node(key) for key in tree})
        tree.runs = {str(alias): _completed(run, tree.model) for alias, run in runs.items()}
    return parse_config(EvaluationConfig, tree)


def _completed(run: Any, model: DictConfig) -> DictConfig:
    own = run if OmegaConf.is_dict(run) else {"path": run}
    return OmegaConf.create({**OmegaConf.to_container(model), **own})  # type: ignore[dict-item]


def _require_name(field: str, name: str) -> None:
    require(_NAME.fullmatch(name) is not None, field, name, "becomes a folder's name; use letters, digits and . _ + -")
