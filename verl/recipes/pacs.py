"""PACS (arXiv 2509.02522): couple actor and critic through supervised classification of responses.

The policy's log-probabilities predict whether a response is correct, with the verifier's verdict as the label.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.losses import LossInputs, policy_loss


@policy_loss(columns=("correct",), whole_groups=True)
def pacs_loss(inputs: LossInputs, beta: float = 1.0, balanced: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the binary cross-entropy of each response, [b], with A_i as the logit and correctness as the label.

    A_i is r_i minus the mean r_j over the other responses to the prompt, where r_i = beta sum_t (log pi(y_t) -
    log pi_old(y_t)). Groups exclude responses without trainable tokens. If a group has one response, A_i = r_i.

    Args:
        beta: Scale of r, greater than 0; 1 in the paper.
        balanced: Whether to weight each response by n / (2 n_c), where n_c of the prompt's n responses have the same
            label, so that both labels have equal total weight. The weight is 1 if all labels in the group are equal.
    """
    assert inputs.correct is not None, "pacs_loss declares the column"
    groups, mask = inputs.groups, inputs.response_mask
    learned, labels = mask.any(dim=1), inputs.correct.to(inputs.logprobs.dtype)
    rewards = beta * torch.where(mask, inputs.logprobs - inputs.old_logprobs, 0.0).sum(dim=1)

    def group_sum(values: Tensor) -> Tensor:
        """Return the sum of ``values`` over each response's group, [b]."""
        return values.new_zeros(len(values)).index_add(0, groups, torch.where(learned, values, 0.0))[groups]

    # 1. Compute logits relative to the other responses in the group.
    num = group_sum(torch.ones_like(rewards))
    logits = rewards - (group_sum(rewards) - rewards) / (num - 1).clamp(min=1)
    # 2. Compute weights that balance the two labels.
    weights = torch.ones_like(labels)
    if balanced:
        num_correct = group_sum(labels)
        same_label = torch.where(inputs.correct, num_correct, num - num_correct)
        weights = torch.where((num_correct > 0) & (num_correct < num), num / (2 * same_label).clamp(min=1), 1.0)
    losses = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="none")
    return losses, {"pacs_reward": rewards, "pacs_agrees": ((logits > 0) == inputs.correct).float()}
