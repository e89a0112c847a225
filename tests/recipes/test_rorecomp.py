"""RoRecomp's batches: which responses come first, and which wait."""

from dataclasses import replace

import torch

from tests.extending.test_recompose import sampled_of
from verl.data.replay import ReplayBuffer, Responses, StepBatch
from verl.recipes.rorecomp import ShortFirst, priority


def test_short_correct_and_long_incorrect_responses_come_first():
    lengths = torch.tensor([5, 3, 9, 4, 8, 6, 2, 7])
    correct = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1]).bool()
    groups = torch.tensor([1, 1, 1, 1, 1, 1, 2, 2])
    # Group 1: correct 3, 5, 9 with median 5; incorrect 4, 6, 8 with median 6. Group 2: of 2 and 7 only the shorter.
    assert priority(correct, lengths, groups).tolist() == [True, True, False, False, True, True, True, False]


def responses_of(first: float, step: int) -> Responses:
    """Two groups of two: lengths 1 to 4, the first three correct."""
    sampled = sampled_of([0, 1], [[1.0, 1.0], [1.0, 0.0]], first)
    rollout = sampled.rollout.replace(group_ids=(step << 32) + torch.tensor([0, 0, 1, 1]))
    records = [record for record in sampled.prompts.records for _ in range(2)]
    learned = torch.ones(4, dtype=torch.bool)
    return Responses(rollout, records, sampled.texts, sampled.pending.result(), torch.full((4,), step), learned)


def test_what_is_left_is_learned_from_later():
    recompose, buffer = ShortFirst(period=2), ReplayBuffer(8)
    batch = StepBatch(1, 10, responses_of(0.0, 1), buffer, 4)
    found = recompose.recompose(batch)
    # All four, for the statistics of their groups; the longer correct one of the first group waits.
    assert found.texts == ["text 0", "text 1", "text 2", "text 3"]
    assert found.learned.tolist() == [True, False, True, True] and len(buffer) == 4
    found = recompose.recompose(replace(batch, step=2, responses=responses_of(10.0, 2)))
    assert found.texts[4:] == ["text 0", "text 1", "text 2", "text 3"]
    assert found.learned.tolist() == [True, False, True, True, False, True, False, False]
    # What was learned from is gone; what this step left waits.
    assert buffer.responses.steps.tolist() == [2, 2, 2, 2]
