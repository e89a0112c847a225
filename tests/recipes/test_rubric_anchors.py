"""One reward of several rubrics (arXiv 2508.12790)."""

import pytest

from verl.config import ConfigError
from verl.recipes.rubric_anchors import Rubrics

from .step_inputs import reward_inputs

PLAIN = {"knees": {}, "vetoes": {}, "pairs": [], "power": 1.0}
EXTRAS = [{"style": 1.0, "care": 0.5}, {"style": 0.5, "care": 0.0}, {"style": 0.0, "care": 1.0}]


def test_a_weighted_mean():
    rubrics = Rubrics(weights={"correct": 3.0, "style": 1.0}, **PLAIN)
    assert rubrics(reward_inputs([1, 1, 0], extras=EXTRAS)).tolist() == [1.0, 0.875, 0.0]


def test_saturation_interaction_and_shaping():
    options = {"knees": {"style": 0.5}, "vetoes": {}, "pairs": [["style", "care", 2.0]], "power": 2.0}
    rubrics = Rubrics(weights={"style": 2.0}, **options)
    # Style 1 counts 0.75: (2 * 0.75 + 2 * 0.75 * 0.5) / 4 = 0.5625; 0.5: 1 / 4; 0: 0. Then squares.
    assert rubrics(reward_inputs([1, 1, 1], extras=EXTRAS)).tolist() == [0.5625**2, 0.0625, 0.0]


def test_a_veto():
    rubrics = Rubrics(weights={"correct": 1.0}, **(PLAIN | {"vetoes": {"finished": 1.0, "care": 0.4}}))
    inputs = reward_inputs([1, 1, 1], truncated=[0, 0, 1], extras=EXTRAS)
    assert rubrics(inputs).tolist() == [1.0, 0.0, 0.0]


def test_a_rubric_that_nobody_scores():
    with pytest.raises(
        ConfigError, match=r"the verifier of 'set' gives tone=None; a rubric is correct, boxed, finished"
    ):
        Rubrics(weights={"tone": 1.0}, **PLAIN)(reward_inputs([1]))
    with pytest.raises(ConfigError, match="must be at least 0 and not all 0"):
        Rubrics(weights={"correct": -1.0}, **PLAIN)
