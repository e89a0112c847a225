import math
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.signal import BASE_METRICS, CalculatorConfig
from verl.trainer.metrics_calculator import RepresentationMetricsCalculator

ALL = [0, 1, 2, 3, 4]


def random_states(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cumsum(1)


def mask_of(lengths, padded_rows):
    return (torch.arange(padded_rows) < torch.tensor(lengths)[:, None]).long()


def reference_effective_rank(rows):
    rows = rows.double()
    s = torch.linalg.svdvals(rows - rows.mean(0))
    p = s[s > 1e-12 * s[0]] / s.sum()
    return math.exp(-float((p * p.log()).sum()))


def reference_velocity_and_acceleration(rows, stride):
    """The definition, word for word."""
    m, j = [], 1
    while j * stride < len(rows):
        m.append(reference_effective_rank(rows[: j * stride + 1]))
        j += 1
    delta = [m[i] - sum(m[:i]) / i for i in range(1, len(m))]
    steps = [b - a for a, b in zip(delta, delta[1:], strict=False)]
    return (sum(delta) / len(delta) if delta else 0.0), (sum(steps) / len(steps) if steps else 0.0)


def test_every_layer_matches_the_definition():
    hidden = random_states(0, 4, 40, 2, 24)
    lengths = [40, 17, 16, 33]
    metrics = RepresentationMetricsCalculator([1], diff_stride=4)(hidden, mask_of(lengths, 40))
    assert list(metrics) == ["1", "2"]
    for layer, key in enumerate(["1", "2"]):
        assert list(metrics[key]) == ["Effective Rank", "Effective Rank diff", "Effective Rank diff 2"]
        for i, length in enumerate(lengths):
            rows = hidden[i, :length, layer]
            expected = (reference_effective_rank(rows), *reference_velocity_and_acceleration(rows, 4))
            actual = [float(values[i]) for values in metrics[key].values()]
            assert actual == pytest.approx(expected, rel=1e-6)
            assert metrics[key]["Effective Rank"].dtype == torch.float64


def test_names_are_those_of_the_config():
    hidden, mask = random_states(0, 2, 9, 1, 4), mask_of([9, 5], 9)
    for compute_diff in (True, False):
        config = CalculatorConfig(enable=True, metric_indices=ALL, compute_diff=compute_diff, diff_stride=2)
        calculator = RepresentationMetricsCalculator(config.metric_indices, config.diff_stride)
        assert list(calculator(hidden, mask, compute_diff)["1"]) == config.metric_names


def test_diff_stride_argument_replaces_the_calculators_own():
    hidden, mask = random_states(0, 2, 30, 1, 8), mask_of([30, 25], 30)
    narrow, wide = RepresentationMetricsCalculator([1], 2), RepresentationMetricsCalculator([1], 7)
    replaced = wide(hidden, mask, diff_stride=2)["1"]["Effective Rank diff"]
    assert torch.equal(replaced, narrow(hidden, mask)["1"]["Effective Rank diff"])
    assert not torch.equal(replaced, wide(hidden, mask)["1"]["Effective Rank diff"])


def test_empty_and_single_row_responses():
    metrics = RepresentationMetricsCalculator(ALL, 1)(random_states(0, 2, 5, 1, 3), mask_of([0, 1], 5))["1"]
    for name, values in metrics.items():
        assert values.tolist() == ([1.0, 1.0] if name == "Effective Rank" else [0.0, 0.0]), name


def test_empty_batch():
    metrics = RepresentationMetricsCalculator(ALL, 2)(torch.zeros(0, 5, 1, 3), torch.zeros(0, 5))["1"]
    assert len(metrics) == 15
    assert all(values.shape == (0,) for values in metrics.values())


@given(st.integers(0, 2**31 - 1), st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_padding_and_batch_order_do_not_matter(seed, lengths, stride):
    calculator = RepresentationMetricsCalculator(ALL, stride)
    hidden = random_states(seed, len(lengths), 20, 1, 6)
    mask = mask_of(lengths, 20)
    whole = calculator(hidden, mask)["1"]
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    padded = torch.cat([hidden, torch.zeros(len(lengths), 3, 1, 6)], dim=1)
    padded = padded.masked_fill(mask_of(lengths, 23)[:, :, None, None] == 0, math.nan)
    moved = calculator(padded[order], mask_of(lengths, 23)[order])["1"]
    for name, values in whole.items():
        torch.testing.assert_close(moved[name], values[order], rtol=1e-9, atol=1e-9)


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=15, deadline=None)
def test_rotation_shift_and_scale_do_not_matter(seed):
    calculator = RepresentationMetricsCalculator(ALL, 3)
    hidden = random_states(seed, 2, 20, 1, 6).double()
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    moved = calculator(4.0 * (hidden @ rotation) + 3.0, mask_of([20, 13], 20))["1"]
    for name, values in calculator(hidden, mask_of([20, 13], 20))["1"].items():
        torch.testing.assert_close(moved[name], values, rtol=1e-6, atol=1e-6)


def test_mask_must_be_right_padded():
    hidden = random_states(0, 3, 4, 1, 3)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]])
    with pytest.raises(ValueError, match="response 1: must be right-padded"):
        RepresentationMetricsCalculator([1], 2)(hidden, mask)
    with pytest.raises(ValueError, match="response 0: must be right-padded"):
        RepresentationMetricsCalculator([1], 2)(hidden, torch.full((3, 4), 0.5))


