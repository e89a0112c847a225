"""Configuration of ``verl.trainer.main_eval``: the schema of ``configs/evaluation.yaml``."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl.config.calculator import CalculatorConfig
from verl.config.checks import (
    IS_FOLDER_NAME,
    NAMES_ONCE,
    NAMES_ONE,
    CountOrAll,
    FolderName,
    Group,
    PositiveInt,
    require,
    rule,
)
from verl.config.common import (
    Device,
    FSDPConfig,
    LoraConfig,
    MachineOptions,
    ModelConfig,
    Seed,
    Temperature,
    WorkersPerMachine,
    check_divides,
)
from verl.config.data import ChatArguments
from verl.config.load import parse_config
from verl.config.rewards import RewardModelConfig, RewardScoreConfig
from verl.config.rollout import EngineConfig, MultiTurnConfig, SamplingFilters

LAST = -1
"""Stands for a run's newest checkpoint in ``steps``."""

CheckpointStep = Annotated[int, rule(lambda step: step >= LAST, "must be at least 0, or -1 for the newest")]


@dataclass(frozen=True)
class TargetConfig(Group):
    """A run to evaluate: checkpoints of a training run, or a model by itself."""

    path: str | None
    """A training run's folder (``trainer.default_local_dir``), one of its ``global_step_N``, or a model's folder or hub
    id. Null: the newest run below ``runs_dir`` that was trained from ``base``."""
    base: str | None
    """The model before training, step 0. Null: the one in the run's ``config.yaml``."""
    steps: Annotated[list[CheckpointStep], NAMES_ONE]
    """Checkpoints of the run: 0 is the base model, -1 the newest. Ignored for a model by itself, which is step 0."""
    template: str
    """Prompt template, a key of ``verl.data.templates.TEMPLATES``; ``chat`` is the model's own chat template."""
    apply_chat_template_kwargs: ChatArguments
    """Arguments for the chat template of ``chat`` and ``chat-boxed``, such as ``{enable_thinking: false}``."""
    max_response_length: PositiveInt
    """Longest response in tokens. Generation stops there, and the response counts as truncated."""


@dataclass(frozen=True)
class BenchmarkDataConfig(Group):
    """Source of the problems."""

    benchmark_dir: str | None
    """Folder of benchmark files, ``<name>.jsonl`` or ``<name>/test.jsonl``, before the hub's. Null: only the hub."""
    fields: dict[str, dict[str, str]]
    """Names of fields that are not recognised: benchmark -> our name, such as ``question`` or ``answer`` (all:
    ``verl.evaluation.benchmarks.rows.FIELD_NAMES``) -> the file's name."""
    max_problems: CountOrAll
    """Number of problems to evaluate of each benchmark, from its first; -1: all."""
    few_shot: bool
    """Put worked examples before each question, in the benchmarks where this is usual for base models."""

    @property
    def limit(self) -> int | None:
        """``max_problems`` as the end of a slice."""
        return None if self.max_problems == -1 else self.max_problems


@dataclass(frozen=True)
class EvaluationEngineConfig(EngineConfig):
    """The vLLM engines."""

    trust_remote_code: bool
    """Allow code shipped inside the model folder to run."""
    multi_turn: MultiTurnConfig

    def check(self) -> None:
        fix = "verdicts are the verifiers' here; set it to add"
        self.require(self.multi_turn.reward == "add", "multi_turn.reward", fix)
        drafts = self.engine_kwargs.get("speculative_config") if self.seeded else None
        fix = "it draws in its own way; set rollout.seeded=false, or leave it out"
        require(drafts is None, "engine_kwargs.speculative_config", drafts, fix)


@dataclass(frozen=True)
class ReadingModelConfig(Group):
    """A model that reads responses."""

    param_dtype: Literal["auto", "float32", "bfloat16"]
    """Precision of matrix products; ``auto`` is float32 on a CPU and bfloat16 on a GPU."""
    attn_implementation: str
    """Attention kernel by its ``transformers`` name: ``sdpa``, ``eager``, ``flash_attention_2``, ..."""
    micro_batch_size: PositiveInt
    """Responses read at once by each worker, at least 1."""
    fsdp: FSDPConfig

    def model_config(self, path: str, trust_remote_code: bool, on_cpu: bool) -> ModelConfig:
        """Return the configuration of the model at ``path``."""
        dtype = self.param_dtype
        if dtype == "auto":
            dtype = "float32" if on_cpu else "bfloat16"
        return ModelConfig(
            path=path,
            override_config={},
            param_dtype=dtype,
            logits_dtype="auto",
            attn_implementation=self.attn_implementation,
            trust_remote_code=trust_remote_code,
            gradient_checkpointing=False,
            use_remove_padding=False,
            share_prompts=False,
            use_liger=False,
            ulysses_sequence_parallel_size=1,
            logits_chunk_size=0,
            lora=LoraConfig(rank=0, alpha=1.0, target_modules=["all-linear"], dropout=0.0),
            lora_adapter_path=None,
            fsdp=self.fsdp,
        )


