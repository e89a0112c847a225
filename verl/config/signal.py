"""Configuration of the learning signal: rank metrics, scores, advantages, rank shaping.

The dataclasses are the schema, ``configs/`` holds the values. There are no defaults here, so that every value has one
home.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl.config.checks import (
    require,
    require_distinct,
    require_known,
    require_literals,
    require_not_negative,
    require_own,
    require_own_options,
    require_positive,
    require_seconds,
)
from verl.config.common import ModelConfig
from verl.config.rollout_correction import RolloutCorrectionConfig

BASE_METRICS = ["Response Entropy 1", "Effective Rank", "Traditional Rank", "Curvature", "Log Effective Rank"]
"""The metrics of one response and layer, in the order that ``calculator.metric_indices`` indexes."""

TokenMetric = Literal["avg_log_probs", "avg_response_entropy", "avg_logits_entropy"]
"""Metrics of a response's tokens, which need no hidden states, by the names of the paper's later release."""

KLType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
SVDMethod = Literal["full", "lowrank"]
ScoreMode = Literal["independent", "mix"]

AdvEstimator = Literal[
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
    "gpg",
    "opo",
    "grpo_passk",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]
TOKEN_BASELINES: list[AdvEstimator] = ["optimal_token_baseline", "tir_optimal_token_baseline"]
GROUP_ESTIMATORS: list[AdvEstimator] = ["grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", *TOKEN_BASELINES]
"""Estimators that compare the responses to one prompt; of a single one they keep the reward as it is. An estimator of
the user's own decides for itself how many it needs."""


@dataclass(frozen=True)
class KLControlConfig:
    """The weight of the KL divergence in the reward."""

    type: Literal["fixed", "adaptive"]
    """``fixed``, or ``adaptive``: the weight grows while the divergence is above its target, and shrinks below it."""
    kl_coef: float
    """The weight; with ``adaptive`` the weight at the start."""
    target_kl: float
    """Target of ``adaptive``: the divergence per response token, in nats."""
    horizon: float
    """Responses after which ``adaptive`` has changed the weight by a fifth, if the divergence is off by 20% or more;
    larger is slower."""

    def __post_init__(self) -> None:
        require_not_negative("algorithm.kl_ctrl.kl_coef", self.kl_coef)
        require_positive("algorithm.kl_ctrl.target_kl", self.target_kl)
        require_positive("algorithm.kl_ctrl.horizon", self.horizon)
        if self.type == "adaptive":
            require(
                self.kl_coef > 0,
                "algorithm.kl_ctrl.kl_coef",
                self.kl_coef,
                "adaptive control multiplies it, so it must be above 0",
            )


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a learning signal are replaced."""

    enable: bool
    """Drop the prompts whose responses all have the same ``metric``, and sample other prompts in their place."""
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"]
    """``acc``: whether the response is correct; ``score``: the verifier's score; ``seq_reward``: the whole reward, with
    that of the reward model and the overlong penalty; ``seq_final_reward``: the same less the KL penalty, which is
    known only after filtering, so it needs ``use_kl_in_reward=false`` and is then ``seq_reward``. Neither
    ``reward_transform`` nor rank shaping counts: they see the step's responses once these are chosen."""
    max_num_gen_batches: int
    """Most batches of ``data.gen_batch_size`` prompts to sample for one step; the step then learns from the groups
    found so far, where veRL would end the run. 0 or less: no limit, but a run ends that finds nothing to learn from in
    100 batches. Batches after the first do not count towards an epoch."""


