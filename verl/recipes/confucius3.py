"""Confucius3-Math (arXiv 2506.18330): targeted entropy, hardness weighting and recent sample recovery (section 6)."""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_means
from verl.algorithms.losses import LossInputs, policy_loss, ppo_clip_loss
from verl.batch import Batch
from verl.data.prompt_record import PromptRecord
from verl.method import ReplayBuffer
from verl.recipes.common import Saving


def hardness_weighted(batch: Batch, alpha: float = -0.256, constant: float = 1.256) -> Tensor:
    """Compute A = (R - mu) (alpha mu + constant), [B], where R is 1 if correct and -1 otherwise (eqs. 2 and 3).

    mu is the mean of R over the responses to the prompt; the weight decreases from 1.512 at mu = -1 to 1 at mu = 1.
    Penalties, reward shaping and reward models have no effect.
    """
    signs = 2 * batch.correct.double() - 1
    mean = group_means(signs, batch.group)
    return (signs - mean) * (alpha * mean + constant)


def side_of_target(mini_batch: LossInputs, target: float = 0.55, **_: float) -> dict[str, Tensor]:
    """Return ``side`` [B], the sign of the mini-batch's mean token entropy minus the target."""
    assert mini_batch.old_entropy is not None, "targeted_entropy_loss declares the column"
    entropy = mini_batch.old_entropy[mini_batch.response_mask]
    return {"side": (entropy.mean() - target).sign().expand(len(mini_batch.response_mask))}


@policy_loss(columns=("old_entropy",), statistics=("entropy",), prepare=side_of_target)
def targeted_entropy_loss(
    inputs: LossInputs, target: float = 0.55, coef: float = 0.001, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate per token plus ``coef |H - target|``, where H is the mean entropy in nats.

    We assume that the mini-batch's mean entropy before the step determines the sign of H - target. The sign therefore
    does not depend on micro-batches, workers, or earlier updates in the step. The loss omits the constant ``target``.

    Args:
        target: Target entropy in nats, 0.55 in the paper. Used by :func:`side_of_target`.
        coef: Weight of the entropy term, 0.001 in the paper.
        clip_low, clip_high: Bounds of the ratio, which is clipped to [1 - clip_low, 1 + clip_high].
    """
    mask, side = inputs.response_mask, inputs.prepared["side"][:, None]
    tokens = (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    losses, metrics = ppo_clip_loss(*tokens, mask, clip_low, clip_high)
    return torch.where(mask, losses + coef * side * inputs.entropy, 0.0), metrics


class Recovering(Saving):
    """Recent Sample Recovery (algorithm 1): carry surplus informative groups over to the next step's batch.

    As in the paper, the update treats surplus groups as samples of the current policy, without importance weights. We
    assume that each step samples one generation batch (``algorithm.filter_groups.max_num_gen_batches=1``) that is
    larger than the training batch. If this batch and the surplus do not fill a training batch, the step trains on fewer
    groups. The paper samples more instead. Checkpoints contain the surplus, which is at most two training batches.
    """

    saved = ("surplus",)

    def __init__(self) -> None:
        self.surplus = ReplayBuffer(2 * self.max_learned, self.prompts)
        self.informative: list[Batch] = []
        """Informative groups of the current step."""

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Collect the informative groups before the trainer drops the surplus, without resampling any prompt."""
        self.informative += [group for group in self.by_prompt(batch) if 0 < int(group.correct.sum()) < len(group)]
        return {}

    def learn_from(self, batch: Batch) -> Batch:
        """Return the surplus from earlier steps, followed by this step's groups, up to the size of a training batch."""
        if not (self.informative or len(self.surplus)):
            return batch
        # 1. Join the surplus and this step's groups.
        parts = [self.surplus.take(range(len(self.surplus)))] if len(self.surplus) else []
        for place, group in enumerate(self.informative):
            ids = torch.full((len(group),), (self.step << 32) + place)
            parts.append(group.fill(group=ids, step=torch.full((len(group),), self.step)))
        self.informative = []
        groups = Batch.join(parts)
        # 2. Learn from as many groups as fit into a training batch, and keep the remaining groups.
        learned, rest = groups[: self.max_learned], groups[self.max_learned :]
        if len(rest):
            self.surplus.add(rest)
        # Mark all groups as sampled in this step; otherwise, the ratio would be relative to an earlier policy.
        return learned.fill(step=torch.full((len(learned),), self.step))
