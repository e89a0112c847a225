"""Groups that make rewards: ``reward_score`` (verifiers), ``reward_model`` and ``reward_manager`` (rank shaping)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from verl.config.checks import (
    NAMES_ONE,
    Group,
    NotNegativeFloat,
    PositiveInt,
    Seconds,
    Share,
    require,
    rule,
    within,
)
from verl.config.common import ModelConfig

ScoreMode = Literal["independent", "mix", "partial"]


@dataclass(frozen=True)
class OverlongBufferConfig(Group):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): the score falls before a response is cut off."""

    enable: bool
    """Lower the score of responses that reach into the last ``len`` tokens of ``data.max_response_length``."""
    len: PositiveInt
    """Length of that range in tokens, at least 1 and below ``data.max_response_length``."""
    penalty_factor: NotNegativeFloat
    """Penalty of a response of full length, at least 0; within the range it grows linearly from 0."""


@dataclass(frozen=True)
class RewardScoreConfig(Group):
    """How verifiers turn a response into a score."""

    mode: ScoreMode
    """``independent``: 1 correct and boxed, 0.5 correct unboxed, -0.5 wrong boxed, -1 wrong unboxed; ``mix``: 1 or 0;
    ``partial``: a program scores the share of its tests that it passes, other responses 1 or 0. Where a prompt asks for
    the answer after ``####`` and not for a box, that counts as boxed."""
    num_workers: Annotated[int, within("[0, 4096]")]
    """Verifier processes, at most 4096. 0: one for each core that the workers leave, at least 1 and at most 32."""
    timeout_s: Seconds
    """Seconds per response; a verifier that takes longer is killed, and the response counts as wrong."""
    memory_limit_mb: PositiveInt
    """Memory in MiB that one verifier process may allocate."""
    overlong_buffer: OverlongBufferConfig
    custom_functions: list[str]
    """Your own reward functions, each as ``data_source=module:function`` or ``data_source=path/to/file.py:function``;
    on the command line each entry needs its own quotes: ``["my_set=my_rewards:score"]``. They take precedence over the
    verifiers; ``*`` stands for every data source without a function of its own. A function is called with
    ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info``, and returns a number, a bool, or a dict with
    ``score`` and optionally ``acc``. A response is correct if that is above 0, or without it if the score is. Numbers
    among the dict's other entries are logged, and all are kept with the sample (docs/rewards.md)."""
    on_function_error: Literal["fail", "zero"]
    """Effect of an exception in one of ``custom_functions``, or of a result that is no score: ``fail`` ends the run;
    ``zero`` gives the response the score 0 with the reason ``error``, which ``verifier/error`` counts."""
    custom_kwargs: dict[str, Any]
    """Further keyword arguments of ``custom_functions``, the same for each response and each function."""

    def check(self) -> None:
        arguments = ("data_source", "solution_str", "ground_truth", "extra_info")
        for name, value in self.custom_kwargs.items():
            free = name.isidentifier() and name not in arguments
            require(free, f"custom_kwargs.{name}", value, "must be a name of your own")
        used = bool(self.custom_functions) or not self.custom_kwargs
        self.require(used, "custom_kwargs", "are used only with reward_score.custom_functions; set that")
        self.paths_of_custom_functions()

    def paths_of_custom_functions(self) -> dict[str, str]:
        """``custom_functions`` as data source -> path of the function. Raises ``ConfigError`` for a malformed entry."""
        field, paths = "custom_functions", dict[str, str]()
        for entry in self.custom_functions:
            source, _, path = entry.partition("=")
            module, _, function = path.rpartition(":")
            importable = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
            well_formed = bool(source.strip()) and importable and function.isidentifier()
            fix = "must have the form data_source=module:function, or file.py:function"
            require(well_formed, field, entry, fix)
            require(source not in paths, field, entry, f"{source} already has {paths.get(source)}; name one function")
            paths[source] = path
        return paths


