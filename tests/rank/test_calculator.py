import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank.reference_loop import effective_rank, mask_of, terms, velocity_and_acceleration
from verl.config.calculator import BASE_METRICS
from verl.rank.calculator import RepresentationMetricsCalculator, capture_options, reduce_states
from verl.spectral import effective_rank as effective_rank_of

ALL = [0, 1, 2, 3, 4]


def random_states(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cumsum(1)


def reference_effective_rank(rows):
    return effective_rank(rows.double().numpy())


def reference_velocity_and_acceleration(rows, stride):
    return velocity_and_acceleration(terms("after_stride", rows.double().numpy(), stride, None, "end"))


def test_every_layer_matches_the_definition(make_calculator):
    hidden = random_states(0, 4, 40, 2, 24)
    lengths = [40, 17, 16, 33]
    metrics = make_calculator(metric_indices=[1], diff_stride=4)(hidden, mask_of(lengths, 40))
    assert list(metrics) == ["1", "2"]
    for layer, by_name in enumerate(metrics.values()):
        assert by_name["Effective Rank"].dtype == torch.float64
        for i, length in enumerate(lengths):
            rows = hidden[i, :length, layer]
            expected = (reference_effective_rank(rows), *reference_velocity_and_acceleration(rows, 4))
            actual = [float(values[i]) for values in by_name.values()]
            assert actual == pytest.approx(expected, rel=0, abs=1e-6 * expected[0])


def test_diff_stride_argument_replaces_the_calculators_own(make_calculator):
    hidden, mask = random_states(0, 2, 30, 1, 8), mask_of([30, 25], 30)
    narrow, wide = (make_calculator(metric_indices=[1], diff_stride=stride) for stride in (2, 7))
    replaced = wide(hidden, mask, diff_stride=2)["1"]["Effective Rank diff"]
    assert torch.equal(replaced, narrow(hidden, mask)["1"]["Effective Rank diff"])
    assert not torch.equal(replaced, wide(hidden, mask)["1"]["Effective Rank diff"])


def test_empty_and_single_row_responses_and_an_empty_batch(make_calculator):
    calculator = make_calculator(metric_indices=ALL, diff_stride=1)
    for name, values in calculator(random_states(0, 2, 5, 1, 3), mask_of([0, 1], 5))["1"].items():
        assert values.tolist() == ([1.0, 1.0] if name == "Effective Rank" else [0.0, 0.0]), name
    metrics = calculator(torch.zeros(0, 5, 1, 3), torch.zeros(0, 5))["1"]
    assert len(metrics) == 15 and all(values.shape == (0,) for values in metrics.values())


RULES = ["after_stride", "after_stride_and_whole", "at_stride_and_whole"]


@given(
    *(st.integers(0, 2**31 - 1), st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(1, 5)),
    *(st.sampled_from(RULES), st.sampled_from([None, 1, 7]), st.sampled_from(["start", "end"])),
)
@settings(max_examples=40, deadline=None)
def test_padding_and_batch_order_do_not_matter(make_calculator, seed, lengths, stride, rule, most, end):
    kept = {"max_seq_len": most, "max_seq_len_from": end}
    calculator = make_calculator(metric_indices=ALL, diff_stride=stride, prefix_rule=rule, **kept)
    hidden = random_states(seed, len(lengths), 20, 1, 6)
    mask = mask_of(lengths, 20)
    whole = calculator(hidden, mask)["1"]
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    padded = torch.cat([hidden, torch.zeros(len(lengths), 3, 1, 6)], dim=1)
    padded = padded.masked_fill(mask_of(lengths, 23)[:, :, None, None] == 0, math.nan)
    moved = calculator(padded[order], mask_of(lengths, 23)[order])["1"]
    for name, values in whole.items():
        torch.testing.assert_close(moved[name], values[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("hidden", "mask", "options", "message"),
    [
        (torch.ones(2, 4, 1, 3), [[1, 1, 0, 0], [0, 1, 1, 1]], {}, "response 1: must be right-padded"),
        (torch.ones(2, 4, 1, 3), [[1, 0, 1, 0]] * 2, {}, "response 0: must be right-padded"),
        (torch.ones(2, 4, 1, 3), [[0.5] * 4] * 2, {}, "response 0: must be right-padded"),
        (torch.ones(1, 4, 1, 3), [[1] * 4], {"diff_stride": -1}, "diff_stride=-1"),
        (torch.ones(1, 4, 1, 3), [[1] * 5], {}, r"expected \[B, T, L, D\] and \[B, T\]"),
    ],
)
def test_hostile_batches_are_refused(make_calculator, hidden, mask, options, message):
    with pytest.raises(ValueError, match=message):
        make_calculator(metric_indices=[1], diff_stride=2)(hidden, torch.tensor(mask), **options)


def test_dataset_metrics_treat_responses_as_rows(make_calculator):
    states = random_states(0, 1, 12, 5)[0]
    metrics = make_calculator(metric_indices=ALL).dataset_metrics(states, diff_stride=2)
    levels = {f"global/{name}" for name in BASE_METRICS}
    changes = {f"cumulative/{name}{suffix}" for name in BASE_METRICS for suffix in (" diff", " diff 2")}
    assert set(metrics) == levels | changes
    assert metrics["global/Effective Rank"] == pytest.approx(reference_effective_rank(states), rel=1e-6)
    actual = (metrics["cumulative/Effective Rank diff"], metrics["cumulative/Effective Rank diff 2"])
    assert actual == pytest.approx(reference_velocity_and_acceleration(states, 2), rel=1e-6)
    for wanted, levels_on, changes_on in ((levels, True, False), (changes, False, True), (set(), False, False)):
        switches = {"compute_global_metrics": levels_on, "compute_cumulative_global_metrics": changes_on}
        assert set(make_calculator(metric_indices=ALL, **switches).dataset_metrics(states, diff_stride=2)) == wanted
    with pytest.raises(ValueError, match=r"expected \[B, D\]"):
        make_calculator().dataset_metrics(states[None], diff_stride=2)


def test_dataset_metrics_of_states_that_are_not_finite(make_calculator):
    states = random_states(0, 1, 12, 5)[0]
    broken = torch.cat([states[:3], states[:1] * math.nan, states[3:]])
    with pytest.raises(ValueError, match=r"mean_states\[3\]: holds NaN"):
        make_calculator().dataset_metrics(broken, diff_stride=2)
    masking = make_calculator(on_nonfinite="mask")
    assert masking.dataset_metrics(broken, 2) == masking.dataset_metrics(states, 2)
    assert masking.dataset_metrics(broken[3:4], 2)["global/Effective Rank"] == 1.0
    zeroing = make_calculator(on_nonfinite="zero")
    assert set(zeroing.dataset_metrics(broken, 2).values()) == {0.0}
    assert zeroing.dataset_metrics(states, 2) == masking.dataset_metrics(states, 2)


def test_low_rank_spectra_keep_the_largest_singular_values(make_calculator):
    hidden, mask = random_states(0, 1, 20, 1, 12), mask_of([20], 20)
    full = make_calculator(diff_stride=5)(hidden, mask)["1"]
    for order, changed in (("zeroth_order", [""]), ("diff", [" diff", " diff 2"])):
        low = make_calculator(diff_stride=5, svd_rank=3, **{f"{order}_svd_method": "lowrank"})(hidden, mask)["1"]
        moved = {name for name in full if not torch.isclose(low[name], full[name], rtol=0, atol=1e-5)}
        assert moved == {f"Effective Rank{suffix}" for suffix in changed}
        if order == "zeroth_order":
            rows = hidden[0, :, 0].double()
            largest = torch.linalg.svdvals(rows - rows.mean(0))[:3]
            torch.testing.assert_close(low["Effective Rank"], effective_rank_of(largest)[None], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("rule", "cut", "rows"),
    [
        ("after_stride", {}, {7: [3, 5, 7], 2: [2], 1: [1]}),
        ("after_stride_and_whole", {}, {7: [3, 5, 7], 2: [2], 1: [1]}),
        ("at_stride_and_whole", {}, {7: [2, 4, 6, 7], 2: [2], 1: [1]}),
        # The last 5 rows of 7: prefixes end with rows 3 and 5 of these.
        ("after_stride", {"max_seq_len": 5}, {7: [5, 7], 2: [2], 1: [1]}),
        ("after_stride", {"max_seq_len": 5, "max_seq_len_from": "start"}, {7: [3, 5, 7], 2: [2], 1: [1]}),
    ],
)
def test_kept_prefixes_stand_where_they_end(make_calculator, rule, cut, rows):
    """And the whole response at its last token, whatever the prefixes are taken from."""
    calculator = make_calculator(diff_stride=2, prefix_rule=rule, keep_prefixes=True, metric_indices=[1], **cut)
    torch.manual_seed(0)
    states = [torch.randn(length, 2, 6, dtype=torch.float64) for length in rows]
    by_prefix = calculator.measure(states).prefix_metrics["Effective Rank"].split(list(rows))
    for i, (length, ends) in enumerate(rows.items()):
        for layer in range(2):
            assert (by_prefix[i][:, layer].isfinite().nonzero().flatten() + 1).tolist() == ends
            first = length - 5 if cut == {"max_seq_len": 5} and length > 5 else 0
            for end in ends:
                start = 0 if end == length else first
                expected = reference_effective_rank(states[i][start:end, layer])
                assert by_prefix[i][end - 1, layer].item() == pytest.approx(expected, rel=1e-5)
    assert not make_calculator(diff_stride=2).measure(states).prefix_metrics


@pytest.mark.parametrize("rule", RULES)
def test_responses_that_are_not_finite_change_no_other(make_calculator, rule):
    hidden, mask = random_states(0, 4, 12, 2, 5), mask_of([12, 7, 1, 0], 12)

    def metrics(on_nonfinite):
        options = {"diff_stride": 2, "prefix_rule": rule, "on_nonfinite": on_nonfinite}
        return make_calculator(metric_indices=ALL, **options)(hidden, mask)

    whole = metrics("mask")
    hidden[1, 3, 1, 2], hidden[2, 0, 1, 0], hidden[3] = math.inf, math.nan, math.nan
    masked, zeroed = metrics("mask"), metrics("zero")
    for name, values in masked["2"].items():
        assert torch.equal(masked["1"][name], whole["1"][name]) and torch.equal(zeroed["1"][name], whole["1"][name])
        assert values.isnan().tolist() == [False, True, True, False], name
        torch.testing.assert_close(values[[0, 3]], whole["2"][name][[0, 3]], rtol=1e-9, atol=1e-9)
        assert torch.equal(zeroed["2"][name], values.nan_to_num(0.0)), name
    for indices in ([1], [3]):
        with pytest.raises(ValueError, match="layer 2: response 1: "):
            make_calculator(metric_indices=indices, diff_stride=2)(hidden, mask)


def test_ranks_in_bfloat16(make_calculator):
    hidden, mask = random_states(0, 3, 40, 1, 24), mask_of([40, 17, 33], 40)
    exact = make_calculator(metric_indices=ALL, diff_stride=4)(hidden, mask)["1"]
    rounded = make_calculator(metric_indices=ALL, diff_stride=4, metrics_dtype="bfloat16")(hidden, mask)["1"]
    assert list(rounded) == list(exact)
    for name, values in rounded.items():
        assert values.dtype == torch.float64
        if name in ("Effective Rank", "Log Effective Rank"):
            # 8 significant bits: off by at most 2^-8 of the value, and off at all
            error = (values - exact[name]).abs() / exact[name]
            assert (0 < error).all() and (error <= 2**-8).all()
            mantissa = torch.frexp(values).mantissa * 2**8
            assert torch.equal(mantissa, mantissa.round()), name
        else:
            assert torch.equal(values, exact[name]), name


def test_engine_measures_each_response_by_itself(make_calculator):
    """What the rollout engine's reducer returns does not depend on which responses finished together."""
    calculator = make_calculator(diff_stride=2, metric_indices=[1, 3])
    options = capture_options(calculator.config)
    assert options["layers"] == [-1] and options["reducer"] == "verl.rank.calculator:reduce_states"
    torch.manual_seed(0)
    states = [torch.randn(length, 2, 6) for length in (9, 1, 30, 4)]
    together = reduce_states(states, **options["reducer_options"])
    batch = calculator.measure(states)
    assert list(batch.rank_metrics) == calculator.config.metric_names and batch.mean_states.shape == (4, 2, 6)
    for row, response in enumerate(states):
        alone = reduce_states([response], **options["reducer_options"])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][[row]], value)
            torch.testing.assert_close(getattr(batch, name)[[row]], value)
        layers = calculator(response[None], torch.ones(1, len(response)))
        for name, values in batch.rank_metrics.items():
            expected = torch.cat([layers["1"][name], layers["2"][name]])
            assert values.dtype == torch.float64
            torch.testing.assert_close(values[row], expected)
        torch.testing.assert_close(batch.mean_states[row], response.mean(dim=0))


def test_padded_copy_is_bounded(make_calculator, monkeypatch):
    sizes = []
    original = RepresentationMetricsCalculator._measure

    def spy(self, hidden_states, *args, **kwargs):
        sizes.append(hidden_states.nbytes)
        return original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(RepresentationMetricsCalculator, "_measure", spy)
    monkeypatch.setattr("verl.rank.calculator.PADDED_BYTES", 3 * 10 * 6 * 4)
    measured = make_calculator().measure([torch.randn(length, 1, 6) for length in (10, 9, 8, 7)])
    assert sizes == [720, 168] and len(measured) == 4
