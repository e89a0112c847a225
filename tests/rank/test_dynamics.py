import math

import pytest
import torch

from verl.config.calculator import BASE_METRICS
from verl.rank.dynamics import acceleration, base_metrics, curvature, prefix_counts, prefix_rows, velocity
from verl.spectral import SpectralOptions


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("lengths", "stride", "extra", "counts", "rows"),
    [
        # j * 8 + 1 rows, while there are as many; and j * 8 rows.
        ([0, 1, 8, 9, 17, 24], 8, 1, [0, 0, 0, 1, 2, 2], [[0, 0], [0, 0], [0, 0], [9, 0], [9, 17], [9, 17]]),
        ([0, 7, 8, 9, 15, 16], 8, 0, [0, 0, 1, 1, 1, 2], [[0, 0], [0, 0], [8, 0], [8, 0], [8, 0], [8, 16]]),
        ([4], 1, 1, [3], [[2, 3, 4]]),
        ([3, 0], 8, 1, [0, 0], [[], []]),
    ],
)
def test_prefixes_run_while_there_are_rows(lengths, stride, extra, counts, rows):
    assert prefix_counts(torch.tensor(lengths), stride, extra).tolist() == counts
    assert prefix_rows(torch.tensor(lengths), stride, extra).tolist() == rows


def test_literal_velocity_and_acceleration():
    # m = 1, 3, 5, 2: running means 1, 2, 3; deltas 2, 3, -1; velocity 4/3; steps 1, -4, mean -3/2
    values = f64(1.0, 3.0, 5.0, 2.0).repeat(5, 1)
    counts = torch.tensor([4, 3, 2, 1, 0])
    torch.testing.assert_close(velocity(values, counts), f64(4 / 3, 2.5, 2.0, 0.0, 0.0))
    torch.testing.assert_close(acceleration(values, counts), f64(-1.5, 1.0, 0.0, 0.0, 0.0))


def test_absent_prefixes_do_not_matter_and_too_few_give_zero():
    nan = math.nan
    values = torch.stack([f64(1.0, 3.0, nan, nan), f64(1.0, nan, nan, nan), f64(nan, nan, nan, nan)])
    counts = torch.tensor([2, 1, 0])
    assert velocity(values, counts).tolist() == [2.0, 0.0, 0.0]
    assert acceleration(values, counts).tolist() == [0.0, 0.0, 0.0]
    for columns in (0, 1, 2):
        values, counts = torch.full((2, columns), 7.0, dtype=torch.float64), torch.full((2,), columns)
        assert velocity(values, counts).tolist() == acceleration(values, counts).tolist() == [0.0, 0.0]


def test_literal_curvature():
    # Steps right, up, up, left, nothing, left: angles pi/2, 0, pi/2 and two undefined ones.
    path = torch.tensor([[[0, 0], [1, 0], [1, 1], [1, 3], [0, 3], [0, 3], [-1, 3]]], dtype=torch.float32)
    rows = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    expected = f64(0, 0, 0, math.pi / 2, math.pi / 4, math.pi / 3, math.pi / 3, math.pi / 3)[None]
    torch.testing.assert_close(curvature(path, torch.tensor([7]), rows), expected)


def test_curvature_of_a_reversal_and_of_a_slight_turn():
    angle = 1e-6
    back = f64(0, 0, 1, 0, 0, 0).reshape(1, 3, 2)
    slight = f64(0, 0, 1, 0, 1 + math.cos(angle), math.sin(angle)).reshape(1, 3, 2)
    result = curvature(torch.cat([back, slight]), torch.tensor([3, 3]), torch.tensor([[3], [3]]))
    assert float(result[0]) == pytest.approx(math.pi, rel=1e-12)
    assert float(result[1]) == pytest.approx(angle, rel=1e-9)


def test_base_metrics_of_square_corners():
    corners = torch.tensor([[[1.0, 1.0], [1.0, 3.0], [3.0, 3.0], [3.0, 1.0]]])
    metrics = base_metrics(corners, torch.tensor([4]), torch.tensor([[4, 1]]), BASE_METRICS[::-1], SpectralOptions())
    expected = {
        "Log Effective Rank": f64(math.log(2), 0.0),
        "Curvature": f64(math.pi / 2, 0.0),
        "Traditional Rank": f64(2.0, 0.0),
        "Effective Rank": f64(2.0, 1.0),
        "Response Entropy 1": f64(math.log(2), 0.0),
    }
    assert list(metrics) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(metrics[name], values[None])
