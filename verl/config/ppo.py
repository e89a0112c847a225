"""Configuration of ``verl.trainer.main_ppo``: the schema of ``configs/ppo_trainer.yaml``.

The dataclasses define the schema; ``configs/`` contains the values.
"""

import math
from dataclasses import dataclass, replace
from operator import attrgetter

from verl.config.actor import ActorConfig, LearnerConfig
from verl.config.calculator import CalculatorConfig, name_of
from verl.config.checks import Group, PositiveFloat, require
from verl.config.common import Device, ModelConfig, Seed, check_divides, check_workers
from verl.config.data import DataConfig
from verl.config.errors import Mistakes
from verl.config.rewards import RewardManagerConfig, RewardModelConfig, RewardScoreConfig
from verl.config.rollout import AsyncTrainingConfig, RolloutConfig
from verl.config.signal import GROUP_ESTIMATORS, TOKEN_BASELINES, AlgorithmConfig
from verl.config.teacher import TeacherConfig, options_of
from verl.config.trainer import TrainerConfig

ROLLOUT_IS = "algorithm.rollout_correction.rollout_is"


@dataclass(frozen=True)
class ReferenceConfig(Group):
    """The reference policy for KL divergences: the initial model or, with LoRA, the policy without adapters."""

    param_offload: bool
    """Keep the reference policy's parameters in host memory while not in use. Offloading saves no memory on a CPU. With
    LoRA, the reference policy has no parameters of its own, and ``model.fsdp.param_offload`` applies instead."""


@dataclass(frozen=True)
class CriticConfig(LearnerConfig):
    """The critic, which is loaded only for ``algorithm.adv_estimator=gae``, and its training options."""

    model: ModelConfig
    """A causal language model, critic or reward model with the policy's tokenizer. The output head of a causal language
    model is replaced by a value head initialised to 0; other heads are kept. The architecture must have a token
    classification class in ``transformers`` with a head named ``score``, as for Llama, Mistral and Qwen."""
    cliprange_value: PositiveFloat
    """Positive clip range of the value loss in units of reward. A value that has already moved towards its return by
    more than this range receives no gradient."""


