"""ROVER: the values of the uniformly random policy are enough to learn from (arXiv 2509.24981).

In a tree of tokens whose reward comes at the end, the action value Q of the policy that picks every token with equal
probability says where correct answers lie, and its Bellman equation has no maximum. The policy holds Q relative to the
policy before the update: Q(s, a) = rho (log pi(a | s) - log pi_old(a | s)).
"""

import torch
from torch import Tensor

from verl.algorithms.losses import LossInputs, policy_loss


@policy_loss(statistics=("mean_logprob",), old_statistics=("mean_logprob",))
def rover_loss(inputs: LossInputs, rho: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss (Q_t - (r + V_{t+1}))^2, the squared Bellman error; the target carries no gradient.

    Q_t = rho (log pi(y_t) - log pi_old(y_t)); V_{t+1} is the mean of Q over the whole vocabulary at the next token, 0
    behind the last; r is the advantage, the response's reward less the mean of its group, on every token.

    Args:
        inputs: see :class:`verl.algorithms.losses.LossInputs`.
        rho: scale of Q, above 0; 1 in the paper.
    """
    q_values = rho * (inputs.logprobs - inputs.old_logprobs)
    mean = rho * (inputs.statistics["mean_logprob"] - inputs.old_statistics["mean_logprob"]).detach()
    next_values = next_sampled(mean, inputs.sampled_mask)
    losses = (q_values - (inputs.advantages + next_values)).square()
    mask = inputs.response_mask
    return losses, {"rover_q": q_values.detach()[mask].sum(), "rover_next_value": next_values[mask].sum()}


def next_sampled(values: Tensor, mask: Tensor) -> Tensor:
    """[B, R], at each place the one of ``values`` at the next token of the ``mask`` [B, R] bool behind it; 0 without.

    Between the turns of a conversation the environment's tokens are passed over.
    """
    size = mask.shape[1]
    places = torch.where(mask, torch.arange(size, device=mask.device), size)
    behind = torch.nn.functional.pad(places[:, 1:], (0, 1), value=size).flip(1).cummin(1).values.flip(1)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, behind)