def test_nan_names_layer_and_response():
    hidden = random_states(0, 3, 4, 2, 3)
    hidden[2, 1, 1, 0] = math.nan
    mask = mask_of([4, 4, 2], 4)
    for indices in ([1], [3]):
        with pytest.raises(ValueError, match="layer 2: response 2: "):
            RepresentationMetricsCalculator(indices, 2)(hidden, mask)


def test_arguments_are_checked():
    for indices in ([], [5], [-1], [1, 1]):
        with pytest.raises(ValueError, match="metric_indices"):
            RepresentationMetricsCalculator(indices, 2)
    with pytest.raises(ValueError, match="diff_stride=0"):
        RepresentationMetricsCalculator([1], 0)
    with pytest.raises(ValueError, match="diff_stride=-1"):
        RepresentationMetricsCalculator([1], 2)(torch.zeros(1, 4, 1, 3), torch.ones(1, 4), diff_stride=-1)
    with pytest.raises(ValueError, match=r"expected \[B, T, L, D\] and \[B, T\]"):
        RepresentationMetricsCalculator([1], 2)(torch.zeros(1, 4, 1, 3), torch.ones(1, 5))


def test_dataset_metrics_treat_responses_as_rows():
    states = random_states(0, 1, 12, 5)[0]
    calculator = RepresentationMetricsCalculator(ALL, 2)
    metrics = calculator.dataset_metrics(states)
    expected = {f"global/{name}" for name in BASE_METRICS}
    expected |= {f"cumulative/{name}{suffix}" for name in BASE_METRICS for suffix in (" diff", " diff 2")}
    assert set(metrics) == expected
    assert metrics["global/Effective Rank"] == pytest.approx(reference_effective_rank(states), rel=1e-6)
    actual = (metrics["cumulative/Effective Rank diff"], metrics["cumulative/Effective Rank diff 2"])
    assert actual == pytest.approx(reference_velocity_and_acceleration(states, 2), rel=1e-6)
    without = calculator.dataset_metrics(states, compute_diff=False)
    assert set(without) == {f"global/{name}" for name in BASE_METRICS}
    with pytest.raises(ValueError, match="mean_states"):
        calculator.dataset_metrics(states * math.nan)
    with pytest.raises(ValueError, match=r"expected \[B, D\]"):
        calculator.dataset_metrics(states[None])


def test_pickle_round_trip():
    calculator = RepresentationMetricsCalculator([1, 3], 4)
    hidden, mask = random_states(0, 2, 20, 1, 6), mask_of([20, 9], 20)
    copy = pickle.loads(pickle.dumps(calculator))
    for name, values in calculator(hidden, mask)["1"].items():
        assert torch.equal(copy(hidden, mask)["1"][name], values)


def test_import_is_light():
    code = "import sys, verl.trainer.metrics_calculator as m; print(*[n for n in sys.modules if n.startswith('verl')])"
    modules = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "verl.spectral.prefixes" in modules
    own = {"verl", "verl.trainer", "verl.trainer.metrics_calculator", "verl.trainer.metrics_utils"}
    assert {n for n in modules - own if not n.startswith(("verl.spectral", "verl.config"))} == set()
