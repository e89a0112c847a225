"""Rank metrics of a user's own, beside the built-in ones and like them."""

from pathlib import Path

import pytest
import torch

from tests.rank.reference_loop import mask_of
from verl.config import ConfigError
from verl.rank.calculator import capture_options, reduce_states
from verl.rank.own_metrics import own_measures
from verl.spectral.slices import finish

SOURCE = """
import torch

def effective(spectra):
    # The effective rank again, by another way.
    shares = spectra.singular_values / spectra.singular_values.sum(dim=1, keepdim=True)
    return torch.special.entr(shares).sum(dim=1).exp()

def rows_and_width(spectra):
    assert spectra.singular_values.shape[1] == min(spectra.rows, spectra.width)
    return torch.full((len(spectra.singular_values),), 100 * spectra.rows + spectra.width)

def largest(spectra):
    return spectra.singular_values[:, 0]

def one_number(spectra):
    return spectra.singular_values.sum()

def unstable(spectra):
    return spectra.singular_values.log().sum(dim=1)
"""


@pytest.fixture
def paths(tmp_path: Path):
    (tmp_path / "own.py").write_text(SOURCE)
    return lambda *names: [f"{tmp_path}/own.py:{name}" for name in names]


def states(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).cumsum(1)


@pytest.mark.parametrize("rule", ["after_stride", "at_stride_and_whole"])
def test_velocity_and_acceleration_are_those_of_the_built_in_metric(make_calculator, paths, rule):
    calculator = make_calculator(own_metrics=paths("effective"), metric_indices=[1], diff_stride=3, prefix_rule=rule)
    metrics = calculator(states(4, 20, 2, 6), mask_of([20, 13, 4, 1], 20))
    assert list(metrics["1"]) == [f"{n}{s}" for n in ("Effective Rank", "effective") for s in ("", " diff", " diff 2")]
    for layer in metrics.values():
        for suffix in ("", " diff", " diff 2"):
            # A response of one row has no spectrum: an effective rank of 1, and 0 for one's own.
            built_in, own = layer[f"Effective Rank{suffix}"][:3], layer[f"effective{suffix}"]
            torch.testing.assert_close(own[:3], built_in, rtol=1e-5, atol=1e-7)
            assert own[3] == 0
    names = calculator.dataset_metrics(states(9, 5), 2)
    assert names["global/effective"] == pytest.approx(names["global/Effective Rank"], rel=1e-5)


def test_it_sees_rows_and_width_and_the_units_of_the_states(make_calculator, paths):
    options = {"own_metrics": paths("rows_and_width", "largest"), "metric_indices": [2], "compute_diff": False}
    hidden = torch.zeros(1, 4, 1, 3)
    hidden[0, :2, 0, 1], hidden[0, 2:, 0, 1] = 1e5, -1e5  # centred as it is: one singular value, 2e5
    metrics = make_calculator(**options)(hidden, mask_of([4], 4))["1"]
    assert metrics["rows_and_width"].tolist() == [403.0]
    assert metrics["largest"].item() == pytest.approx(2e5)
    masked = make_calculator(**options, on_nonfinite="mask")(hidden / 0.0, mask_of([4], 4))["1"]
    assert masked["largest"].isnan().all()
    assert make_calculator(**options)(torch.ones(1, 4, 1, 3), mask_of([4], 4))["1"]["largest"].tolist() == [0.0]


def test_the_engine_loads_it_from_its_options(make_calculator, paths):
    calculator = make_calculator(own_metrics=paths("effective"), metric_indices=[1], diff_stride=3)
    options = capture_options(calculator.config)["reducer_options"]
    (row,) = finish(reduce_states([states(1, 20, 2, 6)[0]], **options))
    expected = calculator(states(1, 20, 2, 6), mask_of([20], 20))
    assert row["metric.effective diff"].tolist() == [expected[layer]["effective diff"].item() for layer in ("1", "2")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_number", "returned shape []; expected a tensor of shape [2], one number for each spectrum"),
        ("unstable", "returned NaN or infinity in row 1; expected finite numbers for 3 rows (some singular"),
        ("gone", "has no function or class 'gone'"),
    ],
)
def test_it_is_tried_before_training(paths, name, message):
    with pytest.raises(ConfigError) as raised:
        own_measures(paths(name))
    assert str(raised.value).startswith("calculator.own_metrics=") and message in str(raised.value)
