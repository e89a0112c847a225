"""Configuration of ``verl.trainer.main_eval``: the schema of ``configs/evaluation.yaml``."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl.config.calculator import CalculatorConfig
from verl.config.checks import require, require_distinct, require_positive
from verl.config.common import (
    Device,
    EngineConfig,
    Logger,
    MachineOptions,
    check_divides,
    check_temperature,
    check_truncation,
    require_place,
    require_seed,
)
from verl.config.data import check_chat_arguments
from verl.config.load import parse_config
from verl.config.rewards import RewardScoreConfig

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
"""Names that are part of a folder of results."""

LAST = -1
"""Stands for a run's newest checkpoint in ``steps``."""


@dataclass(frozen=True)
class TargetConfig:
    """What to evaluate: checkpoints of a training run, or a model by itself."""

    path: str | None
    """A training run's folder (``trainer.default_local_dir``), one of its ``global_step_N``, or a model's folder or hub
    id. Null: the newest run below ``runs_dir`` that was trained from ``base``."""
    base: str | None
    """The model before training, step 0. Null: the one in the run's ``config.yaml``."""
    steps: list[int]
    """Checkpoints of the run: 0 is the base model, -1 the newest. Ignored for a model by itself, which is step 0."""
    template: str
    """Prompt template, a key of ``verl.data.templates.TEMPLATES``; ``chat`` is the model's own chat template."""
    apply_chat_template_kwargs: dict[str, Any]
    """Arguments for the tokenizer's chat template, such as ``{enable_thinking: false}``; for ``chat`` and
    ``chat-boxed``."""
    max_response_length: int
    """Longest response in tokens. Generation stops there, and the response counts as truncated."""

    def check(self, prefix: str) -> None:
        """Raise ``ConfigError`` naming ``<prefix>.<field>`` for a value out of range."""
        require(len(self.steps) > 0, f"{prefix}.steps", self.steps, "name at least one; 0 is the base model")
        for step in self.steps:
            require(step >= LAST, f"{prefix}.steps", self.steps, "must be at least 0, or -1 for the newest")
        require_positive(f"{prefix}.max_response_length", self.max_response_length)
        check_chat_arguments(f"{prefix}.apply_chat_template_kwargs", self.apply_chat_template_kwargs)


@dataclass(frozen=True)
class BenchmarkDataConfig:
    """Where the problems come from."""

    benchmark_dir: str | None
    """Folder of benchmark files, ``<name>.jsonl`` or ``<name>/test.jsonl``. They replace the hub's copies; a file of
    your own may have any name. Null: only the hub."""
    fields: dict[str, dict[str, str]]
    """Names of fields that are not recognised: benchmark -> our name, such as ``question`` or ``answer`` (all:
    ``verl.evaluation.benchmarks.rows.FIELD_NAMES``) -> the file's name."""
    max_problems: int
    """Number of problems to evaluate of each benchmark, from its first; -1: all."""
    few_shot: bool
    """Put worked examples before each question, in the benchmarks where this is usual for base models."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        drafts = self.engine_kwargs.get("speculative_config") if self.seeded else None
        field = "rollout.engine_kwargs.speculative_config"
        require(drafts is None, field, drafts, "it draws in its own way; set rollout.seeded=false, or leave it out")


@dataclass(frozen=True)
class EvaluationTrainerConfig(MachineOptions):
    """The workers and the output."""

    project_name: str
    """Project of the evaluation in trackers."""
    experiment_name: str
    """Name of the evaluation in trackers, and of its folder."""
    default_local_dir: str | None
    """Folder of all output. If it holds the same evaluation, finished or not, that evaluation is resumed. Null: a
    folder named after what is evaluated, in ``<runs_dir>/evaluation/<experiment_name>/``."""
    logger: list[Logger]
    """Trackers, as in training: ``console``, ``tensorboard``, ``wandb``, ``mlflow``, ``swanlab``, ``file``;
    ``metrics.jsonl`` is always written."""
    nnodes: int
    """Machines of the Ray cluster to use."""
    n_gpus_per_node: int | None
    """Workers per machine: GPUs, or CPU processes. Null: all GPUs of the machine that has the fewest,
    or 2 CPU processes (1 with a single core), rounded to whole engines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_name("trainer.experiment_name", self.experiment_name)
        require_place(self.nnodes, 1 if self.n_gpus_per_node is None else self.n_gpus_per_node)


