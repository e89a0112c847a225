"""The policy in training: log-probabilities and the clipped update."""

from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.losses import LOSS_AGGREGATIONS, POLICY_LOSSES, StepSize, rollout_weights
from verl.config.common import ModelConfig
from verl.config.ppo import ActorConfig
from verl.protocol import PolicyBatch, RolloutBatch
from verl.workers.forward import LogprobForward
from verl.workers.fsdp import load_sharded_model
from verl.workers.layout import trim_columns
from verl.workers.learner import Learner


class Policy:
    """A sharded causal language model that scores responses.

    Legend: B responses on this rank, R response columns.
    """

    def __init__(
        self, config: ModelConfig, mesh: DeviceMesh, micro_batch_size: int, temperature: float, trainable: bool
    ) -> None:
        self.model = load_sharded_model(config, mesh, trainable)
        self.forward = LogprobForward(self.model, config)
        self.device = mesh.device_type
        self.micro_batch_size = micro_batch_size
        self.temperature = temperature

    @torch.no_grad()
    def compute_logprobs(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, R] float32 of the responses, 0 on padding, on the CPU."""
        chunks = [self._score(micro) for micro in batch.split(self.micro_batch_size)]
        logprobs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return logprobs, entropy

    def _score(self, micro: RolloutBatch) -> tuple[Tensor, Tensor]:
        columns = trim_columns(micro.input_ids, micro.attention_mask, micro.response_mask)
        input_ids, attention_mask, response_mask = (t.to(self.device) for t in columns)
        num_response = response_mask.shape[1]
        scored = self.forward.logprobs(input_ids, attention_mask, response_mask, self.temperature)
        padded = torch.zeros(2, *micro.response_mask.shape)
        for target, values in zip(padded, scored, strict=True):
            target[:, :num_response] = values.cpu()
        return padded[0], padded[1]


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
        super().__init__(model, mesh, config.log_prob_micro_batch_size_per_gpu, temperature, trainable=True)
        self.config = config
        self.max_response_length = max_response_length
        self.learner = Learner(self.model, config.optim, total_steps, model.ulysses_sequence_parallel_size)

    def update(self, batch: PolicyBatch, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """One optimizer step on this rank's share of a mini-batch.

        Args:
            batch: this rank's responses.
            num_tokens: tokens in the response masks of the whole mini-batch, over all ranks. With ``num_sequences`` it
                is the one denominator of the loss, so that every token weighs the same however the mini-batch is split
                over ranks and micro-batches.
            num_sequences: responses of the whole mini-batch that have such tokens, over all ranks.

        Returns:
            Metrics of the whole mini-batch, the same on every rank.
        """
        size = StepSize(num_tokens, num_sequences, self.max_response_length)
        micros = batch.split(self.config.micro_batch_size_per_gpu)
        sums, state = self.learner.step(self._loss(micro, size) for micro in micros)
        means = {name: total / num_tokens for name, total in sums.items()}
        return {f"actor/{name}": value for name, value in (means | state).items()}

    def _loss(self, micro: PolicyBatch, size: StepSize) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the mini-batch's loss, and sums over its tokens for the log."""
        config = self.config
        columns = trim_columns(micro.input_ids, micro.attention_mask, micro.response_mask)
        input_ids, attention_mask, mask = (t.to(self.device) for t in columns)
        num_response = mask.shape[1]
        old, rollout, ref, advantages = (
            t[:, :num_response].to(self.device)
            for t in (micro.old_logprobs, micro.rollout_logprobs, micro.ref_logprobs, micro.advantages)
        )
        logprobs, entropy = self.forward.logprobs(
            input_ids, attention_mask, mask, self.temperature, differentiable_entropy=config.entropy_coeff > 0
        )
        policy_loss = POLICY_LOSSES[config.policy_loss]
        if config.clip_ratio_c is not None:
            policy_loss = partial(policy_loss, clip_ratio_c=config.clip_ratio_c)
        per_token, metrics = policy_loss(logprobs, old, advantages, mask, config.clip_ratio_low, config.clip_ratio_high)
        if config.tis_level != "none":
            weights, tis_metrics = rollout_weights(old, rollout, mask, config.tis_level, config.tis_cap)
            per_token, metrics = per_token * weights, metrics | tis_metrics
        del metrics["num_tokens"]
        metrics |= {"entropy": (entropy.detach() * mask).sum(), "pg_loss": (per_token * mask).sum()}
        if config.entropy_coeff:
            per_token = per_token - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = KL_ESTIMATORS[config.kl_loss_type](logprobs, ref)
            metrics["kl_loss"] = (kl * mask).sum()
            per_token = per_token + config.kl_loss_coef * kl
        return LOSS_AGGREGATIONS[config.loss_agg_mode](per_token, mask, size), metrics
