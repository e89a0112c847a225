"""Configuration of the learning signal: rank metrics, scores, advantages, rank shaping.

The dataclasses are the schema; ``configs/`` holds the values. There are no defaults here, so that every value
has one home.
"""

from dataclasses import dataclass

from verl.config.checks import require, require_choice, require_positive

BASE_METRICS = ["Response Entropy 1", "Effective Rank", "Traditional Rank", "Curvature", "Log Effective Rank"]
"""The metrics of one response and layer, in the order that ``calculator.metric_indices`` indexes."""

KL_TYPES = ["kl", "abs", "mse", "low_var_kl"]

SVD_METHODS = ["full", "lowrank"]

HYPOTHESIS_TYPES = ["PlanB", "FixTwo", "FixOne"]


GROUP_ESTIMATORS = ["grpo", "rloo", "reinforce_plus_plus_baseline"]
"""Estimators that compare the responses to one prompt, so need at least two of them."""

ADV_ESTIMATORS = [*GROUP_ESTIMATORS, "reinforce_plus_plus", "remax", "gae"]


@dataclass(frozen=True)
class KLControlConfig:
    """The weight of the KL divergence in the reward."""

    type: str
    """``fixed``, or ``adaptive``: the weight grows while the divergence is above its target, and shrinks below it."""
    kl_coef: float
    """The weight, at the start if ``adaptive``."""
    target_kl: float
    """Divergence per response token in nats that ``adaptive`` aims at."""
    horizon: float
    """Responses over which ``adaptive`` corrects an error of 20% or more by a fifth; larger is slower."""

    def __post_init__(self) -> None:
        require_choice("algorithm.kl_ctrl.type", self.type, ["fixed", "adaptive"])
        require(self.kl_coef >= 0, "algorithm.kl_ctrl.kl_coef", self.kl_coef, "must be at least 0")
        require_positive("algorithm.kl_ctrl.target_kl", self.target_kl)
        require_positive("algorithm.kl_ctrl.horizon", self.horizon)
        if self.type == "adaptive":
            require(
                self.kl_coef > 0,
                "algorithm.kl_ctrl.kl_coef",
                self.kl_coef,
                "adaptive control multiplies it; set it above 0",
            )


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing are replaced by others."""

    enable: bool
    """Drop the prompts whose responses all have the same ``metric``, and sample further prompts in their place."""
    metric: str
    """``acc``: whether the response is correct; ``score``: its score, auxiliary rewards not included."""
    max_num_gen_batches: int
    """Most batches of ``data.train_batch_size`` prompts to sample for one step, at least 1. The step then learns from
    the groups found. Batches beyond the first are not counted as part of an epoch."""

    def __post_init__(self) -> None:
        require_choice("algorithm.filter_groups.metric", self.metric, ["acc", "score"])
        require_positive("algorithm.filter_groups.max_num_gen_batches", self.max_num_gen_batches)


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    adv_estimator: str
    """Advantage estimator, a key of ``verl.algorithms.advantages.ADVANTAGE_ESTIMATORS``: ``grpo``, ``rloo``,
    ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``remax`` (the greedy response is the baseline, one more
    response per prompt) or ``gae`` (PPO, with the critic of the group ``critic``)."""
    norm_adv_by_std_in_grpo: bool
    """Divide the group-centred score by the group's standard deviation (GRPO); false gives Dr.GRPO's form."""
    gamma: float
    """Discount per token of ``reinforce_plus_plus`` and ``gae``, in [0, 1]."""
    lam: float
    """Lambda of ``gae``, in [0, 1]: 0 trusts the critic alone, 1 the rewards alone."""
    use_kl_in_reward: bool
    """Subtract the KL divergence from the reference policy from every token's reward."""
    kl_penalty: str
    """Its estimator, a key of ``verl.algorithms.kl.KL_ESTIMATORS``: ``kl``, ``abs``, ``mse`` or ``low_var_kl``."""
    kl_ctrl: KLControlConfig
    filter_groups: FilterGroupsConfig

    def __post_init__(self) -> None:
        require_choice("algorithm.adv_estimator", self.adv_estimator, ADV_ESTIMATORS)
        require(0 <= self.gamma <= 1, "algorithm.gamma", self.gamma, "must be in [0, 1]")
        require(0 <= self.lam <= 1, "algorithm.lam", self.lam, "must be in [0, 1]")
        require_choice("algorithm.kl_penalty", self.kl_penalty, KL_TYPES)


