"""PACS: learning from verdicts as supervised classification, which couples actor and critic (arXiv 2509.02522).

The policy's own log-probabilities say how it judges a response; the verifier's verdict is the label.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.losses import LossInputs, policy_loss


@policy_loss(columns=("correct",), whole_groups=True)
def pacs_loss(inputs: LossInputs, beta: float = 1.0, balanced: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Binary cross-entropy of each response [b]: its label is whether it is correct, its logit A_i.

    A_i = r_i - mean of r_j over the other responses to the prompt, r_i = beta sum_t (log pi(y_t) - log pi_old(y_t)).
    Responses without tokens to learn from are left out of their group; one that is alone has A_i = r_i.

    Args:
        inputs: see :class:`verl.algorithms.losses.LossInputs`.
        beta: scale of r, above 0; 1 in the paper.
        balanced: weight a response by n / (2 n_c), with n_c of the n responses to its prompt having its label, so that
            both labels weigh the same; 1 where all have one label.
    """
    assert inputs.correct is not None, "pacs_loss asks for the column"
    groups, mask = inputs.groups, inputs.response_mask
    learned, labels = mask.any(dim=1), inputs.correct.to(inputs.logprobs.dtype)
    rewards = beta * torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0).sum(dim=1)

    def of_group(values: Tensor) -> Tensor:
        """[b], the sum over the response's group."""
        return values.new_zeros(len(values)).index_add(0, groups, torch.where(learned, values, 0.0))[groups]

    num = of_group(torch.ones_like(rewards))
    logits = rewards - (of_group(rewards) - rewards) / (num - 1).clamp(min=1)
    weights = torch.ones_like(labels)
    if balanced:
        num_correct = of_group(labels)
        alike = torch.where(inputs.correct, num_correct, num - num_correct)
        weights = torch.where((num_correct > 0) & (num_correct < num), num / (2 * alike).clamp(min=1), 1.0)
    losses = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="none")
    return losses, {"pacs_reward": rewards, "pacs_agrees": ((logits > 0) == inputs.correct).float()}
