"""PCL (arXiv 2510.01135): a value model trained alongside the policy selects prompts of intermediate difficulty.

From k * m candidates, sample the m prompts with the smallest |V - 1/2|. After sampling, fit V to the prompts' accuracy
with one gradient step on the squared error. We assume that V is a logistic regression on ``num_features`` hashed tokens
and token pairs, which is cheaper but less accurate than the paper's language model.
"""

import math

import torch
from torch import Tensor

from verl.data.prompt_record import PromptRecord
from verl.method import StepOutcome
from verl.recipes.common import Saving


class PromptCurriculum(Saving):
    """Method that selects prompts by V and saves the weights of V in checkpoints."""

    saved = ("weights",)

    def __init__(self, candidates: int = 4, target: float = 0.5, lr: float = 2.0, num_features: int = 4096) -> None:
        """Configure V and k, the number of ``candidates`` per prompt."""
        self.candidates_per_prompt = candidates
        self.target = target
        self.lr = lr
        self.weights = torch.zeros(num_features + 1, dtype=torch.float64)
        """Weights of V, [num_features + 1]; the last entry is the bias."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose the prompts whose V is closest to the target; ties are broken in favor of earlier candidates."""
        return sorted(candidates, key=lambda record: abs(self.value(record) - self.target))[: self.num_prompts]

    def after_step(self, outcome: StepOutcome) -> None:
        """Take one gradient step on the mean of (V - accuracy)^2 over the step's prompts."""
        gradient = torch.zeros_like(self.weights)
        for record, accuracy in zip(outcome.records, outcome.accuracy, strict=True):
            value = self.value(record)
            gradient += 2 * (value - accuracy) * value * (1 - value) * self.features(record)
        self.weights -= self.lr * gradient / len(outcome.records)

    def value(self, record: PromptRecord) -> float:
        """Return the value V of a prompt, in (0, 1)."""
        return 1 / (1 + math.exp(-float(self.weights @ self.features(record))))

    def features(self, record: PromptRecord) -> Tensor:
        """Return unit-norm counts of hashed tokens and token pairs, and a constant 1: [num_features + 1] float64."""
        ids = record.input_ids
        size = len(self.weights) - 1
        buckets = [token % size for token in ids]
        buckets += [(first * 1000003 + second) % size for first, second in zip(ids, ids[1:], strict=False)]
        counts = torch.zeros(size + 1, dtype=torch.float64)
        counts.index_add_(0, torch.tensor(buckets), torch.ones(len(buckets), dtype=torch.float64))
        counts /= counts.norm()
        counts[-1] = 1.0
        return counts
