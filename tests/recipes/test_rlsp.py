"""A reward for exploring (arXiv 2502.06773)."""

import pytest

from verl.recipes.rlsp import exploring

from .step_inputs import reward_inputs


def test_literals():
    # Half of the exploration reward at 4 tokens, three quarters at 8, none for what was cut off at 16.
    inputs = reward_inputs([1, 0, 0], lengths=[4, 8, 16], truncated=[0, 0, 1])
    assert exploring(inputs, alpha=0.8, half_share=0.25).tolist() == pytest.approx([0.9, 0.15, 0.0])
