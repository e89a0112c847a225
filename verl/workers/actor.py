"""The policy in training: log-probabilities and the clipped update."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.losses import POLICY_LOSSES, token_mean
from verl.config.common import ModelConfig
from verl.config.ppo import ActorConfig
from verl.protocol import PolicyBatch, RolloutBatch
from verl.workers.forward import token_logprobs, trim_columns
from verl.workers.fsdp import clip_gradients, load_sharded_model, make_optimizer


class Policy:
    """A sharded causal language model that scores responses.

    Legend: B responses on this rank, R response columns.
    """

    def __init__(
        self, config: ModelConfig, mesh: DeviceMesh, micro_batch_size: int, temperature: float, trainable: bool
    ) -> None:
        self.model = load_sharded_model(config, mesh, trainable)
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
        scored = token_logprobs(self.model, input_ids, attention_mask, num_response, self.temperature)
        padded = torch.zeros(2, *micro.response_mask.shape)
        for target, values in zip(padded, scored, strict=True):
            target[:, :num_response] = (values * response_mask).cpu()
        return padded[0], padded[1]


class Actor(Policy):
    """The policy with its optimizer."""

    def __init__(
        self, config: ActorConfig, model: ModelConfig, mesh: DeviceMesh, temperature: float, total_steps: int
    ) -> None:
        super().__init__(model, mesh, config.micro_batch_size_per_gpu, temperature, trainable=True)
        self.config = config
        self.optimizer, self.scheduler = make_optimizer(self.model, config.optim, total_steps)

    def update(self, batch: PolicyBatch, num_tokens: int) -> dict[str, float]:
        """One optimizer step on this rank's share of a mini-batch.

        Args:
            batch: this rank's responses.
            num_tokens: response tokens of the whole mini-batch, over all ranks. It is the one denominator of the loss,
                so that every token weighs the same however the mini-batch is split over ranks and micro-batches.

        Returns:
            Metrics of the whole mini-batch, the same on every rank.
        """
        self.optimizer.zero_grad()
        totals: dict[str, Tensor] = {}
        for micro in batch.split(self.micro_batch_size):
            loss, metrics = self._loss(micro, num_tokens)
            # FSDP averages gradients over ranks, while the losses of the ranks add up to the mini-batch's loss.
            (loss * dist.get_world_size()).backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().double().cpu()
        grad_norm = clip_gradients(self.model, self.config.optim.grad_clip)
        self.optimizer.step()
        learning_rate = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        summed = torch.stack(list(totals.values()))
        dist.all_reduce(summed)
        means = dict(zip(totals, (summed / num_tokens).tolist(), strict=True))
        return {f"actor/{k}": v for k, v in means.items()} | {"actor/grad_norm": grad_norm, "actor/lr": learning_rate}

    def _loss(self, micro: PolicyBatch, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the mini-batch's loss, and sums over its tokens for the log."""
        columns = trim_columns(micro.input_ids, micro.attention_mask, micro.response_mask)
        input_ids, attention_mask, mask = (t.to(self.device) for t in columns)
        num_response = mask.shape[1]
        old, ref, advantages = (
            t[:, :num_response].to(self.device) for t in (micro.old_logprobs, micro.ref_logprobs, micro.advantages)
        )
        logprobs, entropy = token_logprobs(self.model, input_ids, attention_mask, num_response, self.temperature)
        per_token, metrics = POLICY_LOSSES[self.config.policy_loss](
            logprobs, old, advantages, mask, self.config.clip_ratio_low, self.config.clip_ratio_high
        )
        del metrics["num_tokens"]
        metrics |= {"entropy": (entropy * mask).sum(), "pg_loss": (per_token * mask).sum()}
        if self.config.use_kl_loss:
            kl = KL_ESTIMATORS[self.config.kl_loss_type](logprobs, ref)
            metrics["kl_loss"] = (kl * mask).sum()
            per_token = per_token + self.config.kl_loss_coef * kl
        return token_mean(per_token, mask, num_tokens), metrics
