"""The training loop: PPO and its relatives with rank shaping (arXiv 2509.23808) over a group of hybrid workers.

Legend: B responses of a step, R response columns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.checkpoint.resume import Resumption, best_validation, saved_validations
from verl.checkpoint.saver import CheckpointSaver
from verl.config.ppo import PPOConfig
from verl.data.prompts import PromptSample
from verl.protocol import PolicyBatch, RolloutBatch, ValueBatch, layer_metrics
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.run.display import RunDisplay
from verl.run.tracking import Tracker
from verl.single_controller import WorkerGroup
from verl.single_controller.dispatch import run_rows, run_update
from verl.trainer.logging.rollout_metrics import (
    dataset_scalars,
    filtered_length_metrics,
    group_metrics,
    learning_metrics,
    length_metrics,
    logprob_agreement,
    rank_scalars,
    response_metrics,
)
from verl.trainer.logging.speed import FORWARD, UPDATE, UPDATE_LORA, ModelCost, StepMetrics, peak_tflops
from verl.trainer.logging.step_profiler import StepProfiler
from verl.trainer.logging.timing import PhaseTimer, Work
from verl.trainer.ppo.core_algos import (
    ADVANTAGE_ESTIMATORS,
    EstimatorOptions,
    gae_advantages,
    kl_controller,
    kl_penalised_rewards,
)
from verl.trainer.ppo.sampling import GREEDY, VALIDATION_STEP, Sampled, Sampler, generated, score_tensors
from verl.trainer.schedule import endless, is_due
from verl.trainer.validation import validate
from verl.utils.json_state import from_json, to_json

BEST_BY = "val/pass@1"
"""The validation metric of which the highest value makes a checkpoint the best."""


class Forwards(NamedTuple):
    """What the models say of a step's responses before the update."""

    logprobs: Tensor
    """[B, R], under the policy."""
    ref_logprobs: Tensor
    """[B, R], under the reference; the policy's own where no reference is held."""
    values: Tensor | None
    """[B, R], the critic's; None where there is no critic."""


class Signal(NamedTuple):
    """What the updates learn from."""

    mask: Tensor
    """[B, R] int64, 1 on the tokens that have a share in the losses."""
    advantages: Tensor
    """[B, R] float32, rank shaping included."""
    returns: Tensor | None
    """[B, R] float32, the critic's targets; None where there is no critic."""