@dataclass(frozen=True)
class RerankingConfig(ReadingModelConfig):
    """A reward model that chooses among the responses to a problem: rm@k, and votes weighted by its scores."""

    path: str | None
    """As ``reward_model.model.path`` in training: a sequence classification model with one output. Null: none."""
    trust_remote_code: bool
    """Allow code shipped inside the model folder to run."""
    max_length: PositiveInt
    """Most tokens of question and response; longer texts lose their first tokens."""

    def held(self, on_cpu: bool) -> RewardModelConfig:
        """Return the reward model's configuration for workers."""
        assert self.path is not None, "there is a reward model"
        model = self.model_config(self.path, self.trust_remote_code, on_cpu)
        sizes = {"micro_batch_size_per_gpu": self.micro_batch_size, "max_length": self.max_length}
        return RewardModelConfig(enable=True, model=model, rule_weight=0.0, weight=1.0, **sizes)


@dataclass(frozen=True)
class EvaluationTrainerConfig(MachineOptions):
    """The workers and the output."""

    experiment_name: FolderName
    """Name of the evaluation in trackers, and of its folder."""
    default_local_dir: str | None
    """Folder of all output. If it holds the same evaluation, finished or not, that evaluation is resumed. Null: a
    folder named after what is evaluated, in ``<runs_dir>/evaluation/<experiment_name>/``."""
    n_gpus_per_node: WorkersPerMachine | None
    """Workers per machine. Null: all GPUs of the machine with the fewest, or 2 CPU processes, in whole engines."""


@dataclass(frozen=True)
class EvaluationConfig(SamplingFilters):
    """Everything one run of ``verl.trainer.main_eval`` depends on."""

    device: Device
    """``auto`` uses CUDA if there is a GPU and the CPU otherwise; ``cpu`` and ``cuda`` force one."""
    seed: Seed
    """Seed of sampling. Every sample has its own random stream, fixed by this seed, the benchmark, the problem and the
    sample's number."""
    runs_dir: str
    """Folder in which training runs are looked for and evaluations are written."""
    benchmarks: Annotated[list[FolderName], NAMES_ONCE]
    """Names of benchmarks in ``verl.evaluation.benchmarks.BENCHMARKS`` or of files in ``data.benchmark_dir``."""
    n_sampling: PositiveInt
    """Responses per problem. If the folder holds some from an earlier evaluation, only the missing ones are generated;
    if it holds more, the first ones are used."""
    temperatures: Annotated[list[Temperature], NAMES_ONE, NAMES_ONCE]
    """Sampling temperatures, each evaluated separately; 0 is greedy decoding."""
    compare_to: Literal["auto", "first", "step0"]
    """Baseline of differences, at the same temperature: ``step0`` of the same run; the ``first`` model named; or
    ``auto``, step 0 if the run has one and the first model otherwise."""
    model: TargetConfig
    """The model to evaluate if ``runs`` is empty, and the defaults of every entry of ``runs``."""
    runs: dict[str, TargetConfig]
    """Models to compare: alias -> ``path``, ``base``, ``steps``, ``template``, ``apply_chat_template_kwargs``,
    ``max_response_length``. An entry takes what it leaves out from ``model``."""
    data: BenchmarkDataConfig
    rollout: EvaluationEngineConfig
    calculator: CalculatorConfig
    reward_score: RewardScoreConfig
    reward_model: RerankingConfig
    trainer: EvaluationTrainerConfig

    def check(self) -> None:
        fix = "name at least one, or choose a set, such as evaluation=embedded"
        self.require(self.names_prompts, "benchmarks", fix)
        self.require(
            self.calculator.source == "rollout", "calculator.source", "an evaluation has no actor; set it to rollout"
        )
        fix = "rank metrics of conversations are measured in training; set calculator.enable=false"
        self.require(not (self.rollout.multi_turn.enable and self.calculator.enable), "rollout.multi_turn.enable", fix)
        fix = "an evaluation measures hidden states only; set []"
        self.require(not self.calculator.metric_indices_add, "calculator.metric_indices_add", fix)
        for alias, run in self.runs.items():
            IS_FOLDER_NAME("runs", alias)
            require(run.path is not None, f"runs.{alias}.path", None, "name a training run or a model")
        named = bool(self.runs) or self.model.path is not None or self.model.base is not None
        self.require(named, "model.path", "name a training run or a model")
        greedy = 0 in self.temperatures
        fix = "greedy decoding (temperature 0) gives one response; set n_sampling=1"
        self.require(not greedy or self.n_sampling == 1, "n_sampling", fix)
        parallel, workers = self.rollout.tensor_parallel_size, self.trainer.n_gpus_per_node
        if workers is not None:
            check_divides("rollout.tensor_parallel_size", parallel, "trainer.n_gpus_per_node", workers)

    @property
    def names_prompts(self) -> bool:
        """Whether there is anything to evaluate."""
        return len(self.benchmarks) > 0


def parse_evaluation_config(tree: DictConfig) -> EvaluationConfig:
    """Parse as ``parse_config``, after :func:`complete_runs`."""
    return parse_config(EvaluationConfig, complete_runs(tree))


def complete_runs(tree: DictConfig) -> DictConfig:
    """Complete every entry of ``runs`` in ``tree`` from ``model``; an entry may be only its path."""
    runs: Any = tree.get("runs")
    if OmegaConf.is_dict(runs) and OmegaConf.is_dict(tree.get("model")):
        tree = OmegaConf.create({key: tree._get_node(key) for key in tree})
        defaults: Any = OmegaConf.to_container(tree.model)
        tree.runs = {
            str(alias): {**defaults, **(run if OmegaConf.is_dict(run) else {"path": run})}
            for alias, run in runs.items()
        }
    return tree
