"""Rubric anchors (arXiv 2508.12790): combine the scores of several rubrics into one reward.

The paper scores a response by K rubrics with weights w_k and mentions four ways to combine scores in addition to the
weighted mean. We could not read their formulas, so we assume the simplest formula for each:

- saturation: the part of a score above its knee t is halved, s <- min(s, t) + max(0, s - t) / 2;
- interaction: each pair of rubrics adds v s_i s_j, which rewards satisfying both;
- veto: a rubric score below its limit makes the reward 0;
- targeted shaping: the result R in [0, 1] is mapped to R^p with p > 1, which spreads good responses apart.

    reward = (0 if vetoed else ((sum_k w_k s_k + sum_ij v_ij s_i s_j) / (sum_k w_k + sum_ij v_ij)))^p

Scores are in [0, 1]. Every verifier provides ``correct``, ``boxed`` and ``finished`` (not truncated). Functions in
``reward_score.custom_functions`` can return additional scores, such as those of an LLM judge.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.method import Method

FIELD = "trainer.method_kwargs"


class Rubrics(Method):
    """Method that combines rubric scores.

    Args:
        weights: Weight w of each rubric.
        knees: Knee t of each rubric; defaults to 1.
        vetoes: Minimum score of each rubric with a veto; below it, the reward is 0.
        pairs: Interactions as a list of ``[first, second, v]``.
        power: Exponent p, at least 1.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        knees: Mapping[str, float],
        vetoes: Mapping[str, float],
        pairs: Sequence[tuple[str, str, float]],
        power: float,
    ) -> None:
        self.weights, self.knees, self.vetoes, self.power = weights, knees, vetoes, power
        self.pairs = [(first, second, v) for first, second, v in pairs]
        total = sum(weights.values()) + sum(v for _, _, v in self.pairs)
        values = [*weights.values(), *(v for _, _, v in self.pairs)]
        if not total > 0 or min(values) < 0 or power < 1:
            raise ConfigError(f"{FIELD}: weights and pairs must be at least 0 and not all 0, and power at least 1")
        self.total = total

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the combined rewards, [B]."""
        pairs = [name for first, second, _ in self.pairs for name in (first, second)]
        scores = {name: rubric_scores(batch, name) for name in dict.fromkeys([*self.weights, *self.vetoes, *pairs])}
        # 1. Apply saturation.
        damped = {name: saturated(values, self.knees.get(name, 1.0)) for name, values in scores.items()}
        # 2. Sum the weighted scores and interactions.
        reward = sum((w * damped[name] for name, w in self.weights.items()), torch.zeros_like(rewards))
        for first, second, v in self.pairs:
            reward = reward + v * damped[first] * damped[second]
        # 3. Normalize, then apply targeted shaping and vetoes.
        reward = (reward / self.total).clamp(min=0) ** self.power
        for name, limit in self.vetoes.items():
            reward = torch.where(scores[name] < limit, 0.0, reward)
        return reward


def saturated(scores: Tensor, knee: float) -> Tensor:
    """Return ``scores [B]`` with the part above ``knee`` halved."""
    return scores.clamp(max=knee) + (scores - knee).clamp(min=0) / 2


def rubric_scores(batch: Batch, name: str) -> Tensor:
    """Return the score of each response for the rubric ``name``, [B] float64."""
    if name == "correct":
        return batch.correct.double()
    if name == "finished":
        return (~batch.truncated).double()
    if name == "boxed":
        return torch.tensor([float(verdict.boxed) for verdict in batch.verdicts], dtype=torch.float64)
    values = [verdict.extras.get(name) for verdict in batch.verdicts]
    for row, value in enumerate(values):
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(
                f"{FIELD}: the verifier of {batch.records[row].data_source!r} gives {name}={value!r}; a rubric is "
                "correct, boxed, finished, or a number from 0 to 1 that a custom function returns under this name"
            )
    return torch.tensor(values, dtype=torch.float64)
