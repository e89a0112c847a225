"""Corrections for a verifier that errs (arXiv 2510.00915)."""

import pytest
import torch

from verl.config import ConfigError
from verl.recipes.noisy_verifier import backward, forward

from .step_inputs import advantage_inputs, reward_inputs


def test_backward_literals():
    found = backward(reward_inputs([1, 0]), false_positive=0.1, false_negative=0.2)
    torch.testing.assert_close(found, torch.tensor([9 / 7, -1 / 7]).double())


def test_forward_literals():
    assert forward(advantage_inputs([1, 0]), false_negative=0.25).tolist() == [0.25, -0.75]


def test_means_over_the_noise_are_those_of_the_paper():
    # Of 100 right responses 80 pass, of 100 wrong ones 10.
    passed = {1: [1] * 80 + [0] * 20, 0: [1] * 10 + [0] * 90}
    for truth, verdicts in passed.items():
        assert backward(reward_inputs(verdicts), 0.1, 0.2).mean().item() == pytest.approx(truth)
        expected = {1: 0.0, 0: -(1 - 0.1 - 0.2)}[truth]
        assert forward(advantage_inputs(verdicts), 0.2).mean().item() == pytest.approx(expected)


def test_rates_that_leave_no_information_are_refused():
    with pytest.raises(ConfigError, match="false_positive=0.5 and false_negative=0.5 must be .* below 1 together"):
        backward(reward_inputs([1]), 0.5, 0.5)
    with pytest.raises(ConfigError, match=r"adv_estimator_kwargs.false_negative=1.0: must be"):
        forward(advantage_inputs([1]), 1.0)
