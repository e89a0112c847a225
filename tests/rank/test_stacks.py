"""Metrics of stacked responses: those of the concatenated matrix, with at most D rows in memory."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.stacks import StackedResponses, mean_state_distances, state_motion

SPECTRAL = [0, 1, 2, 4]


def stack_metrics(states, config):
    stack = StackedResponses(config)
    for response in states:
        stack.add(response)
    return stack.metrics()


def random_states(*lengths: int, width: int = 6, layers: int = 2, offset: float = 30.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -2, width)
    return [offset + scales * torch.randn(n, layers, width, generator=generator) for n in lengths]


@pytest.mark.parametrize("rule", ["after_stride", "after_stride_and_whole", "at_stride_and_whole"])
@pytest.mark.parametrize("lengths", [(9, 4, 1, 17), (1, 1, 2), (3,), (40, 31)])
def test_stack_has_the_metrics_of_the_concatenated_responses(
    make_calculator: Callable[..., RepresentationMetricsCalculator], rule: str, lengths: tuple[int, ...]
):
    calculator = make_calculator(metric_indices=SPECTRAL, diff_stride=3, prefix_rule=rule)
    states = random_states(*lengths)
    found = stack_metrics(states, calculator.config)
    expected = calculator.measure([torch.cat(states)]).rank_metrics
    assert list(found) == list(expected.keys()) and len(found) == 12
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name][0], rtol=1e-5, atol=1e-5, msg=name)


def test_stack_keeps_as_many_rows_as_the_states_are_wide(make_calculator):
    stack = StackedResponses(make_calculator(diff_stride=3).config)
    kept = []
    for response in random_states(4, 9, 50):
        stack.add(response)
        kept.append(stack._contrasts.shape[1])
    assert kept == [4, 6, 6]


def test_effective_rank_of_a_stack_by_hand(make_calculator):
    # Centred, the stacked rows are +-1 along each of two axes: two equal singular values.
    states = [torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]], [[0.0, -1.0]]])]
    found = stack_metrics(states, make_calculator(diff_stride=1).config)
    # Prefixes of 2, 3 and 4 rows: one direction; then x = 1, -1, 0 and y = 0, 0, 1, with s^2 = 2 and 2/3; two equal.
    shares = torch.tensor([2.0, 2 / 3]).double().sqrt()
    shares /= shares.sum()
    middle = math.exp(-float((shares * shares.log()).sum()))
    assert float(found["Effective Rank"]) == pytest.approx(2.0, abs=1e-6)
    steps = [middle - 1, 2 - (1 + middle) / 2]
    assert float(found["Effective Rank diff"]) == pytest.approx(sum(steps) / 2, abs=1e-6)
    assert float(found["Effective Rank diff 2"]) == pytest.approx(steps[1] - steps[0], abs=1e-6)


def test_stack_of_nothing_and_states_that_are_not_finite(make_calculator):
    with pytest.raises(ValueError, match="no responses"):
        StackedResponses(make_calculator().config).metrics()
    states = random_states(4, 5)
    states[0][2, 1, 0] = torch.nan
    found = stack_metrics(states, make_calculator(on_nonfinite="mask", diff_stride=2).config)
    assert [values.isnan().tolist() for values in found.values()] == [[False, True]] * 3


def test_distances_of_mean_states_by_hand():
    found = mean_state_distances(torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0]]))
    # Pairs: 5, 4 and 3 apart, with cosines 0, 0.6 and 0.8. The centre is (2, 8/3).
    centre = [math.hypot(1, 8 / 3), math.hypot(2, 4 / 3), math.hypot(1, 4 / 3)]
    expected = {"pairwise_euclidean_dist": 4.0, "pairwise_cosine_sim": 1.4 / 3, "dist_to_center": sum(centre) / 3}
    assert found == pytest.approx(expected)
    single = mean_state_distances(torch.tensor([[3.0, 4.0]]))
    assert math.isnan(single["pairwise_cosine_sim"]) and single["dist_to_center"] == 0


def test_motion_of_prefixes_matches_float64_loops():
    # An offset of 1e4, as of massive activations, and one state far from the others.
    states = random_states(9, layers=1, offset=1e4)[0][:, 0]
    states[0] += 1e3
    found = state_motion(states)
    for k in range(1, 10):
        rows = [row.double() for row in states[:k]]
        steps = [float((rows[i] - rows[i - 1]).norm()) for i in range(1, k)]
        centre = sum(rows) / k
        squares = [float((row - centre).square().sum()) for row in rows]
        assert float(found["state_speed"][k - 1]) == pytest.approx(sum(steps) / (k - 1) if steps else 0.0, rel=1e-12)
        assert float(found["state_dispersion"][k - 1]) == pytest.approx(math.sqrt(sum(squares) / k), rel=1e-9)


def test_motion_by_hand():
    # Two steps of 5. The mean of two states is 2.5 from both; that of three is (3, 4), which is 5, 0 and 5 away.
    found = state_motion(torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]).bfloat16())
    assert found["state_speed"].tolist() == [0.0, 5.0, 5.0]
    assert found["state_dispersion"].tolist() == pytest.approx([0.0, 2.5, math.sqrt(50 / 3)])