@dataclass(frozen=True)
class CalculatorConfig:
    """Which rank metrics are computed from the rollout's hidden states."""

    enable: bool
    """Capture hidden states and compute rank metrics; needed by ``reward_manager.add_reward`` and ``add_adv``."""
    source: str
    """Where hidden states come from: ``rollout``, the engine while it samples; or ``actor``, the forward pass that
    gives the policy's log-probabilities, for engines that cannot return states; validation then takes that pass more.
    Evaluation knows ``rollout`` alone."""
    layers: list[int]
    """Layers whose hidden states are measured, counted from either end: -1 is the state after the final norm, any other
    the output of that decoder layer. Logged as ``layer_1``, ``layer_2``, ... in this order; Phi is their mean."""
    metric_indices: list[int]
    """Indices into ``BASE_METRICS`` of the metrics to compute."""
    compute_diff: bool
    """Also compute each metric's velocity ("<name> diff") and acceleration ("<name> diff 2")."""
    diff_stride: int
    """Tokens between two consecutive prefixes of the velocity and acceleration, at least 1."""
    max_seq_len: int | None
    """Velocity and acceleration see only this many last tokens of a response (the paper's release: 512); null: all."""
    metrics_dtype: str
    """``float64``, or ``bfloat16``: the effective, log effective and traditional rank of a whole response are rounded
    to it, that is to 8 significant bits, as the paper's release stored them (301 becomes 300). Entropy, curvature,
    velocities and accelerations, which it did not store so, stay as they are."""
    compute_log_effective_rank: bool
    """Compute "Log Effective Rank" too; the same as its index, 4, in ``metric_indices``."""
    zeroth_order_svd_method: str
    """Spectrum of the whole response: ``full``, or ``lowrank``: its ``svd_rank`` largest singular values alone."""
    diff_svd_method: str
    """The same for the prefixes of velocity and acceleration. ``full`` is both exact and faster."""
    svd_rank: int
    """Singular values that ``lowrank`` keeps, at least 1."""
    svd_niter: int
    """Power iterations of the paper's release, whose ``lowrank`` is a randomised approximation. Ours keeps the exact
    largest singular values, the limit of many iterations: any value gives the same result."""
    diff_calculator_method: str
    """``optimized``: all prefixes at once (or, where that is cheaper, eigenvalues of each); ``original``: a float64
    singular value decomposition of every prefix, slow, for comparison."""
    on_nonfinite: str
    """Hidden states with NaN or infinity: ``raise`` an error that names response and layer, or ``mask``: the
    response's metrics are NaN, which gives no signal and no share in the means, and the log counts it, or ``zero``: its
    metrics are 0, unseen in the log but part of means and signal, as in the paper's release."""
    compute_global_metrics: bool
    """Log the metrics of the matrix of mean states, one per response of the batch ("global/<name>")."""
    compute_cumulative_global_metrics: bool
    """Log that matrix's velocity and acceleration over the responses ("cumulative/<name> diff")."""
    global_diff_stride_train: int
    """Responses between two prefixes of ``compute_cumulative_global_metrics`` in training, at least 1."""
    global_diff_stride_val: int
    """The same in validation."""

    def measured_by(self, source: str) -> bool:
        """Whether rank metrics are measured, and by ``source``: ``rollout`` or ``actor``."""
        return self.enable and self.source == source

    def __post_init__(self) -> None:
        require_choice("calculator.source", self.source, ["rollout", "actor"])
        require(len(self.layers) > 0, "calculator.layers", self.layers, "name at least one")
        require(len(set(self.layers)) == len(self.layers), "calculator.layers", self.layers, "name each once")
        require(len(self.metric_indices) > 0, "calculator.metric_indices", self.metric_indices, "name at least one")
        for index in self.metric_indices:
            require(
                0 <= index < len(BASE_METRICS),
                "calculator.metric_indices",
                self.metric_indices,
                f"indices run from 0 to {len(BASE_METRICS) - 1}: {BASE_METRICS}",
            )
        distinct = len(set(self.metric_indices)) == len(self.metric_indices)
        require(distinct, "calculator.metric_indices", self.metric_indices, "name each once")
        if self.max_seq_len is not None:
            require_positive("calculator.max_seq_len", self.max_seq_len)
        for field in ("diff_stride", "svd_rank", "global_diff_stride_train", "global_diff_stride_val"):
            require_positive(f"calculator.{field}", getattr(self, field))
        require(self.svd_niter >= 0, "calculator.svd_niter", self.svd_niter, "must not be negative")
        require_choice("calculator.zeroth_order_svd_method", self.zeroth_order_svd_method, SVD_METHODS)
        require_choice("calculator.diff_svd_method", self.diff_svd_method, SVD_METHODS)
        require_choice("calculator.diff_calculator_method", self.diff_calculator_method, ["optimized", "original"])
        require_choice("calculator.on_nonfinite", self.on_nonfinite, ["raise", "mask", "zero"])
        require_choice("calculator.metrics_dtype", self.metrics_dtype, ["float64", "bfloat16"])

    @property
    def base_names(self) -> list[str]:
        """Names of the metrics of one response, in the order of ``metric_indices``."""
        names = [BASE_METRICS[i] for i in self.metric_indices]
        if self.compute_log_effective_rank and "Log Effective Rank" not in names:
            names.append("Log Effective Rank")
        return names

    @property
    def metric_names(self) -> list[str]:
        """Every metric name the calculator returns, velocity and acceleration included."""
        suffixes = ["", " diff", " diff 2"] if self.compute_diff else [""]
        return [name + suffix for name in self.base_names for suffix in suffixes]