@dataclass(frozen=True)
class PFPPOConfig:
    """Which responses ``algorithm.use_pf_ppo`` draws."""

    reweight_method: Literal["pow", "max_min", "max_random"]
    """Weight of a response of reward r: ``pow``, abs(r) to the power of ``weight_pow``; ``max_min``, 1 for the largest
    and the smallest reward of the batch and hardly anything for others; ``max_random``, 0.4 for the largest, 0.1 for
    others."""
    weight_pow: float
    """Exponent of ``pow``, at least 0."""

    def __post_init__(self) -> None:
        require_not_negative("algorithm.pf_ppo.weight_pow", self.weight_pow)


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    adv_estimator: str
    """Advantage estimator: ``grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``remax``
    (the baseline is the greedy response, one more response per prompt), ``gae`` (PPO, with the critic of the group
    ``critic``), ``gpg`` (centred, and scaled by the share of scores that are not 0; arXiv 2504.02546), ``opo`` (centred
    at the mean weighted by length; arXiv 2505.23585), ``grpo_passk`` (the best response's lead over the second best;
    arXiv 2503.19595), ``optimal_token_baseline`` (a baseline of its own for each token, that of least variance) or
    ``tir_optimal_token_baseline`` (the same, and none where only one response goes on). Or your own, as
    ``module:attribute`` or ``file.py:attribute`` (docs/extending.md), which has no critic and may need any number of
    responses to a prompt."""
    adv_estimator_kwargs: dict[str, Any]
    """Keyword arguments of your own ``adv_estimator``."""
    reward_transform: str | None
    """A function or class of your own, ``module:attribute`` or ``file.py:attribute``, that turns each response's reward
    into another, once a step: after verifiers, reward model and overlong penalty, before rank shaping, the KL
    divergence and advantages (docs/extending.md). Dynamic sampling compares rewards as they were before it, and
    validation does not use it. Null: rewards stay as they are."""
    reward_transform_kwargs: dict[str, Any]
    """Keyword arguments of ``reward_transform``."""
    norm_adv_by_std_in_grpo: bool
    """Divide the group-centred score by the group's standard deviation (``grpo``, ``grpo_passk``); false is Dr.GRPO."""
    gamma: float
    """Discount per token of ``reinforce_plus_plus`` and ``gae``, in [0, 1]."""
    lam: float
    """Lambda of ``gae``, in [0, 1]: 0 trusts the critic alone, 1 the rewards alone."""
    use_kl_in_reward: bool
    """Subtract the KL divergence from the reference policy from every token's reward."""
    kl_penalty: str
    """Estimator of that divergence, as ``actor.kl_loss_type``; rewards have no gradient, so a ``+`` changes nothing."""
    kl_penalty_kwargs: dict[str, Any]
    """Keyword arguments of your own ``kl_penalty``."""
    kl_ctrl: KLControlConfig
    filter_groups: FilterGroupsConfig
    rollout_correction: RolloutCorrectionConfig
    use_pf_ppo: bool
    """Update on as many responses as were sampled, drawn again from them with replacement by their rewards (PF-PPO,
    arXiv 2409.06957); with ``gae``."""
    pf_ppo: PFPPOConfig
    recompose: str | None
    """A class of your own, ``module:Class`` or ``file.py:Class``, that makes the batch to learn from, of the step's
    responses and of earlier ones (docs/extending.md); null: what was sampled. Earlier ones have the ratio to the policy
    that sampled them: their old log-probabilities are the engine's, or, with ``actor.tis_level``, the policy's."""
    recompose_kwargs: dict[str, Any]
    """Keyword arguments of that class."""
    recompose_buffer: int
    """Most responses that its buffer holds, at least 1, in 20 bytes a token; checkpoints hold them too."""

    def __post_init__(self) -> None:
        require_known("algorithm.adv_estimator", self.adv_estimator, get_args(AdvEstimator))
        require_known("algorithm.kl_penalty", self.kl_penalty, get_args(KLType))
        require_own_options("algorithm.adv_estimator", self.adv_estimator, self.adv_estimator_kwargs)
        require_own_options("algorithm.kl_penalty", self.kl_penalty, self.kl_penalty_kwargs)
        own, remax = self.reward_transform, self.adv_estimator == "remax"
        require_own("algorithm.reward_transform", own, self.reward_transform_kwargs)
        fix = "remax compares with a greedy response's reward, which no transform sees; set it to null"
        require(not remax or own is None, "algorithm.reward_transform", own, fix)
        require_own("algorithm.recompose", self.recompose, self.recompose_kwargs)
        require_positive("algorithm.recompose_buffer", self.recompose_buffer)
        fix = "remax compares with a greedy response of this step; choose another algorithm.adv_estimator"
        require(not remax or self.recompose is None, "algorithm.recompose", self.recompose, fix)
        require(0 <= self.gamma <= 1, "algorithm.gamma", self.gamma, "must be in [0, 1]")
        require(0 <= self.lam <= 1, "algorithm.lam", self.lam, "must be in [0, 1]")
        drawn = not self.use_pf_ppo or self.adv_estimator == "gae"
        require(drawn, "algorithm.use_pf_ppo", True, "belongs to algorithm.adv_estimator=gae; set it to false")


