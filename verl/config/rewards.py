"""Defines the groups ``reward_score`` (verifiers), ``reward_model`` and ``reward_manager`` (rank shaping)."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from verl.config.checks import (
    NAMES_ONE,
    Group,
    NotNegativeFloat,
    NotNegativeInt,
    PositiveInt,
    Seconds,
    Share,
    require,
    rule,
    split_source,
    within,
)
from verl.config.common import ModelConfig
from verl.config.judge import JUDGE, JudgeConfig

ScoreMode = Literal["independent", "mix", "partial"]


@dataclass(frozen=True)
class OverlongBufferConfig(Group):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), which penalises nearly overlong responses."""

    enable: bool
    """Lower the score of responses that end within the last ``len`` tokens of ``data.max_response_length``."""
    len: PositiveInt
    """Length of the penalised range in tokens, at least 1 and below ``data.max_response_length``."""
    penalty_factor: NotNegativeFloat
    """Penalty for a response of maximum length, at least 0; the penalty grows linearly from 0 within the range."""


@dataclass(frozen=True)
class AsyncFunctionsConfig(Group):
    """Options for asynchronous custom reward functions (``async def``), which can query a service, for example."""

    max_in_flight: PositiveInt
    """Maximum number of concurrent calls."""
    timeout_s: Seconds
    """Time limit per call in seconds."""
    max_retries: NotNegativeInt
    """Maximum number of retries if a call fails or times out. The delay doubles after each retry. If all retries fail,
    ``on_function_error`` applies."""
    cache: bool
    """Cache results in the run's folder, so that resumed runs and identical responses do not repeat calls."""


VERIFIER = "verl.rewards.registry:verifier"
"""Import path that represents the built-in verifier of a record's data source in a sum of reward functions."""

SUMMAND = re.compile(r"(?:(-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)\s*\*\s*)?([^*+]+:\w+)")
"""Pattern of one term in a sum of functions: an optional weight and an import path."""


def summands(path: str) -> list[tuple[float, str]]:
    """Return the weights and import paths of the functions in a sum, such as ``a.py:f+0.2*b.py:g``.

    The path of a single function is returned unchanged, even if its file name contains ``+`` or ``*``.
    """
    found = [SUMMAND.fullmatch(part.strip()) for part in path.split("+")]
    if None in found:
        return [(1.0, path)]
    return [(float(match[1] or 1), match[2]) for match in found if match is not None]


def is_sum(path: str) -> bool:
    """Return whether a path is a sum of several functions or a single function with a weight."""
    return summands(path) != [(1.0, path)]


def _is_function(path: str) -> bool:
    module, _, function = path.rpartition(":")
    importable = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    return importable and ":" not in module and function.isidentifier()


