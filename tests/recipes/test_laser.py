"""Rewards for short correct responses (arXiv 2505.15612)."""

import pytest

from verl.recipes.laser import LaserD, band_of, laser, target_length
from verl.utils.json_state import from_json, to_json

from .step_inputs import reward_inputs


def test_laser_literals():
    inputs = reward_inputs([1, 1, 0, 0], lengths=[8, 9, 2, 12])
    assert laser(inputs, target_share=0.5).tolist() == [1.5, 1.0, -0.5, -0.5]


def test_bands():
    assert [band_of(share) for share in (0, 1 / 3, 0.4, 2 / 3, 0.7, 1)] == [
        *("hard", "hard", "medium", "medium", "easy", "easy"),
    ]


@pytest.mark.parametrize(
    ("lengths", "expected_of", "target"),
    [
        ([3, 5, 7, 9, 11], 5, 3),  # one of five is complete at 3 tokens
        ([3, 5, 7, 9, 11], 2, 7),  # three of five at 7, half or more
        ([3, 5, 7, 9, 11], 1, 11),
        ([1, 1], 5, 2),  # the grid begins at an eighth of 16
        ([], 1, None),
    ],
)
def test_targets(lengths, expected_of, target):
    assert target_length(lengths, expected_of, longest=16) == target


def test_laser_d_follows_its_bands_and_resumes():
    def inputs(step):
        # An easy prompt, 3 of 4 right, and a hard one, 1 of 4.
        return reward_inputs(
            [1, 1, 1, 0, 1, 0, 0, 0], [4, 6, 8, 10, 9, 12, 14, 16], groups=[5, 5, 5, 5, 2, 2, 2, 2], step=step
        )

    transform = LaserD(every=2)
    first = [1.5, 1.5, 1.5, -0.5, 1.5, -0.5, -0.5, -0.5]
    assert transform(inputs(1)).tolist() == first  # until then the target is the maximal length
    resumed = LaserD(every=2)
    resumed.load_state_dict(from_json(to_json(transform.state_dict())))
    for one in (transform, resumed):
        assert one(inputs(2)).tolist() == first
        assert one.targets == {"easy": 4, "hard": 16}
        assert one(inputs(3)).tolist() == [1.5, 1.0, 1.0, -0.5, 1.5, -0.5, -0.5, -0.5]