def name_of(metric: str) -> str:
    """The name by which a metric is known: that of the user's function for an import path."""
    return metric.rpartition(":")[2].rpartition(".")[2] if ":" in metric else metric


@dataclass(frozen=True)
class CalculatorConfig:
    """Which rank metrics are computed from the rollout's hidden states."""

    enable: bool
    """Capture hidden states and compute rank metrics; needed by ``reward_manager.add_reward`` and ``add_adv``."""
    source: Literal["rollout", "actor"]
    """Where hidden states come from: ``rollout``, the engine while it samples; or ``actor``, the forward pass that
    computes the policy's log-probabilities, for engines that cannot return hidden states. Validation then needs this
    extra pass. Evaluation supports ``rollout`` only."""
    layers: list[int]
    """Layers whose hidden states are measured, counted from either end: -1 is the state after the final norm, any other
    the output of that decoder layer. Logged as ``layer_1``, ``layer_2``, ... in this order; Phi is their mean."""
    metric_indices: list[int]
    """The metrics to compute: 0 Response Entropy 1, 1 Effective Rank, 2 Traditional Rank, 3 Curvature, 4 Log Effective
    Rank."""
    own_metrics: list[str]
    """Metrics of your own besides, functions of a spectrum, each as ``module:function`` or ``file.py:function``
    (docs/extending.md). A metric is known by the function's name, its velocity and acceleration by that name with
    " diff" and " diff 2". Their spectra are decomposed prefix by prefix, which takes longer than those of
    ``metric_indices`` without 2; the analysis has them for responses, not for the stack of a prompt's responses."""
    metric_indices_add: list[str]
    """Metrics of a response's tokens, measured beside those of hidden states for ``reward_manager`` and the log, the
    same in every layer and without velocity: ``avg_log_probs``, the mean log-probability of its tokens under the
    policy; ``avg_response_entropy``, the entropy of the token frequencies within the response; ``avg_logits_entropy``,
    the mean entropy of the distributions its tokens were sampled from; all in nats. Or your own, as ``module:function``
    or ``file.py:function``, known by the function's name (docs/extending.md). Validation computes log-probabilities for
    all but the second. Must be empty in an evaluation."""
    compute_diff: bool
    """Also compute each metric's velocity ("<name> diff") and acceleration ("<name> diff 2")."""
    diff_stride: int
    """Tokens between two consecutive prefixes of the velocity and acceleration, at least 1."""
    prefix_rule: Literal["after_stride", "after_stride_and_whole", "at_stride_and_whole"]
    """Prefixes of the velocity and acceleration, s being ``diff_stride``. ``after_stride``: s + 1, 2s + 1, ... rows.
    ``after_stride_and_whole``: the same, and the whole response once more as the last one, even if a prefix was it
    already, but no prefix of a response that is shorter than 2s (the paper's later release, its method ``optimized``).
    ``at_stride_and_whole``: s, 2s, ... rows, and the whole response as the last one where these leave out more than one
    row (its method ``batched``). Also the rule of ``compute_cumulative_global_metrics``."""
    max_seq_len: int | None
    """Velocity and acceleration use only this many tokens of a response (512 in the paper's first release); null: all.
    A cut response has no last prefix by ``after_stride_and_whole``; by ``at_stride_and_whole`` its last prefix is all
    of it, unless the others reach the cut."""
    max_seq_len_from: Literal["end", "start"]
    """Which tokens ``max_seq_len`` keeps: the last (``end``) or the first (``start``)."""
    metrics_dtype: Literal["float64", "bfloat16"]
    """``float64``; or ``bfloat16``: the effective, log effective and traditional rank of a whole response are rounded
    to 8 significant bits, as the paper's release stored them (301 becomes 300). Other metrics are never rounded."""
    zeroth_order_svd_method: SVDMethod
    """Spectrum of the whole response: ``full``; or ``lowrank``, only its ``svd_rank`` largest singular values."""
    diff_svd_method: SVDMethod
    """The same for the prefixes of velocity and acceleration. ``full`` is both exact and faster."""
    svd_rank: int
    """Singular values that ``lowrank`` keeps, at least 1."""
    diff_calculator_method: Literal["optimized", "original"]
    """``optimized``: all prefixes at once, or eigenvalues of each prefix where that is cheaper; ``original``: a float64
    singular value decomposition of every prefix, slow, for comparison."""
    workspace_mb: int
    """Bound on the memory for the spectra of one response, MiB, at least 1. vLLM leaves it free when it sizes the KV
    cache. Less takes more time: long responses are factored in blocks of fewer rows. Matrices of D x D alone may
    exceed it (docs/spectral.md, "Memory")."""
    on_nonfinite: Literal["raise", "mask", "zero"]
    """What to do with a response whose hidden states hold NaN or infinity. ``raise``: end the run with an error that
    names the response and the layer. ``mask``: its metrics are NaN; it gets no signal, counts in no mean, and is
    counted in the log. ``zero``: its metrics are 0 and count like any other, as in the paper's release."""
    compute_global_metrics: bool
    """Log the metrics of the matrix of mean states, one per response of the batch ("global/<name>")."""
    compute_cumulative_global_metrics: bool
    """Log that matrix's velocity and acceleration over the responses ("cumulative/<name> diff")."""
    global_diff_stride_train: int
    """Responses between two prefixes of ``compute_cumulative_global_metrics`` in training, at least 1."""
    global_diff_stride_val: int
    """The same in validation."""
    keep_prefixes: bool
    """Also hand out the metrics of the prefixes, for ``trainer.samples.tokens``; unused in an evaluation."""

    def measured_by(self, source: str) -> bool:
        """Whether rank metrics are measured, and by ``source``: ``rollout`` or ``actor``."""
        return self.enable and self.source == source

    def __post_init__(self) -> None:
        require_literals("calculator", self)
        require_distinct("calculator.layers", self.layers)
        require_distinct("calculator.metric_indices", self.metric_indices)
        for index in self.metric_indices:
            require(
                0 <= index < len(BASE_METRICS),
                "calculator.metric_indices",
                self.metric_indices,
                f"indices run from 0 to {len(BASE_METRICS) - 1}: {BASE_METRICS}",
            )
        for path in self.own_metrics:
            require(":" in path, "calculator.own_metrics", path, "must be module:function or file.py:function")
            require_known("calculator.own_metrics", path, [])
        for i, path in enumerate(self.metric_indices_add):
            require_known(f"calculator.metric_indices_add[{i}]", path, get_args(TokenMetric))
        ranks = [*BASE_METRICS, *self.own_names]
        every = [*ranks, *map(name_of, self.metric_indices_add)]
        for field, names in (("own_metrics", ranks), ("metric_indices_add", every)):
            fix = "name each once; your own are known by the names of their functions, which no other metric may have"
            require(len(set(names)) == len(names), f"calculator.{field}", getattr(self, field), fix)
        if self.max_seq_len is not None:
            require_positive("calculator.max_seq_len", self.max_seq_len)
        for field in ("diff_stride", "svd_rank", "workspace_mb", "global_diff_stride_train", "global_diff_stride_val"):
            require_positive(f"calculator.{field}", getattr(self, field))

    @property
    def own_names(self) -> list[str]:
        """Names of ``own_metrics``."""
        return [name_of(path) for path in self.own_metrics]

    @property
    def base_names(self) -> list[str]:
        """Names of the metrics of one response, in the order of ``metric_indices`` and ``own_metrics``."""
        return [*(BASE_METRICS[i] for i in self.metric_indices), *self.own_names]

    @property
    def metric_names(self) -> list[str]:
        """Every metric name the calculator returns, velocity and acceleration included."""
        suffixes = ["", " diff", " diff 2"] if self.compute_diff else [""]
        return [name + suffix for name in self.base_names for suffix in suffixes]

    @property
    def token_metrics(self) -> list[str]:
        """The metrics of tokens that are measured, as ``metric_indices_add`` has them."""
        return self.metric_indices_add if self.enable else []

    @property
    def needs_policy(self) -> bool:
        """Whether a metric of tokens is read from the policy's own forward pass."""
        return any(name != "avg_response_entropy" for name in self.token_metrics)