@dataclass(frozen=True)
class RewardScoreConfig(Group):
    """Options for the verifiers, which score responses."""

    mode: ScoreMode
    """Scoring scheme. ``independent``: 1 if correct and boxed, 0.5 if correct and unboxed, -0.5 if wrong and boxed, -1
    if wrong and unboxed; ``mix``: 1 or 0; ``partial``: the fraction of passed tests for programs, 1 or 0 for other
    responses. If a prompt asks for the answer after ``####`` instead of in a box, such an answer counts as boxed."""
    num_workers: Annotated[int, within("[0, 4096]")]
    """Number of verifier processes, at most 4096. 0 uses one per core that workers do not use, from 1 to 32."""
    timeout_s: Seconds
    """Time limit per response in seconds; on timeout, the verifier is killed and the response counts as wrong."""
    memory_limit_mb: PositiveInt
    """Memory limit of one verifier process in MiB."""
    overlong_buffer: OverlongBufferConfig
    custom_functions: list[str]
    """Custom reward functions, each as ``data_source=module:function`` or ``data_source=path/to/file.py:function``; an
    ``=`` in the name of a data source is written ``==``. On the command line, quote each entry:
    ``["my_set=my_rewards:score"]``. Custom functions take precedence over the verifiers; ``*`` matches all data
    sources without a custom function. Functions can be summed with optional weights, as in
    ``["*=a.py:accuracy+0.2*b.py:short"]``; a function that returns None contributes nothing. A function receives
    ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info``, and returns a number, a bool, or a dict
    with ``score`` and optionally ``acc``. A response is correct if ``acc`` (or the score if there is no ``acc``) is
    above 0. Other numbers in the dict are logged, and all entries are stored with the sample (docs/rewards.md)."""
    on_function_error: Literal["fail", "zero"]
    """Handling of exceptions and invalid results in ``custom_functions``: ``fail`` ends the run; ``zero`` scores the
    response 0 with the reason ``error``, which the metric ``verifier/error`` counts."""
    async_functions: AsyncFunctionsConfig
    custom_kwargs: dict[str, Any]
    """Additional keyword arguments that are passed to all ``custom_functions``."""
    judge: JudgeConfig

    def check(self) -> None:
        arguments = ("data_source", "solution_str", "ground_truth", "extra_info")
        for name, value in self.custom_kwargs.items():
            free = name.isidentifier() and name not in arguments
            require(free, f"custom_kwargs.{name}", value, "must be a name of your own")
        used = bool(self.custom_functions) or not self.custom_kwargs
        self.require(used, "custom_kwargs", "are used only with reward_score.custom_functions; set that")
        functions = [part for path in self._own_functions().values() for _, part in summands(path)]
        if self.judge.enable:
            fix = "reward_score.judge asks the same function; leave out one of them"
            self.require(JUDGE not in functions, "custom_functions", fix)
            fix = "a judge is added to functions of files without + and * in their names; rename the file"
            self.require(not {*"+*"} & {*"".join(functions)}, "custom_functions", fix)

    @property
    def function_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for all functions, with those for verifier and judge nested under their import paths."""
        own = {VERIFIER: {}, **({JUDGE: self.judge.arguments()} if self.judge.enable else {})}
        return {**self.custom_kwargs, **own}

    def _own_functions(self) -> dict[str, str]:
        """Return a mapping from data source to path in ``custom_functions``."""
        field, paths = "custom_functions", dict[str, str]()
        for entry in self.custom_functions:
            source, path = split_source(entry)
            well_formed = bool(source.strip()) and all(_is_function(part) for _, part in summands(path))
            require(well_formed, field, entry, "must have the form data_source=module:function, or file.py:function")
            fix = f"{source} already has {paths.get(source)}; add them in one entry, as FUNCTION+0.5*FUNCTION"
            require(source not in paths, field, entry, fix)
            paths[source] = path
        return paths

    def paths_of_custom_functions(self) -> dict[str, str]:
        """Return a mapping from data source to function path, which may be a sum that includes the judge.

        Raises ``ConfigError`` if an entry is malformed.
        """
        paths, judge = self._own_functions(), self.judge
        judged = dict[str, str]()
        for source in (judge.data_sources or [*paths, "*"]) if judge.enable else ():
            path = paths.get(source) or paths.get("*") or VERIFIER
            parts = [(judge.rule_weight * weight, part) for weight, part in summands(path) if judge.rule_weight]
            judged[source] = "+".join(f"{weight!r}*{part}" for weight, part in [*parts, (judge.weight, JUDGE)])
        return paths | judged


@dataclass(frozen=True)
class RewardModelConfig(Group):
    """A learned reward model, which is used in addition to the verifiers."""

    enable: bool
    """Load the reward model and add its score to the verifier's score."""
    model: ModelConfig
    """Sequence classification model with one output (``num_labels=1``), a head named ``score`` (as in Llama, Mistral
    and Qwen), and its own tokenizer and chat template. ``none`` means no model."""
    micro_batch_size_per_gpu: PositiveInt
    """Number of responses per forward pass on one worker; affects memory and speed, never the scores."""
    max_length: PositiveInt
    """Maximum length of prompt and response in the model's own tokens; longer inputs are truncated from the left."""
    rule_weight: float
    """Weight of the verifier's score in the reward; does not affect logged verdicts or ``algorithm.filter_groups``."""
    weight: float
    """Weight of the reward model's score in the reward."""

    def check(self) -> None:
        weighs = self.rule_weight != 0 or self.weight != 0
        self.require(weighs or not self.enable, "weight", "both weights are 0; set one")