class RayPPOTrainer:
    """Drives the workers through the steps of training; holds no tensor larger than a batch of tokens."""

    def __init__(
        self,
        config: PPOConfig,
        train_loader: StatefulDataLoader,
        val_batches: list[PromptSample],
        workers: WorkerGroup,
        sampler: Sampler,
        calculator: RepresentationMetricsCalculator | None,
        tracker: Tracker,
        display: RunDisplay,
    ) -> None:
        self.config = config
        self.loader = train_loader
        self.prompts = endless(train_loader)
        self.val_batches = val_batches
        self.workers = workers
        self.sampler = sampler
        self.calculator = calculator
        self.tracker = tracker
        self.display = display
        self.reward_manager = RewardManager(config.reward_manager)
        control = config.algorithm.kl_ctrl
        self.kl_control = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
        self.timer = PhaseTimer(display.phase, workers.take_peak_memory)
        self.step_metrics = _step_metrics(config, workers)
        trainer = config.trainer
        self.profiler = StepProfiler(workers, trainer.profile_steps, Path(trainer.default_local_dir), display.say)
        self.total_steps = config.trainer.num_steps(len(train_loader))
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.validations: dict[int, dict[str, float]] = {}
        trainer = config.trainer
        self.saver = CheckpointSaver(
            Path(trainer.default_local_dir),
            workers,
            trainer.async_save,
            trainer.save_hf_model,
            newest=trainer.max_ckpt_to_keep,
            always=trainer.except_save,
        )

    def fit(self) -> None:
        """Train from the step after the one reached, 0 at first, to the last."""
        trainer = self.config.trainer
        if self.val_batches and (trainer.val_only or (trainer.val_before_train and self.step == 0)):
            self._validate()
            self._log()
        if trainer.val_only:
            return
        for step in range(self.step + 1, self.total_steps + 1):
            self.step = step
            self.profiler.begin(step)
            sampled, left_out_scores, greedy = self._sample()
            forwards = self._forward(sampled.rollout)
            scores = self._collect_scores(sampled)
            signal = self._compute_advantages(sampled, greedy, scores, forwards)
            self._update_critic(sampled.rollout, forwards, signal)
            self._update_actor(sampled.rollout, forwards, signal)
            self._update_baselines(sampled.rollout, torch.cat([scores, left_out_scores]))
            self._sync_weights()
            self.profiler.end(step)
            if self._due(trainer.test_freq):
                self._validate()
            # Before the checkpoint: a run that goes on from it has the record of its step.
            self._log()
            if self._due(trainer.save_freq) or self.step in trainer.except_save:
                self._save()
            self.saver.poll()
        with self.timer.phase("save"):
            self.saver.finish()

    def restore(self, resumption: Resumption) -> None:
        """Go to where a checkpoint was written; the rollout engines get the policy's weights."""
        state = resumption.state
        self.workers.run("load", resumption.folder, resumption.step)
        self._sync_weights()
        self.step = resumption.step
        self.loader.load_state_dict(from_json(state["loader"]))
        self.reward_manager.load_state_dict(state["reward_manager"])
        self.kl_control.load_state_dict(state["kl_control"])
        self.validations = saved_validations(state)
        self.timer.totals.update(state["seconds_by_phase"])

    def _due(self, frequency: int) -> bool:
        return is_due(self.step, self.total_steps, frequency)

    def _sample(self) -> tuple[Sampled, Tensor, Sampled | None]:
        """The step's responses, the scores of others that were dropped, and the greedy responses for ReMax."""
        sampled, left_out_scores, metrics = self.sampler.sample_step(self.prompts, self.step, self.timer)
        greedy = None
        if self.config.algorithm.adv_estimator == "remax":
            with self.timer.phase("generate"):
                greedy = self.sampler.sample(sampled.prompts, GREEDY, self.step)
            self.timer.count("generate", generated(greedy.rollout))
        with self.timer.phase("generate"):
            self.workers.run("finish_generation")
        self.metrics |= metrics | length_metrics(sampled.rollout)
        return sampled, left_out_scores, greedy

    def _forward(self, rollout: RolloutBatch) -> Forwards:
        """Log-probabilities under policy and reference, and the critic's values."""
        batch = rollout.exclude("rank_metrics", "mean_states")
        work = Work.of(rollout.attention_mask.sum(dim=1))
        with self.timer.phase("logprobs"):
            logprobs, entropy = self._logprobs(rollout)
        self.timer.count("logprobs", work)
        mask = rollout.response_mask
        self.metrics |= logprob_agreement(rollout.rollout_logprobs, logprobs, mask)
        self.metrics["actor/rollout_entropy"] = (entropy.double().sum() / mask.sum()).item()
        ref_logprobs, values = logprobs, None
        if self.config.uses_reference:
            with self.timer.phase("reference"):
                ref_logprobs = self._policy_rows("compute_ref_logprobs", batch)
            self.timer.count("reference", work)
        if self.config.uses_critic:
            with self.timer.phase("values"):
                copies = self.config.critic.model.ulysses_sequence_parallel_size
                balance = self.config.critic.use_dynamic_bsz
                values = run_rows(self.workers, "compute_values", batch, copies=copies, balance=balance)
            self.timer.count("values", work)
        return Forwards(logprobs, ref_logprobs, values)

    def _logprobs(self, rollout: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, R] under the policy; with ``calculator.source=actor`` the rank metrics
        and mean states of ``rollout`` come from the same forward pass."""
        batch = rollout.exclude("rank_metrics", "mean_states")
        if not self._policy_measures:
            logprobs, entropy = self._policy_rows("compute_logprobs", batch)
            return logprobs, entropy
        logprobs, entropy, rollout.rank_metrics, rollout.mean_states = self._policy_rows(
            "compute_logprobs_and_metrics", batch
        )
        return logprobs, entropy

    def _policy_rows(self, method: str, batch: RolloutBatch) -> Any:
        """What policy or reference say of each response."""
        copies = self.config.model.ulysses_sequence_parallel_size
        return run_rows(self.workers, method, batch, copies=copies, balance=self.config.actor.use_dynamic_bsz)

    @property
    def _policy_measures(self) -> bool:
        return self.config.calculator.enable and self.config.calculator.source == "actor"

    def _collect_scores(self, sampled: Sampled) -> Tensor:
        """Wait for the verifiers; their scores [B]."""
        rollout = sampled.rollout
        with self.timer.phase("verify"):
            scores, correct, counts = score_tensors(sampled.pending)
        verdicts = {f"verifier/{reason}": float(count) for reason, count in counts.items()}
        # Where groups were filtered, the figures of all that was sampled are there already.
        self.metrics = group_metrics(scores, correct, rollout.group_ids) | verdicts | self.metrics
        with self.timer.phase("rank_metrics"):
            self.metrics |= rank_scalars(rollout, correct) | response_metrics(rollout, correct)
            self.metrics |= self._dataset_scalars(rollout, self.config.calculator.global_diff_stride_train)
        return scores

    def _dataset_scalars(self, rollout: RolloutBatch, diff_stride: int) -> dict[str, float]:
        return {} if self.calculator is None else dataset_scalars(rollout, self.calculator, diff_stride)

    def _compute_advantages(
        self, sampled: Sampled, greedy: Sampled | None, scores: Tensor, forwards: Forwards
    ) -> Signal:
        """From scores to what the updates learn from; ``scores`` [B] are the verifiers'."""
        rollout, algorithm = sampled.rollout, self.config.algorithm
        mask, learned_mask = rollout.response_mask, self._learned_mask(sampled)
        with self.timer.phase("reward"):
            rewards, metrics = self.sampler.rewards(sampled)
            greedy_scores = None if greedy is None else self._greedy_scores(greedy)
            self.metrics |= metrics
        with self.timer.phase("advantages"):
            token_scores = torch.zeros(mask.shape, dtype=torch.float64)
            token_scores[torch.arange(len(mask)), mask.sum(dim=1) - 1] = rewards
            shaping = None
            if self.config.reward_manager.active:
                shaping = self.reward_manager.shape(token_scores, mask, layer_metrics(rollout.rank_metrics))
                token_scores = shaping.token_rewards
                self.metrics |= shaping.metrics
            token_rewards = token_scores
            if algorithm.use_kl_in_reward:
                token_rewards = self._penalise(token_scores, forwards, mask)
            options = EstimatorOptions(
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                learned_mask=learned_mask,
                values=forwards.values,
                greedy_scores=greedy_scores,
            )
            unshaped = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator](token_rewards, mask, rollout.group_ids, options)
            advantages, returns = unshaped, None
            if shaping is not None:
                advantages, metrics = self.reward_manager.shape_advantages(unshaped, mask, shaping.phi)
                self.metrics |= metrics
            if forwards.values is not None:
                _, returns = gae_advantages(token_rewards, forwards.values, mask, algorithm.gamma, algorithm.lam)
                returns = returns.float()
        self.metrics |= learning_metrics(
            scores, token_scores, token_rewards, unshaped, advantages, returns, forwards.values, learned_mask
        )
        return Signal(learned_mask, advantages.float(), returns)

    def _greedy_scores(self, greedy: Sampled) -> Tensor:
        """What the greedy response to each response's prompt earns, [B]."""
        rewards, _ = self.sampler.rewards(greedy)
        self.metrics["train/greedy_score/mean"] = rewards.mean().item()
        return rewards.repeat_interleave(self.config.rollout.n)

    def _penalise(self, token_rewards: Tensor, forwards: Forwards, mask: Tensor) -> Tensor:
        """Token rewards less the weighted KL divergence; the weight is then adapted to the divergence found."""
        control = self.kl_control
        rewards, mean_kl = kl_penalised_rewards(
            token_rewards,
            forwards.logprobs,
            forwards.ref_logprobs,
            mask,
            control.coef,
            self.config.algorithm.kl_penalty,
        )
        self.metrics |= {"actor/reward_kl_penalty": mean_kl.item(), "actor/reward_kl_penalty_coeff": control.coef}
        control.update(mean_kl.item(), len(mask))
        return rewards

    def _learned_mask(self, sampled: Sampled) -> Tensor:
        """[B, R] int64, the tokens that have a share in the losses."""
        learned = sampled.learned
        if self.config.trainer.remove_clip:
            learned = learned & ~sampled.rollout.truncated
        return sampled.rollout.response_mask * learned.long()[:, None]

    def _update_critic(self, rollout: RolloutBatch, forwards: Forwards, signal: Signal) -> None:
        """Optimizer steps of the critic on consecutive mini-batches."""
        if forwards.values is None or signal.returns is None:
            return
        config = self.config.critic
        batch = ValueBatch(
            rollout.input_ids,
            rollout.attention_mask,
            signal.mask,
            forwards.values,
            signal.returns,
            batch_size=[len(rollout)],
        )
        with self.timer.phase("update_critic"):
            self._update(
                "update_critic",
                batch,
                config.ppo_mini_batch_size,
                config.ppo_epochs,
                lambda mini, num_tokens, _: run_update(
                    self.workers,
                    "update_critic",
                    mini,
                    num_tokens,
                    copies=config.model.ulysses_sequence_parallel_size,
                    balance=config.use_dynamic_bsz,
                ),
            )

    def _update_actor(self, rollout: RolloutBatch, forwards: Forwards, signal: Signal) -> None:
        """Optimizer steps of the policy on consecutive mini-batches, once the critic is warm."""
        if self.step <= self.config.trainer.critic_warmup:
            return
        config = self.config.actor
        batch = PolicyBatch(
            rollout.input_ids,
            rollout.attention_mask,
            signal.mask,
            forwards.logprobs,
            rollout.rollout_logprobs,
            forwards.ref_logprobs,
            signal.advantages,
            batch_size=[len(rollout)],
        )
        self.metrics |= filtered_length_metrics(signal.mask, self.config.data.max_response_length)
        with self.timer.phase("update"):
            self._update(
                "update",
                batch,
                config.ppo_mini_batch_size,
                config.ppo_epochs,
                lambda mini, num_tokens, num_sequences: run_update(
                    self.workers,
                    "update_actor",
                    mini,
                    num_tokens,
                    num_sequences,
                    copies=self.config.model.ulysses_sequence_parallel_size,
                    balance=config.use_dynamic_bsz,
                ),
            )

    def _update(
        self,
        phase: str,
        batch: Any,
        mini_batch_size: int,
        epochs: int,
        update: Callable[[Any, int, int], dict[str, float]],
    ) -> None:
        """Go through ``batch`` in mini-batches of so many prompts; logs the mean of the metrics of their updates.

        A mini-batch without any token to learn from is left out.
        """
        updates = []
        for _ in range(epochs):
            for mini in batch.split(mini_batch_size * self.config.rollout.n):
                num_tokens, num_sequences = int(mini.response_mask.sum()), int(mini.response_mask.any(dim=1).sum())
                if num_tokens:
                    updates.append(update(mini, num_tokens, num_sequences))
                    self.timer.count(phase, Work.of(mini.attention_mask.sum(dim=1)))
        if updates:
            self.metrics |= {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}

    def _update_baselines(self, rollout: RolloutBatch, scores: Tensor) -> None:
        if self.config.reward_manager.active:
            self.reward_manager.update(scores, layer_metrics(rollout.rank_metrics))
            self.metrics |= self.reward_manager.baseline_metrics()

    def _sync_weights(self) -> None:
        with self.timer.phase("sync"):
            self.workers.run("sync_weights")

    def _validate(self) -> None:
        if not self.val_batches:
            return
        auxiliary = self._auxiliary_rewards if self.config.reward_manager.add_reward else None
        with self.timer.phase("validate"):
            metrics = validate(
                self.val_batches,
                self._generate_for_validation,
                lambda prompts, rollout: score_tensors(self.sampler.judge(prompts, rollout)),
                lambda rollout: self._dataset_scalars(rollout, self.config.calculator.global_diff_stride_val),
                auxiliary,
            )
        self.metrics |= metrics
        self.validations[self.step] = metrics

    def _generate_for_validation(self, prompts: PromptSample) -> RolloutBatch:
        """Responses with their rank metrics."""
        rollout = self.sampler.generate(prompts, self.config.rollout.val_kwargs, VALIDATION_STEP)
        if self._policy_measures:
            # As in training, the engine makes room for the policy; further batches wake it.
            self.workers.run("finish_generation")
            self._logprobs(rollout)
        return rollout

    def _auxiliary_rewards(self, rollout: RolloutBatch) -> Tensor:
        """Phi [B], measured against training's baselines."""
        mask = rollout.response_mask
        return self.reward_manager.shape(torch.zeros(mask.shape), mask, layer_metrics(rollout.rank_metrics)).phi

    def _save(self) -> None:
        scores = {step: metrics[BEST_BY] for step, metrics in self.validations.items()}
        with self.timer.phase("save"):
            self.saver.save(self.step, self._state(), scores)

    def _state(self) -> dict[str, Any]:
        """What the trainer itself knows, as JSON holds it; see :meth:`restore`."""
        return {
            "job": "ppo",
            "step": self.step,
            "num_examples": len(self.loader.dataset),
            "shuffle": self.config.data.shuffle,
            # Not to be derived from the step: dynamic sampling draws as many batches as it needs.
            "loader": to_json(self.loader.state_dict()),
            "reward_manager": self.reward_manager.state_dict(),
            "kl_control": self.kl_control.state_dict(),
            "best": best_validation(self.validations, BEST_BY),
            "validations": self.validations,
            "seconds_by_phase": self.timer.totals,
        }

    def _log(self) -> None:
        """Hand the step's metrics to the trackers and the display."""
        record = self.timer.take_step()
        timing = self.step_metrics(record)
        if "generate" in record.work:
            timing["perf/generated_tokens"] = record.work["generate"].tokens
        self.tracker.log(self.step, self.metrics | timing)
        self.display.step(self.step, self.metrics | timing)
        self.metrics = {}


def _step_metrics(config: PPOConfig, workers: WorkerGroup) -> StepMetrics:
    """How the speed of this run's phases is counted."""
    policy = ModelCost.of(config.model)
    update = UPDATE_LORA if config.model.lora.rank else UPDATE
    passes = {name: (policy, FORWARD) for name in ("generate", "logprobs", "reference")} | {"update": (policy, update)}
    if config.uses_critic:
        model = config.critic.model
        critic = ModelCost.of(model).without_head(model)
        passes["values"] = (critic, FORWARD)
        passes["update_critic"] = (critic, UPDATE_LORA if model.lora.rank else UPDATE)
    peak = peak_tflops(config.trainer.peak_tflops, workers.device_name, config.model.param_dtype)
    return StepMetrics(workers.world_size, "logprobs", passes, peak)
