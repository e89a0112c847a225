"""Configuration of ``verl.trainer.main_ppo``: the schema of ``configs/ppo_trainer.yaml``.

The dataclasses are the schema; ``configs/`` holds the values.
"""

from dataclasses import dataclass

from verl.config.checks import require, require_choice, require_positive
from verl.config.common import (
    DEVICES,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    check_divides,
    check_divisible,
    check_workers,
    require_seed,
)
from verl.config.signal import (
    GROUP_ESTIMATORS,
    KL_TYPES,
    AlgorithmConfig,
    CalculatorConfig,
    RewardManagerConfig,
    RewardScoreConfig,
)

LOSS_AGG_MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and how they are batched."""

    train_files: list[str]
    """Parquet files of training prompts in veRL's record layout."""
    val_files: list[str]
    """Parquet files of validation prompts; may be empty, then nothing is validated."""
    train_batch_size: int
    """Prompts per training step, over all workers."""
    val_batch_size: int
    """Prompts per validation batch, over all workers."""
    val_sample_size: int
    """Validate on this many prompts, drawn once by ``seed``; -1: on all."""
    max_prompt_length: int
    """Longest prompt in tokens, chat template included."""
    max_response_length: int
    """Longest response in tokens; generation stops there."""
    truncation: str
    """A prompt that is too long: ``error`` stops before training, ``left`` drops its head, ``right`` its tail."""
    shuffle: bool
    """Draw training prompts in a new random order each epoch, fixed by ``seed``."""

    def __post_init__(self) -> None:
        require(len(self.train_files) > 0, "data.train_files", self.train_files, "name at least one parquet file")
        for field in ("train_batch_size", "val_batch_size", "max_prompt_length", "max_response_length"):
            require_positive(f"data.{field}", getattr(self, field))
        require(
            self.val_sample_size == -1 or self.val_sample_size > 0,
            "data.val_sample_size",
            self.val_sample_size,
            "must be -1 or at least 1",
        )
        require_choice("data.truncation", self.truncation, ["error", "left", "right"])