@dataclass(frozen=True)
class RewardManagerConfig(Group):
    """Options for rank shaping: how rank metrics form the auxiliary signal Phi, and where Phi is applied."""

    add_reward: bool
    """Add Phi to the reward of the response's last token."""
    add_adv: bool
    """Add min(relu(Phi), |A| / kappa) to the advantage."""
    shaping_placement: Literal["all_tokens", "last_token"]
    """Tokens that ``add_adv`` changes: ``all_tokens`` of the response or only its ``last_token``."""
    phi_without_reward: bool
    """Compute Phi even if ``add_reward`` is off. If false, as in the paper's first release, ``add_adv`` has no effect
    without ``add_reward``, because Phi stays 0 and the baselines are not updated."""
    baseline_start: Literal["first_batch", "zero"]
    """Initialisation of the baselines. ``first_batch`` starts with the first batch, and later batches update the
    baselines. With ``zero``, as in the paper's release, the baselines and the score average start at 0. Each step first
    computes its signal and then moves the baselines towards the batch of the previous step."""
    indicator_names: Annotated[list[str], NAMES_ONE]
    """Metrics that form Phi; the first one (the acceleration) is the guide if ``guidance_metric`` is null."""
    guidance_metric: str | None
    """Guide metric, whose deviation determines beta. The guide need not be in ``indicator_names``. Null selects the
    first indicator. The paper's later release always uses "Effective Rank diff 2"."""
    w_explore: list[float]
    """Indicator weights for exploration (beta = 1), in the order of ``indicator_names``."""
    w_exploit: list[float]
    """Indicator weights for exploitation (beta = 0), in the order of ``indicator_names``."""
    hypothesis_type: Literal["PlanB", "FixTwo", "FixOne"]
    """``PlanB``: beta = sigmoid(gain * d_guide); ``FixTwo``: beta = 0.5; ``FixOne``: w = w_explore + w_exploit."""
    gain: float
    """Slope of the sigmoid in ``PlanB``."""
    kappa: Annotated[float, rule(lambda kappa: kappa >= 1, "must be at least 1")]
    """Divisor, at least 1, that limits the bonus to |A| / kappa, so that no advantage changes sign."""
    ema_alpha: Share
    """Weight of the newest batch mean in the baselines mu and in the score average, in (0, 1]."""
    aux_reward_global_weight: float
    """Coefficient c of Phi."""
    aux_fix: bool
    """Keep c constant. False multiplies c by 1 - (ema_score + 1) / 2, so that Phi decreases as the score rises."""

    def check(self) -> None:
        names = self.indicator_names
        fix = f"needs one weight per indicator, {len(names)}: {names}"
        for field in ("w_explore", "w_exploit"):
            self.require(len(getattr(self, field)) == len(names), field, fix)

    @property
    def guide(self) -> str:
        """Metric that determines beta."""
        return self.guidance_metric or self.indicator_names[0]

    @property
    def followed_names(self) -> list[str]:
        """Metrics that need a baseline: the indicators and the guide, without duplicates."""
        return list(dict.fromkeys([*self.indicator_names, self.guide]))

    @property
    def active(self) -> bool:
        """Whether Phi is added to rewards or advantages."""
        return self.add_reward or self.add_adv

    @property
    def computes_phi(self) -> bool:
        """Whether Phi is computed; otherwise it is 0 and the baselines are not updated."""
        return self.add_reward or self.phi_without_reward
