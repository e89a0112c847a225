"""Confucius3-Math (arXiv 2506.18330): entropy near a target, weights for hard prompts, recovered surplus.

Sections 6.1, 6.2 and 6.3: the surplus of dynamic sampling enters the next step's batch.
"""

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_means
from verl.algorithms.losses import LossInputs, policy_loss, ppo_clip_loss
from verl.batch import Batch
from verl.data.prompt_rows import PromptRecord
from verl.method import Method, ReplayBuffer


def hardness_weighted(batch: Batch, alpha: float = -0.256, constant: float = 1.256) -> Tensor:
    """Return A = (R - mu) (alpha mu + constant), [B], with R = 1 if correct, else -1 (eqs. 2 and 3).

    mu is the mean of R over the prompt's responses, from -1, where the weight is 1.512, to 1, where it is 1. Penalties,
    changed rewards and a reward model have no effect.
    """
    signs = 2 * batch.correct.double() - 1
    mean = group_means(signs, batch.group)
    return (signs - mean) * (alpha * mean + constant)


def side_of_target(mini_batch: LossInputs, target: float = 0.55, **_: float) -> dict[str, Tensor]:
    """``side`` [B]: 1 if the mean entropy of the mini-batch's tokens is above the target, -1 below, 0 at it."""
    assert mini_batch.old_entropy is not None, "asked for below"
    entropy = mini_batch.old_entropy[mini_batch.response_mask]
    return {"side": (entropy.mean() - target).sign().expand(len(mini_batch.response_mask))}


@policy_loss(columns=("old_entropy",), statistics=("entropy",), prepare=side_of_target)
def targeted_entropy_loss(
    inputs: LossInputs, target: float = 0.55, coef: float = 0.001, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token clipped surrogate of PPO plus ``coef |H - target|``, H being the mean entropy in nats.

    Its gradient is that of H, or of -H where H is below the target. Assumed: the side is that of the mini-batch's mean
    entropy before the step, so that neither micro-batches nor workers change it, also in later updates of the step; the
    constant is left out.

    Args:
        inputs: see :class:`verl.algorithms.losses.LossInputs`.
        target: in nats; 0.55 in the paper. Read by :func:`side_of_target`.
        coef: 0.001 in the paper.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: and above at 1 + clip_high.
    """
    mask, side = inputs.response_mask, inputs.prepared["side"][:, None]
    given = (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    losses, metrics = ppo_clip_loss(*given, mask, clip_low, clip_high)
    return torch.where(mask, losses + coef * side * inputs.entropy, 0.0), metrics


class Recovering(Method):
    """Recent Sample Recovery (algorithm 1): informative groups beyond the batch open that of the next step.

    As in the paper, they are learned from as if the policy of that step had sampled them, without importance weights.
    Assumed: each step samples one generation batch (``algorithm.filter_groups.max_num_gen_batches=1``), larger than the
    training batch; where it and the surplus do not fill that, the step learns from fewer groups, and the paper samples
    more. At most two training batches are kept. Checkpoints hold them.
    """

    def __init__(self) -> None:
        self.surplus = ReplayBuffer(2 * self.max_learned, self.prompts)
        self.informative: list[Batch] = []
        """Groups of the step in progress."""

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Note the informative groups, before those that the batch has no room for are dropped."""
        self.informative += [group for group in self.by_prompt(batch) if 0 < int(group.correct.sum()) < len(group)]
        return {}

    def learn_from(self, batch: Batch) -> Batch:
        """Return the surplus of earlier steps, then this step's groups, as many as a step learns from."""
        if not (self.informative or len(self.surplus)):
            return batch
        parts = [self.surplus.take(range(len(self.surplus)))] if len(self.surplus) else []
        for place, group in enumerate(self.informative):
            ids = torch.full((len(group),), (self.step << 32) + place)
            parts.append(group.fill(group=ids, step=torch.full((len(group),), self.step)))
        self.informative = []
        groups = Batch.join(parts)
        learned, rest = groups[: self.max_learned], groups[self.max_learned :]
        if len(rest):
            self.surplus.add(rest)
        # Of this step, as the loss gives responses of earlier ones the ratio to the policy that sampled them.
        return learned.fill(step=torch.full((len(learned),), self.step))

    def state_dict(self) -> dict[str, Any]:
        """Return the surplus."""
        return {"surplus": self.surplus.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.surplus.load_state_dict(state["surplus"])
