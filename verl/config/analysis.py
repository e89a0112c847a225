"""Configuration of ``verl.trainer.main_analysis``: the schema of ``configs/analysis.yaml``."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from omegaconf import DictConfig

from verl.config.checks import Group, NotNegativeInt, PositiveInt, rule, within
from verl.config.common import ModelConfig
from verl.config.evaluation import EvaluationConfig, ReadingModelConfig, complete_runs
from verl.config.load import parse_config

Pair = Annotated[list[str], rule(lambda pair: len(pair) == 2, "a pair is two metrics, x and y")]


@dataclass(frozen=True)
class ReadingPolicyConfig(ReadingModelConfig):
    """The model that reads the responses again: for log-probabilities, entropies and hidden states."""

    logits_chunk_size: NotNegativeInt
    """Tokens whose logits are in memory at the same time; 0: all of a micro-batch."""

    def model_config(self, path: str, trust_remote_code: bool, on_cpu: bool) -> ModelConfig:
        """Return the configuration of the model at ``path``."""
        return replace(super().model_config(path, trust_remote_code, on_cpu), logits_chunk_size=self.logits_chunk_size)


@dataclass(frozen=True)
class AnalysisOptions(Group):
    """Metrics, correlations and figures of the analysis."""

    mode: Literal["allin", "exploit", "explore"]
    """Tables by the release's names: ``exploit`` has a row per response, ``explore`` one per prompt, ``allin`` both."""
    prompt_files: list[str]
    """Files of prompts in veRL's layout (docs/data.md), each analysed like a benchmark under its file name; prompts are
    a single user turn."""
    layer: int
    """The layer of ``calculator.layers`` whose metrics have the release's plain names, and whose states are compared
    between responses. Other layers' metrics are ``layer_1/<name>`` and so on, in the order of ``calculator.layers``."""
    confidence_k: PositiveInt
    """Most frequent tokens that ``response_confidence`` is the mean over, at least 1."""
    repetition_n: PositiveInt
    """Length of the token sequences of ``n_gram_repetition_rate``, at least 1."""
    kl_floor: Annotated[float, within("(0, 1)")]
    """Least share of a token in ``pairwise_kl_div``, in (0, 1); it is about -log(kl_floor) without a common token."""
    reflection_words: list[str]
    """Words and phrases counted in ``reflection_words``, in any case and only whole."""
    response_pairs: list[Pair]
    """Pairs of metrics of a response: x (exploration) and y (exploitation) of a scatter, and correlated."""
    prompt_pairs: list[Pair]
    """The same of a prompt."""
    outcome: Literal["correctness", "test_score_0"]
    """The metric that all others are correlated with: ``correctness`` or ``test_score_0``."""
    draws: PositiveInt
    """Bootstrap draws of the prompts for each interval, at least 1."""

    def check(self) -> None:
        names = [Path(name).stem for name in self.prompt_files]
        self.require(len(set(names)) == len(names), "prompt_files", "two files have the same name; rename one")

    @property
    def per_response(self) -> bool:
        return self.mode != "explore"

    @property
    def per_prompt(self) -> bool:
        return self.mode != "exploit"


@dataclass(frozen=True)
class AnalysisConfig(EvaluationConfig):
    """Everything one run of ``verl.trainer.main_analysis`` depends on: an evaluation's options, and its own."""

    policy: ReadingPolicyConfig
    analysis: AnalysisOptions

    def check(self) -> None:
        layers, options = self.calculator.layers, self.analysis
        self.require(self.calculator.enable, "calculator.enable", "the analysis is of rank metrics; set it to true")
        self.require(options.layer in layers, "analysis.layer", f"must be one of calculator.layers={layers}")
        fix = "pairs of responses need several; set n_sampling to at least 2, or analysis.mode=exploit"
        self.require(self.n_sampling > 1 or not options.per_prompt, "n_sampling", fix)
        self.require(self.reward_model.path is None, "reward_model.path", "an analysis has no use for one; set null")
        clash = {Path(name).stem for name in options.prompt_files} & set(self.benchmarks)
        self.require(not clash, "analysis.prompt_files", "a file is named like a benchmark; rename it")

    @property
    def names_prompts(self) -> bool:
        return super().names_prompts or bool(self.analysis.prompt_files)

    def sampling(self, benchmarks: list[str]) -> EvaluationConfig:
        """Return the evaluation that generates responses on ``benchmarks``; its engines measure nothing."""
        values = {field.name: getattr(self, field.name) for field in fields(EvaluationConfig)}
        values |= {"benchmarks": benchmarks, "calculator": replace(self.calculator, enable=False)}
        return EvaluationConfig(**values)

    @property
    def layer_place(self) -> int:
        """The place of ``analysis.layer`` in ``calculator.layers``."""
        return self.calculator.layers.index(self.analysis.layer)


def parse_analysis_config(tree: DictConfig) -> AnalysisConfig:
    """Parse as ``parse_config``, after :func:`verl.config.evaluation.complete_runs`."""
    return parse_config(AnalysisConfig, complete_runs(tree))
