"""The control of the study of rank shaping: each response is shaped by the metrics of a random one of its group.

Of n responses to a prompt, one in n keeps its own.
"""

import numpy as np
import torch

from verl.batch import RANK, Batch
from verl.method import Method


class Shuffled(Method):
    """Permutes the rank metrics of a step within each group, so that they no longer say which response they are of."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def learn_from(self, batch: Batch) -> Batch:
        """The responses of the step, all of them; the permutations follow from seed and step.

        Raises:
            ValueError: ranks are not measured while sampling.
        """
        if not batch.rank_metrics:
            raise ValueError("Shuffled needs ranks that are measured while sampling: calculator.source=rollout")
        shuffled = torch.from_numpy(np.random.default_rng([self.seed, self.step]).permutation(len(batch)))
        rows = torch.empty_like(batch.group)
        # The places by group: in their order, and shuffled.
        rows[batch.group.argsort(stable=True)] = shuffled[batch.group[shuffled].argsort(stable=True)]
        shuffled_columns = {name: getattr(batch, name)[rows] for name in batch.names if name.startswith(RANK)}
        return batch.columns(*batch.names).fill(**shuffled_columns, mean_states=batch.mean_states[rows])