@dataclass(frozen=True)
class RewardModelConfig(Group):
    """A learned reward model, used together with the verifiers."""

    enable: bool
    """Load it, and add its score to the verifier's."""
    model: ModelConfig
    """A sequence classification model with one output (``num_labels=1``) whose head is called ``score``, as in Llama,
    Mistral and Qwen, with its own tokenizer and chat template. ``none``: no model."""
    micro_batch_size_per_gpu: PositiveInt
    """Responses per forward pass on one worker; changes memory and speed, never the scores."""
    max_length: PositiveInt
    """Most tokens of prompt and response, by its own tokenizer; longer texts lose their first tokens."""
    rule_weight: float
    """Weight of the verifier's score in the reward; verdicts count in the log and for ``algorithm.filter_groups``."""
    weight: float
    """Weight of the reward model's score in the reward."""

    def check(self) -> None:
        weighs = self.rule_weight != 0 or self.weight != 0
        self.require(weighs or not self.enable, "weight", "both weights are 0; set one")


@dataclass(frozen=True)
class RewardManagerConfig(Group):
    """Rank shaping: how rank metrics become the auxiliary signal Phi and where Phi goes."""

    add_reward: bool
    """Add Phi to the reward of the response's last token."""
    add_adv: bool
    """Add min(relu(Phi), |A| / kappa) to the advantage."""
    shaping_placement: Literal["all_tokens", "last_token"]
    """Place of ``add_adv``: ``all_tokens`` of the response or its ``last_token``."""
    phi_without_reward: bool
    """Compute Phi even if ``add_reward`` is off. False is the paper's first release: without ``add_reward`` Phi is 0
    and the baselines do not move, so ``add_adv`` alone changes nothing."""
    baseline_start: Literal["first_batch", "zero"]
    """``first_batch``: the first batch sets the baselines, each later one moves them. ``zero``, as in the paper's
    release: baselines and score average start at 0, and each step moves the baselines, after its signal, towards the
    batch of the previous step."""
    indicator_names: Annotated[list[str], NAMES_ONE]
    """Metrics that enter Phi; the first one (the acceleration) is the guide, unless ``guidance_metric`` names it."""
    guidance_metric: str | None
    """The guide, the metric whose deviation sets beta; it need not be among ``indicator_names``. null: the first of
    these. The paper's later release always takes "Effective Rank diff 2"."""
    w_explore: list[float]
    """Weight of each indicator when exploring (beta = 1), aligned with ``indicator_names``."""
    w_exploit: list[float]
    """Weight of each indicator when exploiting (beta = 0), aligned with ``indicator_names``."""
    hypothesis_type: Literal["PlanB", "FixTwo", "FixOne"]
    """``PlanB``: beta = sigmoid(gain * d_guide); ``FixTwo``: beta = 0.5; ``FixOne``: w = w_explore + w_exploit."""
    gain: float
    """Slope of the sigmoid in ``PlanB``."""
    kappa: Annotated[float, rule(lambda kappa: kappa >= 1, "must be at least 1")]
    """The bonus is at most |A| / kappa, so that no advantage changes its sign; at least 1."""
    ema_alpha: Share
    """Weight of the newest batch mean in the baselines mu and in the score average, in (0, 1]."""
    aux_reward_global_weight: float
    """The constant c in Phi."""
    aux_fix: bool
    """Keep c constant; false multiplies c by 1 - (ema_score + 1) / 2, so that Phi fades as the score rises."""

    def check(self) -> None:
        names = self.indicator_names
        fix = f"needs one weight per indicator, {len(names)}: {names}"
        for field in ("w_explore", "w_exploit"):
            self.require(len(getattr(self, field)) == len(names), field, fix)

    @property
    def guide(self) -> str:
        """The metric that sets beta."""
        return self.guidance_metric or self.indicator_names[0]

    @property
    def followed_names(self) -> list[str]:
        """The metrics that need a baseline: the indicators, and the guide if it is none of them."""
        return list(dict.fromkeys([*self.indicator_names, self.guide]))

    @property
    def active(self) -> bool:
        """Whether Phi reaches the learning signal at all."""
        return self.add_reward or self.add_adv

    @property
    def computes_phi(self) -> bool:
        """Whether Phi is computed; otherwise it is 0 and the baselines do not move."""
        return self.add_reward or self.phi_without_reward
