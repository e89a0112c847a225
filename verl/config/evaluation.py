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
from verl.config.rollout import EngineConfig, MultiTurnConfig, SamplingFilters, StopStrings, StopTokenIds

LAST = -1
"""Value of ``steps`` that selects a run's newest checkpoint."""

CheckpointStep = Annotated[int, rule(lambda step: step >= LAST, "must be at least 0, or -1 for the newest")]


@dataclass(frozen=True)
class TargetConfig(Group):
    """An evaluation target: checkpoints of a training run, or a standalone model."""

    path: str | None
    """Folder of a training run (``trainer.default_local_dir``), a checkpoint (``global_step_N``) or a model, or a hub
    id. Null selects the newest run in ``runs_dir``, or the newest run trained from ``base`` if it is set."""
    base: str | None
    """Initial model, evaluated as step 0, or null for the model named in the run's ``config.yaml``."""
    steps: Annotated[list[CheckpointStep], NAMES_ONE]
    """Steps to evaluate: 0 is the base model, -1 the newest checkpoint. A standalone model always counts as step 0."""
    template: str | None
    """Prompt template, a key of ``verl.data.templates.TEMPLATES``; ``chat`` selects the model's own chat template. Null
    selects the template that the run was trained with, or ``qwen-boxed`` for a standalone model."""
    apply_chat_template_kwargs: ChatArguments | None
    """Arguments of the chat template in ``chat`` and ``chat-boxed``, such as ``{enable_thinking: false}``, or null to
    use the arguments that the run was trained with."""
    max_response_length: PositiveInt | None
    """Maximum response length in tokens. Longer responses are cut off and count as truncated. Null selects the run's
    ``data.max_response_length``, or 1536 for a standalone model."""
    stop: StopStrings | None
    """Strings that end a response in addition to the template's, or null for the run's ``rollout.stop``."""
    stop_token_ids: StopTokenIds | None
    """Tokens that end a response in addition to the template's, or null for the run's ``rollout.stop_token_ids``."""


@dataclass(frozen=True)
class BenchmarkDataConfig(Group):
    """Source and selection of the problems."""

    benchmark_dir: str | None
    """Folder of ``<name>.jsonl`` or ``<name>/test.jsonl`` files, which take precedence over the hub, or null to use
    only the hub."""
    prompt_key: str | None
    """Question column in files of ``benchmark_dir`` that are not published benchmarks, or null to detect it."""
    answer_key: str | None
    """Answer column in files of ``benchmark_dir`` that are not published benchmarks, or null to detect it."""
    data_source: str | None
    """Name of the verifier, such as ``math``, for files of ``benchmark_dir`` that are not published benchmarks. Null
    selects ``multiple_choice`` for problems with options and a letter answer, and ``open_answer`` for others."""
    fields: dict[str, dict[str, str]]
    """Field names that are not detected automatically. Maps each benchmark to a mapping from standard field names, such
    as ``question`` (see ``verl.evaluation.benchmarks.rows.FIELD_NAMES``), to the names in the file."""
    generated: dict[str, dict[str, Any]]
    """Maps reasoning-gym benchmarks to their options, as in training. ``dataset`` is the name of the generator."""
    max_problems: CountOrAll
    """Maximum number of problems per benchmark, in file order, or -1 for all."""
    few_shot: bool
    """Prepend examples to the questions of benchmarks on which base models are usually evaluated few-shot."""

    @property
    def limit(self) -> int | None:
        """``max_problems`` as the end of a slice, or None for all problems."""
        return None if self.max_problems == -1 else self.max_problems

    @property
    def keys(self) -> dict[str, str]:
        """``prompt_key`` and ``answer_key``, if set, in the format of a ``fields`` entry."""
        keys = {"question": self.prompt_key, "answer": self.answer_key}
        return {ours: theirs for ours, theirs in keys.items() if theirs is not None}


@dataclass(frozen=True)
class EvaluationEngineConfig(EngineConfig):
    """Options of the vLLM engines."""

    trust_remote_code: bool
    """Allow running code from the model folder."""
    multi_turn: MultiTurnConfig

    def check(self) -> None:
        drafts = self.engine_kwargs.get("speculative_config") if self.seeded else None
        fix = "it draws in its own way; set rollout.seeded=false, or leave it out"
        require(drafts is None, "engine_kwargs.speculative_config", drafts, fix)


@dataclass(frozen=True)
class ReadingModelConfig(Group):
    """Options of a model that scores responses."""

    param_dtype: Literal["auto", "float32", "bfloat16"]
    """Precision of matrix products; ``auto`` is float32 on a CPU and bfloat16 on a GPU."""
    attn_implementation: str
    """Name of the attention kernel in ``transformers``: ``sdpa``, ``eager``, ``flash_attention_2``, ..."""
    micro_batch_size: PositiveInt
    """Number of responses per forward pass on each worker, at least 1."""
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
    """A reward model that ranks the responses to each problem, for rm@k and score-weighted voting."""

    path: str | None
    """Path of the reward model, as for ``reward_model.model.path`` in training, or null to use no reward model."""
    trust_remote_code: bool
    """Allow running code from the model folder."""
    max_length: PositiveInt
    """Maximum total length of question and response in tokens; longer inputs are truncated from the left."""

    def held(self, on_cpu: bool) -> RewardModelConfig:
        """Return the configuration of the reward model for the workers."""
        assert self.path is not None, "there is a reward model"
        model = self.model_config(self.path, self.trust_remote_code, on_cpu)
        sizes = {"micro_batch_size_per_gpu": self.micro_batch_size, "max_length": self.max_length}
        return RewardModelConfig(enable=True, model=model, rule_weight=0.0, weight=1.0, **sizes)


