"""PCL (arXiv 2510.01135): a value function learned beside the policy picks prompts that it solves about half the time.

Of k m candidates the m with the smallest |V - 1/2| are sampled, and V is then fitted to the mean reward of each by one
step on the squared error. Assumed: V is not the paper's language model but a logistic function of the prompt's tokens
and pairs of tokens, hashed into ``num_features``; it costs nothing, and knows less.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.data.prompt_rows import PromptRecord
from verl.method import Method, StepOutcome


class PromptCurriculum(Method):
    """Selects prompts by a learned V, which checkpoints hold."""

    def __init__(self, candidates: int = 4, target: float = 0.5, lr: float = 2.0, num_features: int = 4096) -> None:
        """``candidates``: k."""
        self.candidates_per_prompt = candidates
        self.target = target
        self.lr = lr
        self.weights = torch.zeros(num_features + 1, dtype=torch.float64)
        """The last one is that of the constant."""

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose the prompts whose V is nearest to the target; of equal ones the first."""
        return sorted(candidates, key=lambda record: abs(self.value(record) - self.target))[: self.num_prompts]

    def after_step(self, outcome: StepOutcome) -> None:
        """One gradient step on the mean of (V - mean accuracy)^2 over the step's prompts."""
        gradient = torch.zeros_like(self.weights)
        for record, accuracy in zip(outcome.records, outcome.accuracy, strict=True):
            value = self.value(record)
            gradient += 2 * (value - accuracy) * value * (1 - value) * self.features(record)
        self.weights -= self.lr * gradient / len(outcome.records)

    def value(self, record: PromptRecord) -> float:
        """V of a prompt, in (0, 1)."""
        return 1 / (1 + math.exp(-float(self.weights @ self.features(record))))

    def features(self, record: PromptRecord) -> Tensor:
        """[F + 1] float64: counts of hashed tokens and pairs, of length 1 together, and the constant."""
        ids = record.input_ids
        size = len(self.weights) - 1
        places = [token % size for token in ids]
        places += [(first * 1000003 + second) % size for first, second in zip(ids, ids[1:], strict=False)]
        counts = torch.zeros(size + 1, dtype=torch.float64)
        counts.index_add_(0, torch.tensor(places), torch.ones(len(places), dtype=torch.float64))
        counts /= counts.norm()
        counts[-1] = 1.0
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.weights = state["weights"]