@dataclass(frozen=True)
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): the score falls before a response is cut off."""

    enable: bool
    """Lower the score of responses that reach into the last ``len`` tokens of ``data.max_response_length``."""
    len: int
    """Length of that range in tokens, at least 1 and below ``data.max_response_length``."""
    penalty_factor: float
    """Penalty of a response of full length, at least 0; within the range it grows linearly from 0."""

    def __post_init__(self) -> None:
        require_positive("reward_score.overlong_buffer.len", self.len)
        require_not_negative("reward_score.overlong_buffer.penalty_factor", self.penalty_factor)


@dataclass(frozen=True)
class RewardScoreConfig:
    """How verifiers turn a response into a score."""

    mode: ScoreMode
    """``independent``: 1 correct and boxed, 0.5 correct unboxed, -0.5 wrong boxed, -1 wrong unboxed; ``mix``: 1 or
    0."""
    num_workers: int
    """Verifier processes, at most 4096. 0: as many as this machine's cores leave beside the workers, at least 1 and at
    most 32; a worker on a GPU counts as one core, one on a CPU as its threads."""
    timeout_s: float
    """Seconds per response; a verifier that takes longer is killed, and the response counts as wrong."""
    memory_limit_mb: int
    """Memory in MiB that one verifier process may allocate."""
    overlong_buffer: OverlongBufferConfig
    custom_functions: list[str]
    """Your own reward functions, each as ``data_source=module:function`` or ``data_source=path/to/file.py:function``;
    on the command line each entry needs its own quotes: ``["my_set=my_rewards:score"]``. They take precedence over the
    verifiers; ``*`` stands for every data source without a function of its own. A function is called with
    ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info``, and returns a number, a bool, or a dict with
    ``score`` and optionally ``correctness`` or ``acc``. A response is correct if that is above 0, or without it if the
    score is. The score is used as it is, whatever ``mode`` says. Numbers among the dict's other entries are logged, and
    all are kept with the sample (docs/rewards.md). A response on which the function exceeds the limits scores 0."""
    on_function_error: Literal["fail", "zero"]
    """What an exception in one of ``custom_functions``, or a result that is no score, does: ``fail`` ends the run;
    ``zero`` gives the response the score 0 with the reason ``error``, which ``verifier/error`` counts."""
    custom_kwargs: dict[str, Any]
    """Further keyword arguments of ``custom_functions``, the same for each response and each function."""

    def __post_init__(self) -> None:
        workers = self.num_workers
        require(0 <= workers <= 4096, "reward_score.num_workers", workers, "must be from 0 to 4096")
        require_seconds("reward_score.timeout_s", self.timeout_s)
        require_positive("reward_score.memory_limit_mb", self.memory_limit_mb)
        field, own = "reward_score.custom_kwargs", ("data_source", "solution_str", "ground_truth", "extra_info")
        for name, value in self.custom_kwargs.items():
            require(name.isidentifier() and name not in own, f"{field}.{name}", value, "must be a name of your own")
        require(
            not self.custom_kwargs or bool(self.custom_functions),
            field,
            self.custom_kwargs,
            "are used only with reward_score.custom_functions; set that",
        )
        self.paths_of_custom_functions()

    def paths_of_custom_functions(self) -> dict[str, str]:
        """``custom_functions`` as data source -> path of the function. Raises ``ConfigError`` for a malformed entry."""
        field, paths = "reward_score.custom_functions", dict[str, str]()
        for entry in self.custom_functions:
            source, _, path = entry.partition("=")
            module, _, function = path.rpartition(":")
            importable = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
            well_formed = bool(source.strip()) and importable and function.isidentifier()
            require(
                well_formed,
                field,
                entry,
                "must have the form data_source=module:function, or file.py:function",
            )
            require(source not in paths, field, entry, f"{source} already has {paths.get(source)}; name one function")
            paths[source] = path
        return paths


@dataclass(frozen=True)
class RewardModelConfig:
    """A learned reward model, used together with the verifiers."""

    enable: bool
    """Load it, and add its score to the verifier's."""
    model: ModelConfig
    """A sequence classification model with one output (``AutoModelForSequenceClassification``, ``num_labels=1``) whose
    head is called ``score``, as in Llama, Mistral and Qwen. It uses its own tokenizer and chat template, so it may be
    of another family than the policy. ``none``: no model."""
    micro_batch_size_per_gpu: int
    """Responses per forward pass on one worker; changes memory and speed, never the scores."""
    max_length: int
    """Most tokens of prompt and response, by its own tokenizer; longer texts lose their first tokens."""
    rule_weight: float
    """Weight of the verifier's score in the reward. At 0 the policy learns from the reward model alone; verifiers still
    decide what is correct, in the log and for ``algorithm.filter_groups``."""
    weight: float
    """Weight of the reward model's score in the reward."""

    def __post_init__(self) -> None:
        for field in ("micro_batch_size_per_gpu", "max_length"):
            require_positive(f"reward_model.{field}", getattr(self, field))
        weights = (self.rule_weight, self.weight)
        require(not self.enable or any(weights), "reward_model.weight", self.weight, "both weights are 0; set one")


