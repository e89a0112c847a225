"""The control of the study of rank shaping: every response is shaped by the metrics of another one."""

from dataclasses import replace

import torch

from verl.data.replay import Responses, StepBatch


class Shuffled:
    """Permutes the rank metrics among the responses of a step: same values, same signal's size, wrong responses."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def recompose(self, batch: StepBatch) -> Responses:
        """The responses of the step, all of them, with permuted metrics; the permutation follows from seed and step."""
        responses = batch.responses
        generator = torch.Generator().manual_seed((self.seed << 32) + batch.step)
        order = torch.randperm(len(responses), generator=generator)
        rollout = responses.rollout
        return replace(responses, rollout=rollout.replace(rank_metrics=rollout.rank_metrics[order]))
