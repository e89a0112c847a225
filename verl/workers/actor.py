"""The policy in training: the clipped update."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.kl import kl_loss
from verl.algorithms.losses import (
    LOSS_AGGREGATIONS,
    POLICY_LOSSES,
    StepSize,
    loss_weights,
    response_mean,
    rollout_weights,
)
from verl.config.actor import ActorConfig
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.learner import Learner
from verl.models.micro_batches import MicroBatching, restore_order
from verl.models.policy import Policy, full_width, scoring_batches
from verl.protocol import PolicyBatch, PolicyScores, RankMetrics
from verl.utils.user_code import kl_estimator
from verl.workers.policy_loss import PolicyLoss


class Actor(Policy):
    """The policy with its optimizer."""

    def __init__(
        self,
        config: ActorConfig,
        model: ModelConfig,
        mesh: DeviceMesh,
        temperature: float,
        total_steps: int,
        max_response_length: int,
    ) -> None:
        super().__init__(model, mesh, scoring_batches(config, model), temperature, trainable=True)
        self.config = config
        self.model_config = model
        self.max_response_length = max_response_length
        self.kl_type = kl_estimator(config.kl_loss_type, "actor.kl_loss_type", config.kl_loss_type_kwargs)
        self.loss = PolicyLoss(config)
        vocabulary = self.model.config.get_text_config().vocab_size
        if self.loss.needs.top_k > vocabulary:
            raise ConfigError(
                f"{self.loss.where}: asks for top_k={self.loss.needs.top_k} of {vocabulary} tokens; lower it"
            )
        self.learner = Learner(
            self.model, config.optim, total_steps, model.fsdp.optimizer_offload, model.ulysses_sequence_parallel_size
        )

    def update(self, batch: PolicyBatch, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """One optimizer step on this rank's share of a mini-batch.

        Args:
            batch: this rank's responses.
            num_tokens: tokens in the response masks of the whole mini-batch, over all ranks. It and ``num_sequences``
                are the denominators of the loss, so that every token weighs the same however the mini-batch is split
                over ranks and micro-batches.
            num_sequences: responses of the whole mini-batch that have such tokens, over all ranks.

        Returns:
            Metrics of the whole mini-batch, the same on every rank.
        """
        return self._step(batch, self._cut(batch), num_tokens, num_sequences, None)

    def update_on_policy(
        self, batch: PolicyBatch, num_tokens: int, num_sequences: int
    ) -> tuple[dict[str, float], PolicyScores]:
        """As :meth:`update`, of the policy that the batch was sampled from: the forward pass of the update is the one
        that the old log-probabilities come from, and ``batch.old_logprobs`` is not read.

        Returns:
            What :meth:`update` returns, and what the policy said of this rank's responses before the step.
        """
        cuts, scored = self._cut(batch), list[tuple[Tensor, Tensor]]()
        metrics = self._step(batch, cuts, num_tokens, num_sequences, scored)
        logprobs, entropy = (restore_order(parts, cuts) for parts in zip(*scored, strict=True))
        return metrics, PolicyScores(logprobs, entropy, RankMetrics.none(len(batch)), batch_size=[len(batch)])

    def _cut(self, batch: PolicyBatch) -> list[Tensor]:
        """The rows of each micro-batch."""
        config = self.config
        max_tokens = config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None
        units = self.loss.column(batch, "unit") if self.loss.needs.whole_groups else None
        return MicroBatching.of(self.model_config, config.micro_batch_size_per_gpu, max_tokens).cut(batch, units)

    def _step(
        self,
        batch: PolicyBatch,
        cuts: list[Tensor],
        num_tokens: int,
        num_sequences: int,
        scored: list[tuple[Tensor, Tensor]] | None,
    ) -> dict[str, float]:
        """One optimizer step; see :meth:`_loss` for ``scored``."""
        size = StepSize(num_tokens, num_sequences, self.max_response_length)
        sums, state = self.learner.step(cuts, lambda rows: self._loss(batch[rows], size, scored))
        means = {name: total / num_tokens for name, total in sums.items()}
        if self.config.loss_aggregation != "token-mean":
            means["pg_loss"] = sums["pg_loss"] / num_sequences
        return {f"actor/{name}": value for name, value in (means | state).items()}

    def _loss(
        self, micro: PolicyBatch, size: StepSize, scored: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the mini-batch's loss, and sums over its tokens for the log.

        With ``scored`` the old log-probabilities are those computed here; they and the entropies, [b, R] of all tokens
        that were sampled, are appended to it.
        """
        config = self.config
        input_ids, attention_mask, mask = self._columns(micro)
        num_response = mask.shape[1]
        # Some tokens of a response may have been rejected.
        sampled = attention_mask[:, -num_response:]
        old, rollout, ref, advantages = (
            t[:, :num_response].to(self.device)
            for t in (micro.old_logprobs, micro.rollout_logprobs, micro.ref_logprobs, micro.advantages)
        )
        # A loss of the user's own sees whole responses, and the ratio of a response is that of all it sampled.
        of_responses = config.bypass_mode and config.tis_level == "sequence"
        whole = scored is not None or self.loss.own is not None or of_responses
        wanted = sampled if whole else mask
        found = self.forward.logprobs(
            input_ids,
            attention_mask,
            wanted,
            self.temperature,
            differentiable_entropy=config.entropy_coeff > 0 or "entropy" in self.loss.needs.statistics,
            statistics=self.loss.statistics,
            top_k=self.loss.needs.top_k,
        )
        logprobs, entropy = found.logprobs, found.entropy
        if scored is not None:
            old = logprobs.detach()
            scored.append((full_width(old, micro), full_width(entropy.detach(), micro)))
        if self.loss.own is None:
            policy_loss = POLICY_LOSSES[config.policy_loss]
            per_token, metrics = policy_loss(logprobs, old, advantages, mask, **config.loss_options)
        else:
            columns = (old, rollout, ref, advantages)
            inputs = self.loss.inputs(micro, found, input_ids[:, -num_response:], columns, mask, sampled, size)
            per_token, metrics = self.loss.losses(inputs, self.loss.copied(micro))
        if config.tis_level != "none":
            self.loss.check_per_token(per_token)
            # The ratio of a response is that of all it sampled. With bypass_mode the old log-probabilities are the
            # engine's.
            trained = logprobs.detach() if config.bypass_mode else old
            weights, tis_metrics = rollout_weights(trained, rollout, mask, config.tis_level, config.tis_cap, sampled)
            per_token, metrics = per_token * loss_weights(config.policy_loss, weights, mask), metrics | tis_metrics
        metrics.pop("num_tokens", None)
        aggregate = LOSS_AGGREGATIONS[config.loss_aggregation]
        metrics["entropy_loss"] = (entropy.detach() * mask).sum()
        # The sum alone: ``update`` divides it by the count, once for all micro-batches.
        per_response: Tensor | float = 0.0
        if per_token.dim() == 1:
            per_response = response_mean(per_token, mask, size.num_sequences)
            divisor = size.num_tokens if config.loss_aggregation == "token-mean" else size.num_sequences
            metrics["pg_loss"] = per_response * divisor
            per_token = torch.zeros_like(logprobs)
        else:
            metrics["pg_loss"] = aggregate(per_token, mask, size._replace(num_tokens=1, num_sequences=1))
        if config.entropy_coeff:
            per_token = per_token - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = kl_loss(self.kl_type, logprobs, ref, old if config.use_unbiased_kl else None)
            metrics["kl_loss"] = torch.where(mask.bool(), kl, 0.0).sum()
            per_token = per_token + config.kl_loss_coef * kl
        return aggregate(per_token, mask, size) + per_response, metrics