@dataclass(frozen=True)
class RewardManagerConfig:
    """Rank shaping: how rank metrics become the auxiliary signal Phi and where Phi goes."""

    add_reward: bool
    """Add Phi to the reward of the response's last token."""
    add_adv: bool
    """Add min(relu(Phi), |A| / kappa) to the advantage."""
    shaping_placement: Literal["all_tokens", "last_token"]
    """Where ``add_adv`` acts: ``all_tokens`` of the response or its ``last_token``."""
    phi_without_reward: bool
    """Compute Phi even if ``add_reward`` is off. False is the paper's first release: without ``add_reward`` Phi is 0
    and the baselines do not move, so ``add_adv`` alone changes nothing."""
    baseline_start: Literal["first_batch", "zero"]
    """``first_batch``: the first batch sets the baselines, each later one moves them. ``zero``, as in the paper's
    release: baselines and score average start at 0, so the first step has no signal and in the second every deviation
    is at its limit of 5; each step then moves the baselines, after its signal, towards the batch of the previous
    step."""
    indicator_names: list[str]
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
    kappa: float
    """The bonus is at most |A| / kappa, so that no advantage changes its sign; at least 1."""
    ema_alpha: float
    """Weight of the newest batch mean in the baselines mu and in the score average, in (0, 1]."""
    aux_reward_global_weight: float
    """The constant c in Phi."""
    aux_fix: bool
    """Keep c constant; false multiplies c by 1 - (ema_score + 1) / 2, so that Phi fades as the score rises."""

    def __post_init__(self) -> None:
        require_literals("reward_manager", self)
        names = self.indicator_names
        require(len(names) > 0, "reward_manager.indicator_names", names, "name at least the guide")
        for field in ("w_explore", "w_exploit"):
            weights = getattr(self, field)
            require(
                len(weights) == len(names),
                f"reward_manager.{field}",
                weights,
                f"needs one weight per indicator, {len(names)}: {names}",
            )
        require(self.kappa >= 1, "reward_manager.kappa", self.kappa, "must be at least 1")
        require(0 < self.ema_alpha <= 1, "reward_manager.ema_alpha", self.ema_alpha, "must be in (0, 1]")

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