@dataclass(frozen=True)
class EvaluationConfig:
    """Everything one run of ``verl.trainer.main_eval`` depends on."""

    device: Device
    """``auto`` uses CUDA if there is a GPU and the CPU otherwise; ``cpu`` and ``cuda`` force one."""
    seed: int
    """Seed of sampling. Every sample has its own random stream, fixed by this seed, the benchmark, the problem and the
    sample's number."""
    runs_dir: str
    """Folder in which training runs are looked for and evaluations are written."""
    benchmarks: list[str]
    """Names of benchmarks in ``verl.evaluation.benchmarks.BENCHMARKS`` or of files in ``data.benchmark_dir``."""
    n_sampling: int
    """Responses per problem. If the folder holds some from an earlier evaluation, only the missing ones are generated;
    if it holds more, the first ones are used."""
    temperatures: list[float]
    """Sampling temperatures, each evaluated separately; 0 is greedy decoding."""
    top_p: float
    """Probability mass of nucleus sampling, in (0, 1]; 1 keeps the whole distribution."""
    top_k: int
    """Number of most likely tokens to keep; -1 keeps all."""
    min_p: float
    """Tokens are kept whose probability is at least this share of the most likely token's, in [0, 1]; 0 keeps all."""
    repetition_penalty: float
    """Divides positive logits of tokens that prompt or response hold already, and multiplies negative ones; above 0,
    1 is none."""
    compare_to: Literal["auto", "first", "step0"]
    """Baseline of differences, at the same temperature: ``step0`` of the same run; the ``first`` model named; or
    ``auto``, step 0 if the run has one and the first model otherwise."""
    model: TargetConfig
    """What is evaluated if ``runs`` is empty, and the defaults of every entry of ``runs``."""
    runs: dict[str, TargetConfig]
    """What to compare: alias -> ``path``, ``base``, ``steps``, ``template``, ``apply_chat_template_kwargs``,
    ``max_response_length``. An entry takes what it leaves out from ``model``."""
    data: BenchmarkDataConfig
    rollout: EvaluationEngineConfig
    calculator: CalculatorConfig
    reward_score: RewardScoreConfig
    trainer: EvaluationTrainerConfig

    def __post_init__(self) -> None:
        require_seed(self.seed)
        fix = "name at least one, or choose a set, such as evaluation=embedded"
        require(self.names_prompts, "benchmarks", self.benchmarks, fix)
        if self.benchmarks:
            require_distinct("benchmarks", self.benchmarks)
        require_distinct("temperatures", self.temperatures)
        for name in self.benchmarks:
            _require_name("benchmarks", name)
        source = self.calculator.source
        require(source == "rollout", "calculator.source", source, "an evaluation has no actor; set it to rollout")
        added = self.calculator.metric_indices_add
        require(not added, "calculator.metric_indices_add", added, "an evaluation measures hidden states only; set []")
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
            field = "rollout.tensor_parallel_size"
            check_divides(field, parallel, "trainer.n_gpus_per_node", trainer.n_gpus_per_node)

    @property
    def names_prompts(self) -> bool:
        """Whether there is anything to evaluate."""
        return len(self.benchmarks) > 0

    def _check_sampling(self) -> None:
        require(self.n_sampling >= 1, "n_sampling", self.n_sampling, "must be at least 1")
        check_truncation("", self.top_p, self.top_k, self.min_p, self.repetition_penalty)
        for temperature in self.temperatures:
            check_temperature("temperatures", temperature)
            repeats = temperature == 0 and self.n_sampling > 1
            fix = "greedy decoding (temperature 0) gives one response; set n_sampling=1"
            require(not repeats, "n_sampling", self.n_sampling, fix)


def parse_evaluation_config(tree: DictConfig) -> EvaluationConfig:
    """As ``parse_config``, after :func:`complete_runs`."""
    return parse_config(EvaluationConfig, complete_runs(tree))


def complete_runs(tree: DictConfig) -> DictConfig:
    """``tree`` with every entry of ``runs`` completed from ``model``; an entry may be only its path."""
    runs: Any = tree.get("runs")
    if OmegaConf.is_dict(runs) and OmegaConf.is_dict(tree.get("model")):
        tree = OmegaConf.create({key: tree._get_node(key) for key in tree})
        defaults: Any = OmegaConf.to_container(tree.model)
        tree.runs = {
            str(alias): {**defaults, **(run if OmegaConf.is_dict(run) else {"path": run})}
            for alias, run in runs.items()
        }
    return tree


def _require_name(field: str, name: str) -> None:
    require(_NAME.fullmatch(name) is not None, field, name, "must name a folder: only letters, digits and . _ + -")
