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
    """Options of the model that rescores responses to obtain log-probabilities, entropies and hidden states."""

    logits_chunk_size: NotNegativeInt
    """Number of tokens whose logits are in memory at once, or 0 for all tokens of a micro-batch."""

    def model_config(self, path: str, trust_remote_code: bool, on_cpu: bool) -> ModelConfig:
        """Return the configuration of the model at ``path``."""
        return replace(super().model_config(path, trust_remote_code, on_cpu), logits_chunk_size=self.logits_chunk_size)


@dataclass(frozen=True)
class AnalysisOptions(Group):
    """Metrics, correlations and figures of the analysis."""

    mode: Literal["allin", "exploit", "explore"]
    """Tables to write: ``exploit`` (one row per response), ``explore`` (one row per prompt) or ``allin`` (both)."""
    prompt_files: list[str]
    """Prompt files in veRL's layout (docs/data.md). Each file is analysed like a benchmark of the same name. Every
    prompt must be a single user turn."""
    layer: int
    """Layer whose metrics have no prefix, as in the release, and whose hidden states are compared between responses.
    Metrics of other layers have prefixes such as ``layer_1/``, numbered in the order of ``calculator.layers``."""
    confidence_k: PositiveInt
    """Number of most frequent tokens over which ``response_confidence`` averages, at least 1."""
    repetition_n: PositiveInt
    """Length of the n-grams in ``n_gram_repetition_rate``, at least 1."""
    kl_floor: Annotated[float, within("(0, 1)")]
    """Minimum token frequency in ``pairwise_kl_div``, in (0, 1). Disjoint token sets yield about -log(kl_floor)."""
    reflection_words: list[str]
    """Words and phrases that ``reflection_words`` counts, ignoring case and matching whole words only."""
    response_pairs: list[Pair]
    """Pairs of response metrics to correlate and plot: x (exploration) and y (exploitation)."""
    prompt_pairs: list[Pair]
    """Like ``response_pairs``, for prompt metrics."""
    outcome: Literal["correctness", "test_score_0"]
    """Metric to correlate with all other metrics: ``correctness`` or ``test_score_0``."""
    draws: PositiveInt
    """Number of bootstrap resamples of the prompts for each interval, at least 1."""

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
    """All options of one run of ``verl.trainer.main_analysis``, including the options of an evaluation."""

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
        """Return the config of the evaluation that generates responses for ``benchmarks`` without measuring them."""
        values = {field.name: getattr(self, field.name) for field in fields(EvaluationConfig)}
        values |= {"benchmarks": benchmarks, "calculator": replace(self.calculator, enable=False)}
        return EvaluationConfig(**values)

    @property
    def layer_place(self) -> int:
        """Index of ``analysis.layer`` in ``calculator.layers``."""
        return self.calculator.layers.index(self.analysis.layer)


def parse_analysis_config(tree: DictConfig) -> AnalysisConfig:
    """Complete the runs with ``complete_runs``, then parse the config with ``parse_config``."""
    return parse_config(AnalysisConfig, complete_runs(tree))
