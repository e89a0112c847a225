"""The policy in training: log-probabilities and the clipped update."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.losses import LOSS_AGGREGATIONS, POLICY_LOSSES, StepSize, rollout_weights
from verl.config.common import ModelConfig
from verl.config.ppo import ActorConfig
from verl.protocol import PolicyBatch, RolloutBatch
from verl.workers.forward import LogprobForward
from verl.workers.fsdp import load_sharded_model, offloaded_parameters
from verl.workers.layout import trim_columns
from verl.workers.learner import Learner
from verl.workers.micro_batches import MicroBatching, in_order

Reducer = Callable[[list[Tensor]], list[dict[str, Tensor]]]
"""Hidden states [T, L, D] of responses in, named tensors of each out."""


class Policy:
    """A sharded causal language model that scores responses, inside ``with policy.parameters.loaded():``.

    Legend: B responses on this rank, R response columns, T tokens of a response, L layers, D hidden width.
    """

    def __init__(
        self, config: ModelConfig, mesh: DeviceMesh, scoring: MicroBatching, temperature: float, trainable: bool
    ) -> None:
        """``scoring``: how large micro-batches are without a backward pass."""
        self.model = load_sharded_model(config, mesh, trainable)
        self.forward = LogprobForward(self.model, config, mesh.device_type)
        self.parameters = offloaded_parameters(self.model, config.fsdp.param_offload)
        self.device = mesh.device_type
        self.scoring = scoring
        self.temperature = temperature

    @torch.no_grad()
    def compute_logprobs(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, R] float32 of the responses, 0 on padding, on the CPU."""
        scored, cuts = [], self.scoring.cut(batch)
        for rows in cuts:
            micro = batch[rows]
            logprobs, entropy = self.forward.logprobs(*self._columns(micro), self.temperature)
            scored.append([_full_width(values, micro) for values in (logprobs, entropy)])
        logprobs, entropy = (in_order(parts, cuts) for parts in zip(*scored, strict=True))
        return logprobs, entropy

    @torch.no_grad()
    def compute_logprobs_and_metrics(
        self, batch: RolloutBatch, layers: Sequence[int], reduce: Reducer
    ) -> tuple[Tensor, Tensor, TensorDict, Tensor]:
        """As :meth:`compute_logprobs`, and what ``reduce`` makes of the states that the responses were sampled from.

        Args:
            layers: those to measure, see :func:`verl.workers.states.record_states`.
            reduce: states [T, L, D] of responses in, for each of them metrics [L] and ``mean_state`` [L, D] out.

        Returns:
            logprobs and entropy [B, R], metrics [B, L] by name, mean states [B, L, D], all on the CPU.
        """
        scored, measured, cuts = [], [], self.scoring.cut(batch)
        for rows in cuts:
            micro = batch[rows]
            logprobs, entropy, states = self.forward.logprobs_and_states(
                *self._columns(micro), self.temperature, layers
            )
            scored.append([_full_width(values, micro) for values in (logprobs, entropy)])
            measured += [{name: value.cpu() for name, value in row.items()} for row in reduce(states)]
        logprobs, entropy = (in_order(parts, cuts) for parts in zip(*scored, strict=True))
        stacked = {name: torch.stack([row[name] for row in measured]) for name in measured[0]}
        metrics = {name: in_order([values], [torch.cat(cuts)]) for name, values in stacked.items()}
        mean_states = metrics.pop("mean_state")
        return logprobs, entropy, TensorDict(metrics, batch_size=[len(batch)]), mean_states

    def _columns(self, micro: RolloutBatch | PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and attention mask [B, S] and response mask [B, R] on the device, as few columns as rows need."""
        columns = trim_columns(micro.input_ids, micro.attention_mask, micro.response_mask)
        input_ids, attention_mask, response_mask = (t.to(self.device) for t in columns)
        return input_ids, attention_mask, response_mask


def _full_width(values: Tensor, micro: RolloutBatch) -> Tensor:
    """[B, R] on the CPU, 0 in the columns that were cut."""
    return F.pad(values.cpu(), (0, micro.response_mask.shape[1] - values.shape[1]))


def scoring_batches(config: ActorConfig, model: ModelConfig) -> MicroBatching:
    """Micro-batches of policy and reference where only log-probabilities are needed."""
    max_tokens = config.log_prob_max_token_len_per_gpu if config.use_dynamic_bsz else None
    return MicroBatching.of(model, config.log_prob_micro_batch_size_per_gpu, max_tokens)


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
        self.learner = Learner(
            self.model, config.optim, total_steps, model.fsdp.optimizer_offload, model.ulysses_sequence_parallel_size
        )

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
        config = self.config
        max_tokens = config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None
        cuts = MicroBatching.of(self.model_config, config.micro_batch_size_per_gpu, max_tokens).cut(batch)
        sums, state = self.learner.step(self._loss(batch[rows], size) for rows in cuts)
        means = {name: total / num_tokens for name, total in sums.items()}
        return {f"actor/{name}": value for name, value in (means | state).items()}

    def _loss(self, micro: PolicyBatch, size: StepSize) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the mini-batch's loss, and sums over its tokens for the log."""
        config = self.config
        input_ids, attention_mask, mask = self._columns(micro)
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
