"""Policy losses by name, the critic's loss, and the aggregation of per-token losses by name.

Common to all policy losses: B responses, R response columns, r = exp(logprobs - old_logprobs), and ``[B, R]`` each

- ``logprobs``, log-probabilities (nats) of the response tokens under the policy being trained;
- ``old_logprobs``, the same under the policy at the start of the step;
- ``advantages``, A;
- ``response_mask``, true or 1 on response tokens; padding may hold anything.

Each returns losses ``[B, R]``, 0 outside the mask, and detached metrics as sums over tokens, so that they can be added
over micro-batches and ranks: ``ppo_kl`` (k1 estimate old - new, Schulman 2020), ``num_tokens`` and, if it clips,
``pg_clipfrac`` (tokens on which clipping is active). Each raises ``ValueError`` for an option that is out of range.
"""

from collections.abc import Callable

from torch import Tensor

from verl.algorithms.losses.aggregate import response_mean, sequence_mean, sequence_sum, token_mean
from verl.algorithms.losses.cispo import cispo_loss
from verl.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss
from verl.algorithms.losses.gmpo import gmpo_loss
from verl.algorithms.losses.gpg import gpg_loss
from verl.algorithms.losses.gspo import gspo_loss
from verl.algorithms.losses.importance import loss_weights, mean_rollout_weight, rollout_weights
from verl.algorithms.losses.own import LossInputs, LossNeeds, OwnLoss, StepSize, policy_loss
from verl.algorithms.losses.ppo_clip import ppo_clip_loss
from verl.algorithms.losses.sapo import sapo_loss
from verl.algorithms.losses.value import value_loss

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "gmpo": gmpo_loss,
    "gpg": gpg_loss,
    "sapo": sapo_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
}
"""Name -> f(logprobs, old_logprobs, advantages, response_mask, **options) -> (losses [B, R], metrics).

The options of each, such as ``clip_low``, are those of ``ActorConfig.loss_options``.
"""

LOSS_AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, StepSize], Tensor]] = {
    "token-mean": lambda loss, mask, size: token_mean(loss, mask, size.num_tokens),
    "seq-mean-token-mean": lambda loss, mask, size: sequence_mean(loss, mask, size.num_sequences),
    "seq-mean-token-sum": lambda loss, mask, size: sequence_sum(loss, mask, size.num_sequences),
    "seq-mean-token-sum-norm": lambda loss, mask, size: sequence_sum(loss, mask, size.num_sequences, size.max_length),
}
"""Name -> f(per_token_loss [B, R], response_mask [B, R], step size) -> the micro-batch's part of the step's loss."""

__all__ = [
    "LOSS_AGGREGATIONS",
    "POLICY_LOSSES",
    "LossInputs",
    "LossNeeds",
    "OwnLoss",
    "StepSize",
    "cispo_loss",
    "clip_cov_loss",
    "gmpo_loss",
    "gpg_loss",
    "gspo_loss",
    "kl_cov_loss",
    "loss_weights",
    "mean_rollout_weight",
    "policy_loss",
    "ppo_clip_loss",
    "response_mean",
    "rollout_weights",
    "sapo_loss",
    "sequence_mean",
    "sequence_sum",
    "token_mean",
    "value_loss",
]
