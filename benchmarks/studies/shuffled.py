"""The control of the study of rank shaping: each response is shaped by the metrics of a random one of its group.

Of n responses to a prompt, one in n keeps its own.
"""

from dataclasses import replace

import numpy as np
import torch

from verl.data.replay import Responses, StepBatch


class Shuffled:
    """Permutes the rank metrics of a step within each group, so that they no longer say which response they are of."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def recompose(self, batch: StepBatch) -> Responses:
        """The responses of the step, all of them; the permutations follow from seed and step.

        Raises:
            ValueError: ranks are not measured while sampling.
        """
        responses = batch.responses
        rollout = responses.rollout
        if not rollout.rank_metrics.metric_names:
            raise ValueError("Shuffled needs ranks that are measured while sampling: calculator.source=rollout")
        drawn = np.random.default_rng([self.seed, batch.step]).permutation(len(responses))
        groups, shuffled = responses.group_ids, torch.from_numpy(drawn)
        taken = torch.empty_like(groups)
        # The places by group: in their order, and shuffled.
        taken[groups.argsort(stable=True)] = shuffled[groups[shuffled].argsort(stable=True)]
        return replace(responses, rollout=rollout.replace(rank_metrics=rollout.rank_metrics[taken]))