@dataclass(frozen=True)
class ActorConfig:
    """The policy update."""

    ppo_mini_batch_size: int
    """Prompts per optimizer step, over all workers; divides ``data.train_batch_size``."""
    ppo_epochs: int
    """Passes over one rollout batch."""
    micro_batch_size_per_gpu: int
    """Responses per forward and backward on one worker; changes memory and speed, never the gradient."""
    log_prob_micro_batch_size_per_gpu: int
    """Responses per forward on one worker where only log-probabilities are needed, of the policy or the reference."""
    use_dynamic_bsz: bool
    """Form micro-batches by their number of tokens in place of responses, and balance tokens over workers. The gradient
    does not depend on it."""
    ppo_max_token_len_per_gpu: int
    """Most tokens, prompt and response, per forward and backward on one worker with ``use_dynamic_bsz``. The
    ``model.ulysses_sequence_parallel_size`` workers that share sequences hold so many times that; at least one whole
    sequence."""
    log_prob_max_token_len_per_gpu: int
    """The same where only log-probabilities are needed."""
    policy_loss: str
    """Policy loss, a key of ``verl.algorithms.losses.POLICY_LOSSES``: ``ppo_clip``; ``gspo`` clips the ratio of whole
    responses; ``cispo`` weighs the log-probability of every token by the clipped ratio."""
    clip_ratio_low: float
    """The probability ratio is clipped below at 1 - ``clip_ratio_low``, in (0, 1]."""
    clip_ratio_high: float
    """The probability ratio is clipped above at 1 + ``clip_ratio_high``."""
    clip_ratio_c: float | None
    """Dual clip of ``ppo_clip``, above 1: the loss of a token with a negative advantage A is at most
    -``clip_ratio_c`` * A; null: no such bound."""
    loss_agg_mode: str
    """How token losses become one number: ``token-mean`` over all response tokens of the optimizer step;
    ``seq-mean-token-mean`` the mean over responses of each one's mean; ``seq-mean-token-sum`` of each one's sum;
    ``seq-mean-token-sum-norm`` of each one's sum over ``data.max_response_length`` (Dr.GRPO)."""
    entropy_coeff: float
    """Weight of the entropy bonus in the loss, at least 0."""
    tis_level: str
    """Truncated importance sampling against the mismatch between the rollout engine's and the trainer's probabilities:
    ``none``; ``token`` or ``sequence`` weighs a token's loss by the ratio of the token or of its whole response."""
    tis_cap: float
    """Largest such weight, above 0."""
    use_kl_loss: bool
    """Add the KL divergence from the reference policy to the loss."""
    kl_loss_coef: float
    """Weight of the KL divergence in the loss."""
    kl_loss_type: str
    """KL estimator, a key of ``verl.algorithms.kl.KL_ESTIMATORS``: ``kl``, ``abs``, ``mse`` or ``low_var_kl``."""
    optim: OptimConfig

    def __post_init__(self) -> None:
        for field in (
            "ppo_mini_batch_size",
            "ppo_epochs",
            "micro_batch_size_per_gpu",
            "log_prob_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "log_prob_max_token_len_per_gpu",
        ):
            require_positive(f"actor.{field}", getattr(self, field))
        require_choice("actor.policy_loss", self.policy_loss, ["ppo_clip", "gspo", "cispo"])
        require(0 < self.clip_ratio_low <= 1, "actor.clip_ratio_low", self.clip_ratio_low, "must be in (0, 1]")
        require_positive("actor.clip_ratio_high", self.clip_ratio_high)
        require(self.kl_loss_coef >= 0, "actor.kl_loss_coef", self.kl_loss_coef, "must be at least 0")
        require_choice("actor.kl_loss_type", self.kl_loss_type, KL_TYPES)
        if self.clip_ratio_c is not None:
            require(self.clip_ratio_c > 1, "actor.clip_ratio_c", self.clip_ratio_c, "must be above 1, or null")
            require(
                self.policy_loss == "ppo_clip",
                "actor.clip_ratio_c",
                self.clip_ratio_c,
                "is for ppo_clip alone; set null",
            )
        require_choice("actor.loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)
        require(self.entropy_coeff >= 0, "actor.entropy_coeff", self.entropy_coeff, "must be at least 0")
        require_choice("actor.tis_level", self.tis_level, ["none", "token", "sequence"])
        require_positive("actor.tis_cap", self.tis_cap)


def check_sampling(prefix: str, n: int, temperature: float, top_p: float, top_k: int) -> None:
    """Raise ``ConfigError`` naming ``prefix.<field>`` for sampling options out of range."""
    require(n >= 1, f"{prefix}.n", n, "must be at least 1")
    require(temperature >= 0, f"{prefix}.temperature", temperature, "must be at least 0")
    require(0 < top_p <= 1, f"{prefix}.top_p", top_p, "must be in (0, 1]")
    require(top_k == -1 or top_k >= 1, f"{prefix}.top_k", top_k, "must be -1 or at least 1")
    require(temperature > 0 or n == 1, f"{prefix}.n", n, "greedy decoding (temperature=0) gives one response; set n=1")


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn."""

    n: int
    """Responses per prompt."""
    temperature: float
    """Softmax temperature; 0 is greedy."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps the whole distribution."""
    top_k: int
    """Number of most likely tokens kept; -1 keeps all."""

    def __post_init__(self) -> None:
        check_sampling("rollout.val_kwargs", self.n, self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class ReferenceConfig:
    """The reference policy, the model before training; held where a KL divergence is asked for. With LoRA it is the
    policy without its adapters."""

    param_offload: bool
    """Keep its parameters in the host's memory while they are not used. Gains nothing on a CPU; with LoRA there are
    none, and ``model.fsdp.param_offload`` counts."""


@dataclass(frozen=True)
class RolloutConfig(EngineConfig):
    """The engine that samples responses inside each worker."""

    name: str
    """``vllm``; or ``hf``: the policy itself through ``transformers``, slower, for models that vLLM has no classes of
    its own for. It computes in ``model.param_dtype``, with the whole policy on every worker while it generates, and
    decodes ``max_num_seqs`` responses at a time, each batch until its last response has ended."""
    free_cache_engine: bool
    """Let go of the engine's weights and KV cache while the models learn (vLLM's sleep mode, level 2); they come back
    with the next weights. GPU only; nothing changes on a CPU."""
    stop_token_ids: list[int]
    """Tokens that end a response besides those of the tokenizer and of the model's ``generation_config.json``."""
    n: int
    """Responses per training prompt."""
    temperature: float
    """Softmax temperature of training rollouts, above 0. Log-probabilities are those of the sampled distribution."""
    top_p: float
    """Nucleus mass of training rollouts in (0, 1]; 1 keeps the whole distribution.

    The trainer's own log-probabilities know the temperature alone: below 1, ``rollout/logprob_abs_diff`` shows the
    truncation.
    """
    top_k: int
    """Number of most likely tokens kept in training rollouts; -1 keeps all."""
    val_kwargs: SamplingConfig
    """Sampling at validation."""

    @property
    def train_kwargs(self) -> SamplingConfig:
        """Sampling of the training rollouts."""
        return SamplingConfig(n=self.n, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("rollout.name", self.name, ["vllm", "hf"])
        check_sampling("rollout", self.n, self.temperature, self.top_p, self.top_k)
        require(self.temperature > 0, "rollout.temperature", self.temperature, "training samples; set it above 0")


@dataclass(frozen=True)
class CriticConfig:
    """The critic of ``algorithm.adv_estimator=gae``, and how it learns; not loaded by the other estimators."""

    model: ModelConfig
    """A causal language model with the policy's tokenizer, whose output head is replaced by a value head that starts at
    0; or a saved critic or reward model, whose head is kept. Its architecture needs a token classification form in
    ``transformers`` whose head is called ``score``, as Llama, Mistral and Qwen have."""
    ppo_mini_batch_size: int
    """Prompts per optimizer step, over all workers; divides ``data.train_batch_size``."""
    ppo_epochs: int
    """Passes over one rollout batch."""
    micro_batch_size_per_gpu: int
    """Responses per forward and backward on one worker; changes memory and speed, never the gradient."""
    use_dynamic_bsz: bool
    """Form micro-batches by their number of tokens in place of responses, and balance tokens over workers."""
    ppo_max_token_len_per_gpu: int
    """Most tokens, prompt and response, per forward on one worker with ``use_dynamic_bsz``; as the actor's."""
    cliprange_value: float
    """A value moves at most this far from its old one before its loss stops counting, in units of reward, above 0."""
    optim: OptimConfig

    def __post_init__(self) -> None:
        for field in (
            "ppo_mini_batch_size",
            "ppo_epochs",
            "micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "cliprange_value",
        ):
            require_positive(f"critic.{field}", getattr(self, field))


@dataclass(frozen=True)
class RewardModelConfig:
    """A learned reward model beside the verifiers' rules."""

    enable: bool
    """Load it, and add its score to the verifier's."""
    model: ModelConfig
    """A sequence classification model with one output (``AutoModelForSequenceClassification``, ``num_labels=1``), of an
    architecture whose head is called ``score``, as Llama's, Mistral's and Qwen's. Its own tokenizer and chat template
    are used, so that it need not be a relative of the policy. ``none`` stands for no model."""
    micro_batch_size_per_gpu: int
    """Responses per forward on one worker; changes memory and speed, never the scores."""
    max_length: int
    """Most tokens it reads of prompt and response, in its own tokenizer; longer ones lose their head."""
    rule_weight: float
    """Weight of the verifier's score in what a response earns. At 0 the reward model alone is learned from; verifiers
    still say what is correct, in the log and for ``algorithm.filter_groups``."""
    weight: float
    """Weight of the reward model's score."""

    def __post_init__(self) -> None:
        for field in ("micro_batch_size_per_gpu", "max_length"):
            require_positive(f"reward_model.{field}", getattr(self, field))
        weights = (self.rule_weight, self.weight)
        require(not self.enable or any(weights), "reward_model.weight", self.weight, "both weights are 0; set one")


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """A run of the main job."""

    val_before_train: bool
    """Validate the initial policy (step 0)."""
    val_only: bool
    """Validate the initial policy, or the one resumed from, and end."""
    except_save: list[int]
    """Steps after which a checkpoint is saved in addition to those of ``save_freq``."""
    remove_previous_ckpt: bool
    """As ``max_ckpt_to_keep=1``. Those of ``except_save`` are kept in either case."""
    critic_warmup: int
    """First steps in which the critic learns alone and the policy stays as it is; ``gae`` only."""
    remove_clip: bool
    """Responses cut at ``data.max_response_length`` have no share in the losses. They still count in the statistics of
    their group and in the logs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.critic_warmup >= 0, "trainer.critic_warmup", self.critic_warmup, "must not be negative")
        positive = all(step > 0 for step in self.except_save)
        require(positive, "trainer.except_save", self.except_save, "steps are counted from 1")

    def saves_nothing(self, total_steps: int) -> bool:
        """Whether a training run of ``total_steps`` ends without a checkpoint."""
        saves = self.val_only or any(step <= total_steps for step in self.except_save)
        return super().saves_nothing(total_steps) and not saves


@dataclass(frozen=True)
class PPOConfig:
    """Everything one run of ``verl.trainer.main_ppo`` depends on."""

    device: str
    """``auto`` takes CUDA with nccl where there is a GPU, else the CPU with gloo; ``cpu`` or ``cuda`` force one."""
    seed: int
    """Seed of every random choice: prompt order, sampling, initialisation."""
    data: DataConfig
    model: ModelConfig
    actor: ActorConfig
    ref: ReferenceConfig
    rollout: RolloutConfig
    critic: CriticConfig
    reward_model: RewardModelConfig
    algorithm: AlgorithmConfig
    calculator: CalculatorConfig
    reward_score: RewardScoreConfig
    reward_manager: RewardManagerConfig
    trainer: TrainerConfig

    def __post_init__(self) -> None:
        require_choice("device", self.device, DEVICES)
        require_seed(self.seed)
        n, batch, mini = self.rollout.n, self.data.train_batch_size, self.actor.ppo_mini_batch_size
        workers = self.trainer.world_size
        estimator = self.algorithm.adv_estimator
        if estimator in GROUP_ESTIMATORS:
            require(n >= 2, "rollout.n", n, f"{estimator} needs at least 2 responses per prompt; set rollout.n>=2")
        check_divisible("data.train_batch_size", batch, "actor.ppo_mini_batch_size", mini)
        world = "trainer.nnodes*trainer.n_gpus_per_node"
        check_divisible("data.train_batch_size", batch, world, workers)
        check_divisible("actor.ppo_mini_batch_size", mini, world, workers)
        if self.uses_critic:
            mini = self.critic.ppo_mini_batch_size
            check_divisible("data.train_batch_size", batch, "critic.ppo_mini_batch_size", mini)
            check_divisible("critic.ppo_mini_batch_size", mini, world, workers)
        require(
            self.uses_critic or self.trainer.critic_warmup == 0,
            "trainer.critic_warmup",
            self.trainer.critic_warmup,
            f"{estimator} has no critic; set it to 0",
        )
        require(
            bool(self.data.val_files) or not self.trainer.val_only,
            "trainer.val_only",
            True,
            "there is nothing to validate on; set data.val_files",
        )
        if self.algorithm.filter_groups.enable:
            require(
                n >= 2, "rollout.n", n, "algorithm.filter_groups compares the responses to a prompt; set it above 1"
            )
        overlong = self.reward_score.overlong_buffer
        require(
            not overlong.enable or overlong.len < self.data.max_response_length,
            "reward_score.overlong_buffer.len",
            overlong.len,
            f"must be below data.max_response_length={self.data.max_response_length}",
        )
        control = self.algorithm.kl_ctrl.type
        require(
            control == "fixed" or self.algorithm.use_kl_in_reward,
            "algorithm.kl_ctrl.type",
            control,
            "controls the KL divergence in the reward; set algorithm.use_kl_in_reward=true",
        )
        horizon = self.algorithm.kl_ctrl.horizon
        require(
            control == "fixed" or batch * n < 5 * horizon,
            "algorithm.kl_ctrl.horizon",
            horizon,
            f"adaptive control would overshoot with {batch * n} responses a step; set it above {batch * n / 5:g}",
        )
        self._check_engine()
        self._check_rank_signal()

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is held, for the KL divergence in the loss or in the reward."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is held."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models that are loaded, by their place in the config; the reference policy is ``model`` too."""
        models = {"model": self.model}
        models |= {"critic.model": self.critic.model} if self.uses_critic else {}
        return models | ({"reward_model.model": self.reward_model.model} if self.uses_reward_model else {})

    @property
    def uses_reward_model(self) -> bool:
        """Whether a reward model is held."""
        return self.reward_model.enable

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt and the longest response together."""
        return self.data.max_prompt_length + self.data.max_response_length

    def actor_updates(self, total_steps: int) -> int:
        """Optimizer steps of the policy in a run of ``total_steps``; at least 1."""
        steps = max(1, total_steps - self.trainer.critic_warmup)
        return steps * self.actor.ppo_epochs * (self.data.train_batch_size // self.actor.ppo_mini_batch_size)

    def critic_updates(self, total_steps: int) -> int:
        """Optimizer steps of the critic in a run of ``total_steps``."""
        per_pass = self.data.train_batch_size // self.critic.ppo_mini_batch_size
        return total_steps * self.critic.ppo_epochs * per_pass

    def _check_engine(self) -> None:
        """What the parts of the training engine ask of each other and of the number of workers."""
        workers = self.trainer.world_size
        world = "trainer.nnodes*trainer.n_gpus_per_node"
        longest = self.max_sequence_length
        parallel = self.rollout.tensor_parallel_size
        check_divides("rollout.tensor_parallel_size", parallel, world, workers)
        require(
            self.rollout.name == "vllm" or parallel == 1,
            "rollout.tensor_parallel_size",
            parallel,
            "is vLLM's; set it to 1 with rollout.name=hf",
        )
        for prefix, model in self.models.items():
            check_workers(model, prefix, workers)
        if self.uses_reward_model:
            rank = self.reward_model.model.lora.rank
            require(rank == 0, "reward_model.model.lora.rank", rank, "a reward model is not trained; set it to 0")
        budgets = []
        if self.actor.use_dynamic_bsz:
            budgets += [("actor.ppo_max_token_len_per_gpu", self.actor.ppo_max_token_len_per_gpu, self.model)]
            budgets += [("actor.log_prob_max_token_len_per_gpu", self.actor.log_prob_max_token_len_per_gpu, self.model)]
        if self.uses_critic and self.critic.use_dynamic_bsz:
            budgets += [("critic.ppo_max_token_len_per_gpu", self.critic.ppo_max_token_len_per_gpu, self.critic.model)]
        for field, budget, model in budgets:
            sequence = model.ulysses_sequence_parallel_size
            together = f" with the {sequence} workers that share it" if sequence > 1 else ""
            require(
                budget * sequence >= longest,
                field,
                budget,
                f"must hold one sequence{together}, data.max_prompt_length+data.max_response_length={longest}",
            )

    def _check_rank_signal(self) -> None:
        if not self.reward_manager.active:
            return
        require(
            self.calculator.enable,
            "calculator.enable",
            False,
            "rank shaping needs rank metrics; set calculator.enable=true, or reward_manager.add_reward=false and "
            "reward_manager.add_adv=false",
        )
        available = self.calculator.metric_names
        for name in self.reward_manager.indicator_names:
            require(
                name in available,
                "reward_manager.indicator_names",
                name,
                f"the calculator gives {available}; extend calculator.metric_indices or set "
                "calculator.compute_diff=true",
            )
