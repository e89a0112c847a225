"""Policy losses and loss aggregations, selected by name, and the critic's loss."""

from collections.abc import Callable

from torch import Tensor

from verl.algorithms.losses.aggregate import response_mean, sequence_mean, sequence_sum, token_mean
from verl.algorithms.losses.custom import BatchSize, LossInputs, LossNeeds, policy_loss
from verl.algorithms.losses.per_token import (
    cispo_loss,
    clip_cov_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    gmpo_loss,
    gpg_loss,
    gspo_loss,
    kl_cov_loss,
    ppo_clip_loss,
    sapo_loss,
    value_loss,
)

POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "gmpo": gmpo_loss,
    "gpg": gpg_loss,
    "dro": dro_loss,
    "dppo_tv": dppo_tv_loss,
    "dppo_kl": dppo_kl_loss,
    "sapo": sapo_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
}
"""Maps each name to f(logprobs, old_logprobs, advantages, response_mask, **options) -> (losses [B, R], metrics).

The options, such as ``clip_low``, come from ``ActorConfig.loss_options``.
"""

LOSS_AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, BatchSize], Tensor]] = {
    "token-mean": lambda loss, mask, size: token_mean(loss, mask, size.num_tokens),
    "token-sum": lambda loss, mask, size: token_mean(loss, mask, 1),
    "seq-mean-token-mean": lambda loss, mask, size: sequence_mean(loss, mask, size.num_sequences),
    "seq-mean-token-sum": lambda loss, mask, size: sequence_sum(loss, mask, size.num_sequences),
    "seq-mean-token-sum-norm": lambda loss, mask, size: sequence_sum(loss, mask, size.num_sequences, size.max_length),
}
"""Maps each name to f(per_token_loss [B, R], response_mask [B, R], BatchSize) -> scalar loss of the micro-batch."""

__all__ = [
    "LOSS_AGGREGATIONS",
    "POLICY_LOSSES",
    "LossInputs",
    "LossNeeds",
    "BatchSize",
    "policy_loss",
    "ppo_clip_loss",
    "response_mean",
    "token_mean",
    "value_loss",
]
