"""ROVER (arXiv 2509.24981): learn from the action values of the uniformly random policy.

In a token tree with rewards at its leaves, the action values Q of the uniformly random policy reveal which branches
lead to correct answers. The Bellman equation of Q has no maximum. Q is represented by the log-ratio of the policy to
the policy before the update: Q(s, a) = rho (log pi(a | s) - log pi_old(a | s)).
"""

import torch
from torch import Tensor

from verl.algorithms.losses import LossInputs, policy_loss


@policy_loss(statistics=("mean_logprob",), old_statistics=("mean_logprob",))
def rover_loss(inputs: LossInputs, rho: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the squared Bellman error (Q_t - (r + V_{t+1}))^2 per token, without gradients through the target.

    Q_t is rho (log pi(y_t) - log pi_old(y_t)). V_{t+1} is the mean of Q over the vocabulary at the next token, or 0
    after the last token. The advantage r of all tokens is the response's reward minus its group's mean reward.

    Args:
        rho: Scale of Q, greater than 0; 1 in the paper.
    """
    q_values = rho * (inputs.logprobs - inputs.old_logprobs)
    mean = rho * (inputs.statistics["mean_logprob"] - inputs.old_statistics["mean_logprob"]).detach()
    next_values = next_sampled(mean, inputs.sampled_mask)
    losses = (q_values - (inputs.advantages + next_values)).square()
    mask = inputs.response_mask
    return losses, {"rover_q": q_values.detach()[mask].sum(), "rover_next_value": next_values[mask].sum()}


def next_sampled(values: Tensor, mask: Tensor) -> Tensor:
    """Return the ``values`` [B, R] at the first token after each position that is in ``mask`` [B, R], or 0 if none is.

    Environment tokens between the turns of a conversation are skipped.
    """
    size = mask.shape[1]
    positions = torch.where(mask, torch.arange(size, device=mask.device), size)
    following = torch.nn.functional.pad(positions[:, 1:], (0, 1), value=size).flip(1).cummin(1).values.flip(1)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, following)