@dataclass(frozen=True)
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): long responses lose score before they are cut off."""

    enable: bool
    """Lower the score of responses that reach into the last ``len`` tokens of ``data.max_response_length``."""
    len: int
    """Length of that range in tokens, at least 1 and below ``data.max_response_length``."""
    penalty_factor: float
    """What a response of full length loses, at least 0; within the range the loss grows linearly from 0."""

    def __post_init__(self) -> None:
        require_positive("reward_score.overlong_buffer.len", self.len)
        field = "reward_score.overlong_buffer.penalty_factor"
        require(self.penalty_factor >= 0, field, self.penalty_factor, "must be at least 0")


@dataclass(frozen=True)
class RewardScoreConfig:
    """How verifiers turn a response into a score."""

    mode: str
    """``independent``: 1 correct, boxed, 0.5 correct unboxed, -0.5 wrong boxed, -1 wrong unboxed; ``mix``: 1 or 0."""
    num_workers: int
    """Verifier processes."""
    timeout_s: float
    """Seconds one response may take; then its verifier process is killed and the response counts as wrong."""
    memory_limit_mb: int
    """Address-space limit of one verifier process, MiB."""
    overlong_buffer: OverlongBufferConfig
    custom_functions: list[str]
    """Reward functions of your own, each as ``data_source=module:function``, in quotes of its own on the command line:
    ``["my_set=my_rewards:score"]``. The data source ``*`` means every one that has no other. They come before the
    verifiers. Called with ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info``, each returns a
    number, a bool, or a dict with ``score`` and optionally ``correctness`` or ``acc`` (correct above 0; without it, if
    the score is). Its score is used as it is, whatever ``mode`` says; a response on which it exceeds the limits scores
    0, and an exception that it raises ends the run."""

    def __post_init__(self) -> None:
        require_choice("reward_score.mode", self.mode, ["independent", "mix"])
        require_positive("reward_score.num_workers", self.num_workers)
        require_positive("reward_score.timeout_s", self.timeout_s)
        require_positive("reward_score.memory_limit_mb", self.memory_limit_mb)
        self.paths_of_custom_functions()

    def paths_of_custom_functions(self) -> dict[str, str]:
        """``custom_functions`` as data source -> ``module:function``. Raises ``ValueError`` for a malformed entry."""
        field, paths = "reward_score.custom_functions", dict[str, str]()
        for entry in self.custom_functions:
            source, _, path = entry.partition("=")
            module, _, function = path.partition(":")
            well_formed = bool(source.strip()) and all(part.isidentifier() for part in [*module.split("."), function])
            require(well_formed, field, entry, "must have the form data_source=module:function")
            require(source not in paths, field, entry, f"{source} has {paths.get(source)} already; name one")
            paths[source] = path
        return paths


@dataclass(frozen=True)
class RewardManagerConfig:
    """Rank shaping: how rank metrics become the auxiliary signal Phi and where Phi goes."""

    add_reward: bool
    """Add Phi to the reward of the response's last token."""
    add_adv: bool
    """Add min(relu(Phi), |A| / kappa) to the advantage."""
    shaping_placement: str
    """Where ``add_adv`` acts: ``all_tokens`` of the response or its ``last_token``."""
    phi_without_reward: bool
    """Compute Phi even where ``add_reward`` is off. False, as in the paper's first release: without ``add_reward`` Phi
    is 0 and no baseline moves, so ``add_adv`` alone changes nothing."""
    baseline_start: str
    """``first_batch``: the first batch sets the baselines, each later one moves them. ``zero``, as in the paper's
    release: baselines and score average start at 0, the first step has no signal, the second finds every deviation at
    its limit of 5, and each step moves the baselines, after its signal, towards the batch of the step before."""
    indicator_names: list[str]
    """Metric names that enter Phi; the first (the acceleration) is the guide that sets beta."""
    w_explore: list[float]
    """Weight of each indicator when exploring (beta = 1), aligned with ``indicator_names``."""
    w_exploit: list[float]
    """Weight of each indicator when exploiting (beta = 0), aligned with ``indicator_names``."""
    hypothesis_type: str
    """``PlanB``: beta = sigmoid(gain * d_guide); ``FixTwo``: beta = 0.5; ``FixOne``: w = w_explore + w_exploit."""
    gain: float
    """Slope of the sigmoid in ``PlanB``."""
    kappa: float
    """The shaped part is at most |A| / kappa, so a sign never flips; at least 1."""
    ema_alpha: float
    """Weight of the newest batch mean in the baselines mu and in the score average, in (0, 1]."""
    aux_reward_global_weight: float
    """The constant c in Phi."""
    aux_fix: bool
    """Keep c constant; false multiplies it by 1 - (ema_score + 1) / 2, so that Phi fades as the score rises."""

    def __post_init__(self) -> None:
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
        require_choice("reward_manager.hypothesis_type", self.hypothesis_type, HYPOTHESIS_TYPES)
        require_choice("reward_manager.shaping_placement", self.shaping_placement, ["all_tokens", "last_token"])
        require_choice("reward_manager.baseline_start", self.baseline_start, ["first_batch", "zero"])
        require(self.kappa >= 1, "reward_manager.kappa", self.kappa, "must be at least 1")
        require(0 < self.ema_alpha <= 1, "reward_manager.ema_alpha", self.ema_alpha, "must be in (0, 1]")

    @property
    def active(self) -> bool:
        """Whether Phi reaches the learning signal at all."""
        return self.add_reward or self.add_adv

    @property
    def computes_phi(self) -> bool:
        """Whether Phi is computed; else it is 0 and the baselines stand still."""
        return self.add_reward or self.phi_without_reward
