"""Rank metrics of conversations: rows of the policy's tokens in order, and turns by themselves."""

import torch

from tests.conftest import shipped_config
from verl.batch import ENVIRONMENT, POLICY, Batch
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.turns import MEASURED_TURNS, measure_responses


def test_tokens_of_an_environment_are_not_measured():
    torch.manual_seed(0)
    calculator = RepresentationMetricsCalculator(shipped_config().calculator)
    policy = [torch.randn(n, 1, 16) for n in (9, 7)]
    noise = torch.full((5, 1, 16), 1e6)
    # Two turns of 4 and 5 tokens around an observation, and a response of one turn.
    states = [torch.cat([policy[0][:4], noise, policy[0][4:]]), policy[1]]
    sources = [POLICY] * 4 + [ENVIRONMENT] * 5 + [POLICY] * 5 + [POLICY] * 7
    batch = Batch.of([[1], [1]], [[2] * 14, [2] * 7], source=torch.tensor(sources, dtype=torch.uint8))
    measured = measure_responses(calculator, None, states, batch)
    whole = calculator.measure(policy)
    turns = calculator.measure([policy[0][:4], policy[0][4:], policy[1]])
    assert measured.rank_metrics.keys() == whole.rank_metrics.keys() == measured.turn_metrics.keys()
    for name, values in whole.rank_metrics.items():
        torch.testing.assert_close(measured.rank_metrics[name], values)
        of_turns = measured.turn_metrics[name][:, :, 0]
        assert of_turns.shape == (2, MEASURED_TURNS)
        expected = turns.rank_metrics[name][:, 0]
        torch.testing.assert_close(of_turns[0, :2], expected[:2])
        torch.testing.assert_close(of_turns[1, 0], expected[2])
        assert of_turns[0, 2:].isnan().all() and of_turns[1, 1:].isnan().all()
    torch.testing.assert_close(measured.mean_states, whole.mean_states)
