"""Trains the policy with per-token losses."""

from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.kl import kl_loss
from verl.algorithms.losses import LOSS_AGGREGATIONS, POLICY_LOSSES, BatchSize, response_mean
from verl.algorithms.rollout_correction import loss_weights, rollout_weights
from verl.batch import Batch
from verl.config.actor import ActorConfig
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.config.signal import RolloutCorrectionConfig
from verl.models.learner import Learner
from verl.models.micro_batches import MicroBatching, join_parts, rows_by_teacher
from verl.models.output_head import Scoring
from verl.models.policy import Policy, scoring_batches
from verl.utils.user_code import kl_estimator
from verl.workers.policy_loss import CustomLoss
from verl.workers.teacher import UpdateTeacher


class Actor(Policy):
    """Trainable policy with its optimizer."""

    def __init__(
        self,
        config: ActorConfig,
        correction: RolloutCorrectionConfig,
        model: ModelConfig,
        mesh: DeviceMesh,
        temperature: float,
        total_steps: int,
        max_response_length: int,
    ) -> None:
        super().__init__(model, mesh, scoring_batches(config, model), temperature, trainable=True)
        self.config, self.correction = config, correction
        rows, max_tokens = config.micro_batch_size_per_gpu, config.ppo_max_token_len_per_gpu
        self.micro_batches = MicroBatching.of(model, rows, max_tokens, config.use_dynamic_bsz, model.shares_prompts)
        self.max_response_length = max_response_length
        self.kl_type = kl_estimator(config.kl_loss_type, "actor.kl_loss_type", config.kl_loss_type_kwargs)
        self.loss = CustomLoss(config)
        self.teacher: UpdateTeacher | None = None
        """Teacher loss to add to the policy loss, or None."""
        vocabulary = self.model.config.get_text_config().vocab_size
        if self.loss.needs.top_k > vocabulary:
            raise ConfigError(
                f"{self.loss.where}: asks for top_k={self.loss.needs.top_k} of {vocabulary} tokens; lower it"
            )
        self.learner = Learner(
            self.model, config.optim, total_steps, model.fsdp.optimizer_offload, model.ulysses_sequence_parallel_size
        )

    def update(self, batch: Batch, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a mini-batch.

        Args:
            batch: This rank's responses with ``tokens``, ``learn_mask``, ``old_logprobs`` and ``advantages``. Options
                may also require ``rollout_logprobs``, ``ref_logprobs``, the teacher's columns and
                ``LossNeeds.batch_columns``.
            num_tokens: Number of learned tokens in the whole mini-batch, across all ranks. The loss is divided by this
                number or by ``num_sequences``, so that a token's weight does not depend on how the mini-batch is split
                across ranks and micro-batches.
            num_sequences: Number of responses with learned tokens in the whole mini-batch, across all ranks.

        Returns:
            Metrics of the whole mini-batch, identical on every rank.
        """
        return self._step(batch, self._cut(batch), num_tokens, num_sequences, None)

    def update_on_policy(self, batch: Batch, num_tokens: int, num_sequences: int) -> tuple[dict[str, float], Batch]:
        """Like :meth:`update`, but for a batch sampled from the current policy.

        The old log-probabilities are computed in the forward pass of the update, and ``old_logprobs`` is ignored.

        Returns:
            The metrics, and this rank's responses with ``logprobs`` and ``entropy`` from before the optimizer step.
        """
        cuts, scored = self._cut(batch), list[Batch]()
        metrics = self._step(batch, cuts, num_tokens, num_sequences, scored)
        return metrics, join_parts(scored, cuts, batch.width)

    def _cut(self, batch: Batch) -> list[Tensor]:
        """Return the row indices of each micro-batch, whose rows have the same teacher. Teachers follow one another."""
        units = batch.unit if self.loss.needs.whole_groups else None
        if "teacher" not in batch:
            return self.micro_batches.cut(batch, units)
        cuts = []
        for _, rows in rows_by_teacher(batch):
            of_teacher = None if units is None else units[rows]
            cuts += [rows[cut] for cut in self.micro_batches.cut(batch[rows], of_teacher)]
        return cuts

    def _step(
        self, batch: Batch, cuts: list[Tensor], num_tokens: int, num_sequences: int, scored: list[Batch] | None
    ) -> dict[str, float]:
        """Take one optimizer step. ``scored`` is passed to :meth:`_loss`."""
        size = BatchSize(num_tokens, num_sequences, self.max_response_length)
        with ExitStack() as stack:
            stack.enter_context(self.parameters.loaded())
            if self.teacher is not None:
                stack.callback(self.teacher.unload)
            sums, state = self.learner.step(cuts, lambda rows: self._loss(batch[rows], size, scored))
        means = {name: total / num_tokens for name, total in sums.items()}
        means["pg_loss"] = sums["pg_loss"] / size.divisor(self.config.loss_aggregation)
        return {f"actor/{name}": value for name, value in (means | state).items()}

    def _loss(
        self, micro: Batch, size: BatchSize, scored_before: list[Batch] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's contribution to the mini-batch loss, and metrics summed over its tokens.

        If ``scored_before`` is set, the current log-probabilities also serve as the old ones. A batch with the
        log-probabilities and entropies of all sampled tokens is appended to ``scored_before``.
        """
        config, needs, level = self.config, self.loss.needs, self.correction.rollout_is
        # 1. Score the responses. A custom loss and a sequence-level ratio need all tokens of the responses, even tokens
        # that have been masked out.
        of_responses = config.bypass_mode and level == "sequence"
        whole = scored_before is not None or self.loss.own is not None or of_responses
        micro = micro.trimmed()
        with_gradient = config.entropy_coeff > 0 or "entropy" in needs.statistics
        scoring = Scoring(self.temperature, with_gradient, self.loss.statistics, needs.top_k)
        teacher_loss, teacher = (None, None) if self.teacher is None else self.teacher.inputs(micro)
        scoring = scoring._replace(teacher_loss=teacher_loss)
        scored = self.forward.logprobs(micro, scoring, None if whole else micro.learn_mask, teacher=teacher)
        micro = micro.to(self.device)
        logprobs, entropy, mask = scored.padded("logprobs"), scored.padded("entropy"), micro.padded("learn_mask")
        if scored_before is not None:
            now = {"logprobs": scored.logprobs.detach(), "entropy": scored.entropy.detach()}
            scored_before.append(micro.columns().fill(**now))
            micro.fill(old_logprobs=now["logprobs"])
        # 2. Compute the loss of each token.
        old, advantages = micro.padded("old_logprobs"), micro.padded("advantages")
        if self.loss.own is None:
            policy_loss = POLICY_LOSSES[config.policy_loss]
            per_token, metrics = policy_loss(logprobs, old, advantages, mask, **config.loss_options)
        else:
            per_token, metrics = self.loss.losses(self.loss.inputs(micro, size, scored), self.loss.padding_rows(micro))
        # 3. Weight the loss to correct for the mismatch between policy and engine. With bypass_mode, the old
        # log-probabilities are the engine's.
        if level is not None:
            self.loss.check_per_token(per_token)
            pair = (logprobs.detach() if config.bypass_mode else old, micro.padded("rollout_logprobs"))
            bounds = self.correction.weight_bounds
            weights, sums = rollout_weights(*pair, mask, level, **bounds, sampled_mask=micro.policy_mask)
            per_token, metrics = per_token * loss_weights(config.policy_loss, weights, mask), metrics | sums
        metrics.pop("num_tokens", None)
        aggregate = LOSS_AGGREGATIONS[config.loss_aggregation]
        metrics["entropy_loss"] = (entropy.detach() * mask).sum()
        # 4. Sum the loss for logging. ``_step`` divides the total by the number of tokens or sequences.
        per_response: Tensor | float = 0.0
        if per_token.dim() == 1:
            per_response = response_mean(per_token, mask, size.num_sequences)
            metrics["pg_loss"] = per_response * size.divisor(config.loss_aggregation)
            per_token = torch.zeros_like(logprobs)
        else:
            metrics["pg_loss"] = aggregate(per_token, mask, size._replace(num_tokens=1, num_sequences=1))
        if self.teacher is not None and not self.teacher.options.use_task_rewards:
            per_token, per_response = torch.zeros_like(logprobs), 0.0
        # 5. Add entropy and KL divergence.
        if config.entropy_coeff:
            per_token = per_token - config.entropy_coeff * entropy
        if config.use_kl_loss:
            ref = micro.padded("ref_logprobs")
            kl = kl_loss(self.kl_type, logprobs, ref, old if config.use_unbiased_kl else None)
            metrics["kl_loss"] = torch.where(mask, kl, 0.0).sum()
            per_token = per_token + config.kl_loss_coef * kl
        # 6. Add the divergence from the teacher.
        if self.teacher is not None:
            of_teacher = self.teacher.losses(micro, scored, logprobs)
            metrics["teacher_loss"] = torch.where(mask, of_teacher.detach(), 0.0).sum()
            per_token = per_token + self.teacher.options.coef * of_teacher
        return aggregate(per_token, mask, size) + per_response, metrics