@dataclass(frozen=True)
class PPOConfig(Group):
    """All options of one run of ``verl.trainer.main_ppo``."""

    device: Device
    """Device: ``auto`` uses CUDA (nccl) if there is a GPU, else the CPU (gloo); ``cpu`` and ``cuda`` force a choice."""
    seed: Seed
    """Seed for all randomness: prompt order, sampling and initialisation."""
    data: DataConfig
    model: ModelConfig
    actor: ActorConfig
    ref: ReferenceConfig
    rollout: RolloutConfig
    async_training: AsyncTrainingConfig
    critic: CriticConfig
    reward_model: RewardModelConfig
    teacher: TeacherConfig
    algorithm: AlgorithmConfig
    calculator: CalculatorConfig
    reward_score: RewardScoreConfig
    reward_manager: RewardManagerConfig
    trainer: TrainerConfig

    def check(self) -> None:
        mistakes = Mistakes()
        for check in (
            self._check_batches,
            self._check_filtering,
            self._check_rewards,
            self._check_rollout_weights,
            self._check_models,
            self._check_token_budgets,
            self._check_rank_signal,
            self._check_carry_over,
            self._check_teacher,
            self._check_agents,
            self._check_judge,
        ):
            with mistakes.collected():
                check()
        mistakes.raise_all()

    @property
    def compares_nothing(self) -> bool:
        """Whether the estimator compares responses to the same prompt, but only one response is sampled."""
        return self.algorithm.adv_estimator in GROUP_ESTIMATORS and self.rollout.n == 1

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Whether the advantage estimator needs the sum of squared probabilities at each token."""
        return self.algorithm.adv_estimator in TOKEN_BASELINES

    @property
    def needs_logprobs(self) -> bool:
        """Whether the policy's log-probabilities must be computed before the update, even without a custom loss."""
        return not self.actor.bypass_mode or self._signal_needs_scores

    @property
    def first_update_scores(self) -> bool:
        """Whether the first mini-batch can use its own forward pass to compute the old log-probabilities.

        The log-probabilities must not be needed earlier, and the update must use the same sequences without dropout."""
        earlier = self._signal_needs_scores or self.algorithm.use_kl_in_reward or self.teacher.in_advantage
        differs = self.algorithm.use_pf_ppo or (self.model.trains_adapters and self.model.lora.dropout > 0)
        differs = differs or self.rollout.multi_turn.agent.enabled
        return not (self.actor.bypass_mode or earlier or differs)

    @property
    def _signal_needs_scores(self) -> bool:
        """Whether the learning signal, apart from the KL penalty in the reward, needs a forward pass of the policy."""
        correction, calculator = self.algorithm.rollout_correction, self.calculator
        weighted = correction.rollout_is_batch_normalize and correction.rollout_is is not None
        measured = calculator.needs_policy or calculator.measured_by("actor")
        rejected = bool(correction.rejections)
        return weighted or measured or rejected or self.needs_sum_pi_squared

    @property
    def uses_reference(self) -> bool:
        """Whether the KL divergence in the loss or in the reward needs a reference policy."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage estimator needs a critic."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def models(self) -> dict[str, ModelConfig]:
        """All models to load, keyed by config name. ``model`` also serves as the reference policy."""
        models = {"model": self.model}
        models |= {"critic.model": self.critic.model} if self.uses_critic else {}
        models |= {"reward_model.model": self.reward_model.model} if self.uses_reward_model else {}
        return models | self.teacher.models

    @property
    def uses_reward_model(self) -> bool:
        return self.reward_model.enable

    @property
    def uses_teacher(self) -> bool:
        return self.teacher.enabled

    @property
    def needs_verdicts(self) -> bool:
        """Whether every response must be verified; otherwise, responses that no verifier can score are skipped."""
        distills_alone = self.uses_teacher and not self.teacher.use_task_rewards
        return not (self.rollout.multi_turn.replaces_verifiers or distills_alone)

    @property
    def samples_ahead(self) -> bool:
        """Whether engines sample responses for the next step while the models are updated."""
        return self.rollout.has_pool and self.async_training.max_staleness > 0

    @property
    def carried_steps(self) -> int:
        """Maximum delay of a group in steps; sampling ahead uses up one step of ``max_staleness``."""
        return self.async_training.max_staleness - self.samples_ahead

    @property
    def max_sequence_length(self) -> int:
        """Maximum total number of tokens in a prompt and its response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_engine_length(self) -> int:
        """Maximum sequence length in tokens that the engines must support, including prompts for judging."""
        judge = self.reward_score.judge
        return max(self.max_sequence_length, judge.max_length if judge.is_policy else 0)

    def judge_engine(self, device_type: str) -> RolloutConfig:
        """Return the options of a frozen judge's engine. On a GPU, its KV cache uses the engine's remaining memory."""
        share = self.reward_score.judge.model.gpu_memory_utilization
        cache = 0 if device_type == "cuda" else self.rollout.kv_cache_memory_mb
        return replace(self.rollout, gpu_memory_utilization=share, kv_cache_memory_mb=cache)

    def actor_updates(self, total_steps: int) -> int:
        """Return the number of optimizer steps of the policy in ``total_steps`` training steps, at least 1."""
        steps = max(1, total_steps - self.trainer.critic_warmup)
        return steps * self.actor.ppo_epochs * math.ceil(self.data.train_batch_size / self.actor.ppo_mini_batch_size)

    def critic_updates(self, total_steps: int) -> int:
        """Return the number of optimizer steps of the critic in ``total_steps`` training steps."""
        per_pass = math.ceil(self.data.train_batch_size / self.critic.ppo_mini_batch_size)
        return total_steps * self.critic.ppo_epochs * per_pass

    def _check_batches(self) -> None:
        estimator, batch = self.algorithm.adv_estimator, self.data.train_batch_size
        fix = "grpo_passk compares the two best responses to a prompt; set rollout.n>=2"
        self.require(estimator != "grpo_passk" or self.rollout.n >= 2, "rollout.n", fix)
        limit = f"must be at most data.train_batch_size={batch}"
        self.require(self.actor.ppo_mini_batch_size <= batch, "actor.ppo_mini_batch_size", limit)
        if self.uses_critic:
            self.require(self.critic.ppo_mini_batch_size <= batch, "critic.ppo_mini_batch_size", limit)
        else:
            fix = f"{estimator} has no critic; set it to 0"
            self.require(self.trainer.critic_warmup == 0, "trainer.critic_warmup", fix)
        fix = "there are no validation prompts; set data.val_files"
        self.require(bool(self.data.val_files) or not self.trainer.val_only, "trainer.val_only", fix)

    def _check_filtering(self) -> None:
        """Check the options of dynamic sampling."""
        batch, filtering = self.data.train_batch_size, self.algorithm.filter_groups
        field, generated = "data.gen_batch_size", self.data.prompts_per_batch
        if not filtering.enable:
            fix = (
                f"without algorithm.filter_groups a step samples data.train_batch_size={batch} prompts; set it to null"
            )
            self.require(generated == batch, field, fix)
            return
        fix = "algorithm.filter_groups compares the responses to one prompt; set rollout.n>=2"
        self.require(self.rollout.n >= 2, "rollout.n", fix)
        limit = filtering.max_num_gen_batches
        fix = f"so many batches of {field}={generated} prompts do not fill data.train_batch_size={batch}; raise either"
        enough = limit <= 0 or limit * generated >= batch
        self.require(enough, "algorithm.filter_groups.max_num_gen_batches", fix)
        known = filtering.metric != "seq_final_reward" or not self.algorithm.use_kl_in_reward
        fix = "the KL penalty of algorithm.use_kl_in_reward makes every reward differ; set seq_reward"
        self.require(known, "algorithm.filter_groups.metric", fix)

    def _check_rewards(self) -> None:
        """Check the options for the overlong penalty and for the KL penalty in the reward."""
        overlong, longest = self.reward_score.overlong_buffer, self.data.max_response_length
        fix = f"must be below data.max_response_length={longest}"
        self.require(not overlong.enable or overlong.len < longest, "reward_score.overlong_buffer.len", fix)
        control, responses = self.algorithm.kl_ctrl, self.data.train_batch_size * self.rollout.n
        if control.type == "adaptive":
            fix = "adaptive control needs the KL divergence in the reward; set algorithm.use_kl_in_reward=true"
            self.require(self.algorithm.use_kl_in_reward, "algorithm.kl_ctrl.type", fix)
            fix = f"adaptive control would overshoot with {responses} responses per step; set it above"
            self.require(responses < 5 * control.horizon, "algorithm.kl_ctrl.horizon", f"{fix} {responses / 5:g}")

    def _check_rollout_weights(self) -> None:
        twice = self.actor.bypass_mode and self.actor.policy_loss != "gpg"
        fix = f"with actor.bypass_mode {self.actor.policy_loss} compares with the engine already; set it to null"
        correction = self.algorithm.rollout_correction
        self.require(not twice or correction.rollout_is is None, ROLLOUT_IS, f"{fix}, or bypass_mode=false")

    def _check_models(self) -> None:
        parallel, holder = self.rollout.tensor_parallel_size, "rollout" if self.rollout.has_pool else "trainer"
        per_machine = attrgetter(f"{holder}.n_gpus_per_node")(self)
        check_divides("rollout.tensor_parallel_size", parallel, f"{holder}.n_gpus_per_node", per_machine)
        fix = "rollout.name=hf has no tensor parallelism; set it to 1"
        self.require(self.rollout.name == "vllm" or parallel == 1, "rollout.tensor_parallel_size", fix)
        for prefix, model in self.models.items():
            prefix = options_of(prefix)
            for workers in self.trainer.world_sizes:
                check_workers(model, prefix, workers)
            fix = "only the policy starts from an adapter; merge it into the model, and set this to null"
            starts = model.lora_adapter_path is None or prefix == "model"
            self.require(starts, f"{prefix}.lora_adapter_path", fix)
        untrained = not self.uses_reward_model or self.reward_model.model.lora.rank == 0
        self.require(untrained, "reward_model.model.lora.rank", "a reward model is not trained; set it to 0")

    def _check_token_budgets(self) -> None:
        """Check that each token budget fits the longest sequence."""
        budgets: dict[str, ModelConfig] = {}
        if self.actor.use_dynamic_bsz:
            budgets["actor.ppo_max_token_len_per_gpu"] = self.model
            budgets["actor.log_prob_max_token_len_per_gpu"] = self.model
        if self.uses_critic and self.critic.use_dynamic_bsz:
            budgets["critic.ppo_max_token_len_per_gpu"] = self.critic.model
        for field, model in budgets.items():
            sequence, longest = model.ulysses_sequence_parallel_size, self.max_sequence_length
            together = f", split over {sequence} workers" if sequence > 1 else ""
            sum_of = f"data.max_prompt_length+data.max_response_length={longest}"
            holds = attrgetter(field)(self) * sequence >= longest
            self.require(holds, field, f"must hold one sequence{together}: {sum_of}")

    def _check_carry_over(self) -> None:
        """Check the options for training on responses that were sampled with older weights."""
        staleness, partial = self.async_training.max_staleness, self.async_training.partial_rollout
        field = "async_training.max_staleness"
        fix = (
            "without partial_rollout, or engines of their own (rollout.nnodes), every response is sampled in its own "
            "step; set either, or this to 0"
        )
        self.require(partial or self.rollout.has_pool or staleness == 0, field, fix)
        fix = "engines of their own sample one version behind, and partial_rollout more; set it to 2 or more"
        self.require(not partial or self.carried_steps > 0, field, fix)
        fix = "the machines of rollout.nnodes would count as the trainer's; leave it null"
        self.require(not self.rollout.has_pool or self.trainer.min_nnodes is None, "trainer.min_nnodes", fix)
        fix = f"with {field}=0 the versions are the same; raise that, or set this to false"
        self.require(staleness > 0 or not self.calculator.compare_versions, "calculator.compare_versions", fix)
        if not staleness:
            return
        stale = f"responses are up to {field}={staleness} versions behind"
        self.require(not self.actor.bypass_mode, "actor.bypass_mode", f"{stale}; set it to false")
        fix = f"{stale}; set it to token, which weights their tokens by how likely they are today"
        self.require(self.algorithm.rollout_correction.rollout_is == "token", ROLLOUT_IS, fix)
        with_step = f"remax compares with responses of this step, which {field} lets be older; choose another"
        self.require(self.algorithm.adv_estimator != "remax", "algorithm.adv_estimator", with_step)
        fix = f"the reward model is busy with the update while engines sample ({field}={staleness}); set acc or score"
        filtering = self.algorithm.filter_groups
        scores = filtering.enable and filtering.metric not in ("acc", "score") and self.uses_reward_model
        self.require(not (self.samples_ahead and scores), "algorithm.filter_groups.metric", fix)
        fix = "async_training.partial_rollout needs an engine that can be stopped; set rollout.name=vllm"
        self.require(self.rollout.name == "vllm", "rollout.name", fix)

    def _check_agents(self) -> None:
        """Check the options for agent sessions, whose histories share an advantage."""
        turns = self.rollout.multi_turn
        if not (turns.enable and turns.agent.enabled):
            return
        with_agents = "the histories of an agent's session share one advantage"
        one = not (self.uses_critic or self.needs_sum_pi_squared)
        self.require(one, "algorithm.adv_estimator", f"{with_agents}; set it to grpo")
        fix = f"{with_agents}; set it to false, or use actor.use_kl_loss"
        self.require(not self.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward", fix)
        self.require(not self.uses_teacher, "teacher.model.path", f"{with_agents}; leave out the teacher")
        measures = self.calculator.measured_by("rollout") or not self.calculator.enable
        self.require(measures, "calculator.source", "agents' sessions are measured by the engine; set it to rollout")

    def _check_rank_signal(self) -> None:
        manager, calculator = self.reward_manager, self.calculator
        if not manager.active:
            return
        fix = "rank shaping needs rank metrics; set calculator.enable=true, or reward_manager.add_reward=false and "
        self.require(calculator.enable, "calculator.enable", f"{fix}reward_manager.add_adv=false")
        available = [*calculator.metric_names, *map(name_of, calculator.token_metrics)]
        fix = (
            f"is not computed, but {available} are; extend calculator.metric_indices or "
            "calculator.metric_indices_add, or set calculator.compute_diff=true"
        )
        for name in manager.indicator_names:
            require(name in available, "reward_manager.indicator_names", name, fix)
        require(manager.guide in available, "reward_manager.guidance_metric", manager.guide, fix)

    def _check_teacher(self) -> None:
        """Check that the teacher's options are compatible with the other options and have an effect."""
        teacher, parallel = self.teacher, self.model.ulysses_sequence_parallel_size
        if not teacher.enabled:
            return
        fix = "a server reads at temperature 1; set it to 1, or let the workers hold the teacher (teacher.model.path)"
        self.require(not teacher.is_server or self.rollout.temperature == 1, "rollout.temperature", fix)
        alone = not teacher.use_task_rewards
        shaped = self.reward_manager.active
        fix = "rewards are just logged, but rank shaping scales their advantages; add reward_manager=unshaped"
        self.require(not (alone and shaped), "teacher.use_task_rewards", fix)
        chunks = self.model.logits_chunk_size > 0 or not teacher.is_exact
        fix = f"teacher.loss={teacher.loss} reads the output head in chunks; set it to 1024"
        self.require(chunks, "model.logits_chunk_size", fix)
        fix = "there is no moving average of adapters; set it to 1"
        field = "update_rate" if teacher.update_rate < 1 else "update_freq"
        self.require(not (teacher.is_average and self.model.trains_adapters), f"teacher.{field}", fix)
        exact_policy = teacher.is_policy and teacher.is_exact
        fix = "the policy is its own teacher in the update, which reads without dropout; set it to 0"
        drops = exact_policy and self.model.trains_adapters and self.model.lora.dropout > 0
        self.require(not drops, "model.lora.dropout", fix)
        same = teacher.is_server or teacher.model.ulysses_sequence_parallel_size == parallel
        fix = f"must be model.ulysses_sequence_parallel_size={parallel}, since both read the same responses together"
        self.require(same, "teacher.model.ulysses_sequence_parallel_size", fix)
        measures = self.calculator.enable or not teacher.rank_metrics
        self.require(measures, "teacher.rank_metrics", "needs calculator.enable=true; set that, or this to false")

    def _check_judge_ahead(self) -> None:
        """Check that a frozen judge, which shares the trainer's devices, can wait until an update ends."""
        fix = "sampling ahead needs verdicts while a frozen judge's devices update the models; serve the judge at "
        fix += "reward_score.judge.base_url, or set this to false"
        partial, filtering = self.async_training.partial_rollout, self.algorithm.filter_groups.enable
        self.require(not (self.samples_ahead and partial), "async_training.partial_rollout", fix)
        self.require(not (self.samples_ahead and filtering), "algorithm.filter_groups.enable", fix)
        parallel, workers = self.rollout.tensor_parallel_size, self.trainer.n_gpus_per_node
        check_divides("rollout.tensor_parallel_size", parallel, "trainer.n_gpus_per_node", workers)

    def _check_judge(self) -> None:
        """Check that the other options provide the responses and engines that the judge needs."""
        judge, turns = self.reward_score.judge, self.rollout.multi_turn
        if not judge.enable:
            return
        field = "reward_score.judge.model.path"
        fix = "the environment's rewards are the scores, so that nothing is judged; set it to add"
        self.require(not turns.replaces_verifiers, "rollout.multi_turn.reward", fix)
        fix = f"an engine with conversations answers no single prompts; name a frozen model as {field}"
        self.require(not (judge.is_policy and turns.enable), "rollout.multi_turn.enable", fix)
        if judge.is_frozen:
            self._check_judge_ahead()
        fix = "a frozen judge needs the memory of an engine that sleeps; set it to true"
        sleeps = self.rollout.free_cache_engine or self.rollout.has_pool
        self.require(not judge.is_frozen or sleeps, "rollout.free_cache_engine", fix)
        if not judge.pairs:
            return
        for option, n in {"rollout.n": self.rollout.n, "rollout.val_kwargs.n": self.rollout.val_kwargs.n}.items():
            fix = f"each response is compared with reward_score.judge.opponents={judge.opponents} others; set "
            fix += f"{option}>={judge.opponents + 1}, or lower opponents"
            self.require(n > judge.opponents or (option != "rollout.n" and not self.data.val_files), option, fix)
        fix = "reward_score.judge.pairs needs groups that are sampled in one step; set it to false"
        self.require(not self.async_training.partial_rollout, "async_training.partial_rollout", fix)
        fix = "reward_score.judge.pairs cannot score remax's single greedy response; choose another"
        self.require(self.algorithm.adv_estimator != "remax", "algorithm.adv_estimator", fix)