@dataclass(frozen=True)
class EvaluationTrainerConfig(MachineOptions):
    """Workers and output of an evaluation."""

    experiment_name: FolderName
    """Name of the evaluation, used in trackers and in the path of the output folder."""
    default_local_dir: str | None
    """Output folder. If the folder already contains this evaluation, finished or not, the evaluation is resumed. Null
    selects a folder in ``<runs_dir>/evaluation/<experiment_name>/`` that is named after the evaluated models."""
    n_gpus_per_node: WorkersPerMachine | None
    """Number of workers per machine. Null uses the GPU count of the smallest machine, or up to 2 workers on a CPU,
    rounded down to a multiple of ``rollout.tensor_parallel_size``."""


@dataclass(frozen=True)
class EvaluationConfig(SamplingFilters):
    """All options of one run of ``verl.trainer.main_eval``."""

    device: Device
    """Device: ``auto`` uses CUDA if there is a GPU, and the CPU otherwise; ``cpu`` and ``cuda`` force a choice."""
    seed: Seed
    """Sampling seed. Each sample's random stream depends on this seed and on its benchmark, problem and index."""
    runs_dir: str
    """Folder that contains the training runs and the saved evaluations."""
    benchmarks: Annotated[list[FolderName], NAMES_ONCE]
    """Names of benchmarks in ``verl.evaluation.benchmarks.BENCHMARKS`` or of files in ``data.benchmark_dir``. An empty
    list selects the validation files of the evaluated runs."""
    n_sampling: PositiveInt
    """Number of responses per problem. Responses of an earlier evaluation in the output folder are reused: only missing
    responses are generated, and surplus responses are ignored."""
    temperatures: Annotated[list[Temperature], NAMES_ONE, NAMES_ONCE]
    """Sampling temperatures, each evaluated separately; 0 decodes greedily."""
    compare_to: Literal["auto", "first", "step0"]
    """Baseline for differences at the same temperature: ``step0`` is step 0 of the same run; ``first`` is the first
    model listed; ``auto`` uses step 0 if the run has one, and the first model otherwise."""
    model: TargetConfig
    """Model to evaluate if ``runs`` is empty; also provides the defaults for every entry of ``runs``."""
    runs: dict[str, TargetConfig]
    """Models to compare, keyed by alias. The options are ``path``, ``base``, ``steps``, ``template``,
    ``apply_chat_template_kwargs``, ``max_response_length``. Missing options default to the values in ``model``."""
    data: BenchmarkDataConfig
    rollout: EvaluationEngineConfig
    calculator: CalculatorConfig
    reward_score: RewardScoreConfig
    reward_model: RerankingConfig
    trainer: EvaluationTrainerConfig

    def check(self) -> None:
        fix = "name at least one, or a run as model.path, or choose a set, such as evaluation=embedded"
        self.require(self.names_prompts or bool(self.runs) or self.model.path is not None, "benchmarks", fix)
        self.require(
            self.calculator.source == "rollout", "calculator.source", "an evaluation has no actor; set it to rollout"
        )
        fix = "rank metrics of conversations are measured in training; set calculator.enable=false"
        self.require(not (self.rollout.multi_turn.enable and self.calculator.enable), "rollout.multi_turn.enable", fix)
        fix = "an evaluation measures hidden states only; set []"
        self.require(not self.calculator.metric_indices_add, "calculator.metric_indices_add", fix)
        judge = self.reward_score.judge
        option = "pairs" if judge.pairs else "model.path"
        fix = f"an evaluation asks a judge at base_url for the score of each response; leave out {option}"
        self.require(not judge.waits, f"reward_score.judge.{option}", fix)
        for alias, run in self.runs.items():
            IS_FOLDER_NAME("runs", alias)
            require(run.path is not None, f"runs.{alias}.path", None, "name a training run or a model")
        greedy = 0 in self.temperatures
        fix = "greedy decoding (temperature 0) gives one response; set n_sampling=1"
        self.require(not greedy or self.n_sampling == 1, "n_sampling", fix)
        parallel, workers = self.rollout.tensor_parallel_size, self.trainer.n_gpus_per_node
        if workers is not None:
            check_divides("rollout.tensor_parallel_size", parallel, "trainer.n_gpus_per_node", workers)

    @property
    def scored(self) -> bool:
        """Whether verifiers score the responses; otherwise, only an environment does."""
        return not self.rollout.multi_turn.replaces_verifiers

    @property
    def names_prompts(self) -> bool:
        """Whether the config lists at least one benchmark."""
        return len(self.benchmarks) > 0


def parse_evaluation_config(tree: DictConfig) -> EvaluationConfig:
    """Complete the runs with :func:`complete_runs`, then parse the config with ``parse_config``."""
    return parse_config(EvaluationConfig, complete_runs(tree))


def complete_runs(tree: DictConfig) -> DictConfig:
    """Fill in the missing options of every entry of ``runs`` from ``model``; an entry can also be just a path."""
    runs: Any = tree.get("runs")
    if OmegaConf.is_dict(runs) and OmegaConf.is_dict(tree.get("model")):
        tree = OmegaConf.create({key: tree._get_node(key) for key in tree})
        defaults: Any = OmegaConf.to_container(tree.model)
        tree.runs = {
            str(alias): {**defaults, **(run if OmegaConf.is_dict(run) else {"path": run})}
            for alias, run in runs.items()
        }
    return tree
