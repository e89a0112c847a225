"""Configuration of ``verl.trainer.main_eval``: the schema of ``configs/evaluation.yaml``.

The dataclasses are the schema; ``configs/`` holds the values.
"""

import re
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.checks import require, require_choice, require_positive
from verl.config.common import DEVICES, LOGGERS, EngineConfig, require_seed
from verl.config.load import parse_config
from verl.config.signal import CalculatorConfig, RewardScoreConfig

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
"""What may name a folder of results."""

LAST = -1
"""Stands for a run's newest checkpoint in ``steps``."""


@dataclass(frozen=True)
class CandidateConfig:
    """A training run, of which some checkpoints are evaluated, or a model by itself."""

    path: str | None
    """A training run's folder (``trainer.default_local_dir``), one of its ``global_step_N``, or a model: a folder or a
    hub id. Null: the newest run below ``runs_dir`` that was trained from ``base``."""
    base: str | None
    """The model of step 0, before training; null: the one that the run's ``config.yaml`` names."""
    steps: list[int]
    """Checkpoints of the run: 0 is the base model, -1 the newest. A model by itself is step 0, whatever stands here."""
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
    """Where problems come from."""

    benchmark_dir: str | None
    """Folder of benchmark files, ``<name>.jsonl`` or ``<name>/test.jsonl``, which come before the hub; any name will do
    for a file of your own. Null: the hub alone."""
    fields: dict[str, dict[str, str]]
    """Fields that are not recognised: benchmark -> our field, such as ``question`` or ``answer`` (all:
    ``verl.evaluation.benchmarks.rows.FIELD_NAMES``) -> the file's."""
    max_problems: int
    """Evaluate the first so many problems of each benchmark; -1: all."""
    few_shot: bool
    """Put worked examples before each question, in the benchmarks with which the community does so for base models."""

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
    """Allow code shipped inside the model folder to run."""


@dataclass(frozen=True)
class EvaluationTrainerConfig:
    """The workers, and what the evaluation leaves behind."""

    project_name: str
    """Project under which trackers file the evaluation."""
    experiment_name: str
    """Name of the evaluation in trackers, and of its folder."""
    default_local_dir: str | None
    """Folder of everything the evaluation leaves behind; one that holds the same evaluation, finished or not, is gone
    on with. Null: ``<runs_dir>/evaluation/<experiment_name>/`` and there a folder named after what is evaluated."""
    logger: list[str]
    """Trackers besides ``metrics.jsonl``, which is always written: ``console``, ``tensorboard``, ``wandb``."""
    nnodes: int
    """Machines of the Ray cluster to use."""
    n_gpus_per_node: int | None
    """Workers per machine: one per GPU, or that many CPU processes. Null: as many as this machine has GPUs, or 2 CPU
    processes (1 with a single core), rounded to whole engines."""

    def __post_init__(self) -> None:
        _require_name("trainer.experiment_name", self.experiment_name)
        for name in self.logger:
            require_choice("trainer.logger", name, LOGGERS)
        require_positive("trainer.nnodes", self.nnodes)
        if self.n_gpus_per_node is not None:
            require_positive("trainer.n_gpus_per_node", self.n_gpus_per_node)


@dataclass(frozen=True)
class EvaluationConfig:
    """Everything one run of ``verl.trainer.main_eval`` depends on."""

    device: str
    """``auto`` takes CUDA where there is a GPU, else the CPU; ``cpu`` or ``cuda`` force one."""
    seed: int
    """Seed of sampling. Every sample has a random stream of its own, fixed by this, the benchmark, the problem and the
    sample's number."""
    runs_dir: str
    """Folder below which training runs are looked for, and evaluations are written."""
    benchmarks: list[str]
    """Names of benchmarks, of ``verl.evaluation.benchmarks.BENCHMARKS`` or of files in ``data.benchmark_dir``."""
    n_sampling: int
    """Responses per problem. More than an earlier evaluation in the same folder had: only the missing ones are
    generated; fewer: the first ones are used."""
    temperatures: list[float]
    """Softmax temperatures, each an evaluation of its own; 0 is greedy."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps the whole distribution."""
    top_k: int
    """Number of most likely tokens kept; -1 keeps all."""
    compare_to: str
    """What differences are against, at the same temperature: ``step0`` of the same run, the ``first`` model named, or
    ``auto``: step 0 where the run has one, else the first."""
    model: CandidateConfig
    """What is evaluated where ``runs`` is empty, and what holds for every run that does not say otherwise."""
    runs: dict[str, CandidateConfig]
    """What to compare: alias -> ``path``, ``base``, ``steps``, ``template``, ``max_response_length``; what an entry
    leaves out is as in ``model``."""
    data: BenchmarkDataConfig
    rollout: EvaluationEngineConfig
    calculator: CalculatorConfig
    reward_score: RewardScoreConfig
    trainer: EvaluationTrainerConfig

    def __post_init__(self) -> None:
        require_choice("device", self.device, DEVICES)
        require_seed(self.seed)
        mend = "name at least one, or choose a set, such as evaluation=embedded"
        require(len(self.benchmarks) > 0, "benchmarks", self.benchmarks, mend)
        require(len(self.temperatures) > 0, "temperatures", self.temperatures, "name at least one")
        for field in ("benchmarks", "temperatures"):
            values = getattr(self, field)
            require(len(set(values)) == len(values), field, values, "name each once")
        for name in self.benchmarks:
            _require_name("benchmarks", name)
        require_choice("compare_to", self.compare_to, ["auto", "first", "step0"])
        source = self.calculator.source
        require(source == "rollout", "calculator.source", source, "an evaluation has no actor; set it to rollout")
        self.model.check("model")
        for alias, run in self.runs.items():
            _require_name("runs", alias)
            run.check(f"runs.{alias}")
            require(run.path is not None, f"runs.{alias}.path", None, "name a training run or a model")
        named = bool(self.runs) or self.model.path is not None or self.model.base is not None
        require(named, "model.path", None, "name a training run or a model")
        self._check_sampling()
        parallel = self.rollout.tensor_parallel_size
        workers = self.trainer.n_gpus_per_node
        if workers is not None:
            require(
                (self.trainer.nnodes * workers) % parallel == 0,
                "rollout.tensor_parallel_size",
                parallel,
                f"must divide the {self.trainer.nnodes * workers} workers, trainer.nnodes*trainer.n_gpus_per_node",
            )

    def _check_sampling(self) -> None:
        require(self.n_sampling >= 1, "n_sampling", self.n_sampling, "must be at least 1")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        require(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "must be -1 or at least 1")
        for temperature in self.temperatures:
            require(temperature >= 0, "temperatures", temperature, "must be at least 0")
            alike = temperature == 0 and self.n_sampling > 1
            mend = "greedy decoding (temperature 0) gives one response; set n_sampling=1"
            require(not alike, "n_sampling", self.n_sampling, mend)


def parse_evaluation_config(tree: DictConfig) -> EvaluationConfig:
    """As ``parse_config``; what an entry of ``runs`` leaves out is taken from ``model``.

    A run that is only a text is its path. Raises ``ConfigError`` as there.
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
    require(_NAME.fullmatch(name) is not None, field, name, "names a folder: letters, digits and . _ + - only")
