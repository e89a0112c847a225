"""The public functions: what every method must agree on, invariances, degenerate input, options."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.spectral import SpectralOptions, prefix_functionals, prefix_singular_values, prefix_spectral_sums
from verl.spectral.functions import SUM_S, SUM_S_LOG_S, SpectralFunction

NESTED, EIGH, SVD = (SpectralOptions(method) for method in ("nested", "eigh", "svd"))
ENTROPIES = ["effective_rank", "response_entropy"]
ALL = [*ENTROPIES, "traditional_rank"]

seeds = st.integers(0, 2**31 - 1)
sizes = st.tuples(st.integers(3, 70), st.integers(1, 60))
every_method = pytest.mark.parametrize("options", [NESTED, EIGH, SVD], ids=["nested", "eigh", "svd"])


def random_hidden(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_prefixes(length):
    return torch.arange(length + 1)[None]


def names_for(options):
    return ENTROPIES if options.method == "nested" else ALL


def assert_same(actual, expected, rtol=1e-9, atol=1e-9):
    assert list(actual) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(actual[name], values, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@every_method
def test_square_corners_have_two_equal_singular_values(options):
    # The centred corners of a square of side 2: both columns have norm 2 and are orthogonal.
    corners = torch.tensor([[[1.0, 1.0], [1.0, 3.0], [3.0, 1.0], [3.0, 3.0]]])
    lengths, rows = torch.tensor([4]), torch.tensor([[0, 1, 2, 4]])
    result = prefix_functionals(corners, lengths, rows, ENTROPIES, options)
    assert result["effective_rank"].tolist() == [[1.0, 1.0, 1.0, pytest.approx(2.0, rel=1e-6)]]
    assert result["response_entropy"].tolist() == [[0.0, 0.0, 0.0, pytest.approx(math.log(2), rel=1e-6)]]
    sums = prefix_spectral_sums(corners, lengths, rows, [SUM_S, SUM_S_LOG_S, SpectralFunction(3.0)], options)[:, 0]
    expected = [[0, 0, math.sqrt(2), 4], [0, 0, math.sqrt(0.5) * math.log(2), 4 * math.log(2)], [0, 0, 2**1.5, 16]]
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_singular_values_and_ranks_of_square_corners():
    corners = torch.tensor([[[1.0, 1.0], [1.0, 3.0], [3.0, 1.0], [3.0, 3.0]]])
    lengths, rows = torch.tensor([4]), torch.tensor([[0, 1, 2, 4]])
    expected = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [math.sqrt(2), 0.0], [2.0, 2.0]]], dtype=torch.float64)
    for options in (EIGH, SVD, SpectralOptions()):
        values = prefix_singular_values(corners, lengths, rows, options)
        torch.testing.assert_close(values, expected, rtol=1e-14, atol=1e-14)
        ranks = prefix_functionals(corners, lengths, rows, ["traditional_rank"], options)["traditional_rank"]
        assert ranks.tolist() == [[0.0, 0.0, 1.0, 2.0]]


@pytest.mark.slow
@given(seeds, sizes)
@settings(max_examples=30, deadline=None)
def test_methods_agree(seed, size):
    length, width = size
    hidden, lengths, rows = random_hidden(seed, 2, length, width), torch.tensor([length, length - 2]), None
    rows = torch.minimum(all_prefixes(length), lengths[:, None])
    exact = prefix_functionals(hidden, lengths, rows, ENTROPIES, SVD)
    assert_same(prefix_functionals(hidden, lengths, rows, ENTROPIES, EIGH), exact, rtol=1e-6, atol=1e-7)
    # A square Gaussian matrix may be ill-conditioned without bound.
    assert_same(prefix_functionals(hidden, lengths, rows, ENTROPIES, NESTED), exact, rtol=2e-6, atol=1e-7)


@every_method
@given(seeds, sizes)
@settings(max_examples=15, deadline=None)
def test_responses_are_independent_of_padding(options, seed, size):
    length, width = size
    generator = torch.Generator().manual_seed(seed)
    hidden = random_hidden(seed, 5, length, width)
    lengths = torch.randint(0, length + 1, (5,), generator=generator)
    rows = torch.minimum(all_prefixes(length), lengths[:, None])
    order = torch.randperm(5, generator=generator)
    names = names_for(options)
    whole = prefix_functionals(hidden, lengths, rows, names, options)
    spoilt = torch.cat([hidden, hidden[:, :3]], dim=1)[order]
    spoilt[torch.arange(length + 3) >= lengths[order, None]] = math.nan
    permuted = prefix_functionals(spoilt, lengths[order], rows[order], names, options)
    assert_same(permuted, {name: values[order] for name, values in whole.items()})


@every_method
@given(seeds, sizes, st.floats(0.01, 100.0))
@settings(max_examples=15, deadline=None)
def test_rotation_shift_and_scale_do_not_matter(options, seed, size, scale):
    length, width = size
    hidden = random_hidden(seed, 1, length, width)
    rotation = torch.linalg.qr(random_hidden(seed + 1, width, width)).Q
    shift = random_hidden(seed + 2, width)
    lengths, rows = torch.tensor([length]), all_prefixes(length)
    moved = prefix_functionals(scale * (hidden @ rotation + shift), lengths, rows, ENTROPIES, options)
    expected = prefix_functionals(hidden, lengths, rows, ENTROPIES, options)
    assert_same(moved, expected, rtol=1e-6, atol=1e-6)


@every_method
@given(seeds, sizes, st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_effective_rank_lies_between_one_and_the_rank(options, seed, size, inner):
    length, width = size
    hidden = random_hidden(seed, 1, length, inner) @ random_hidden(seed + 1, inner, width)
    rows = all_prefixes(length)
    result = prefix_functionals(hidden, torch.tensor([length]), rows, names_for(options), options)
    bound = (rows - 1).clamp(min=1, max=min(inner, width))
    assert (result["effective_rank"] >= 1).all()
    assert (result["effective_rank"] <= bound * (1 + 1e-6)).all()
    assert (result["response_entropy"] >= 0).all()
    assert (result["response_entropy"] <= result["effective_rank"].log() + 1e-6).all()
    if "traditional_rank" in result:
        assert (result["traditional_rank"] <= bound).all()


@every_method
@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("value", [0.0, 0.1, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_rows_are_degenerate(options, width, value, dtype):
    hidden = torch.full((2, 20, width), value, dtype=dtype)
    hidden[1, 12:] += random_hidden(0, 8, width).to(dtype) * 100
    rows = torch.tensor([[20, 11, 2, 1, 0], [12, 11, 2, 1, 0]])
    result = prefix_functionals(hidden, torch.tensor([20, 20]), rows, names_for(options), options)
    for name, values in result.items():
        assert values.tolist() == [[1.0 if name == "effective_rank" else 0.0] * 5] * 2, name


@every_method
def test_duplicate_rows_add_no_rank(options):
    distinct = random_hidden(0, 4, 30)
    hidden = distinct[torch.tensor([0, 1, 2, 3] * 10)][None]
    result = prefix_functionals(hidden, torch.tensor([40]), torch.tensor([[4, 40]]), names_for(options), options)
    # Forty rows hold each of the four ten times: the same shares as the four alone.
    for name, values in result.items():
        assert float(values[0, 1]) == pytest.approx(float(values[0, 0]), rel=1e-6), name


def test_rank_of_rows_that_span_fewer_dimensions():
    hidden = random_hidden(1, 1, 20, 3) @ random_hidden(2, 3, 16) + 5.0
    rows = torch.tensor([[1, 2, 3, 4, 5, 20]])
    for states in (hidden, hidden.float()):
        rank = prefix_functionals(states, torch.tensor([20]), rows, ["traditional_rank"])["traditional_rank"]
        assert rank.tolist() == [[0.0, 1.0, 2.0, 3.0, 3.0, 3.0]]


@every_method
def test_prefix_far_smaller_than_what_follows(options):
    # A token 1e9 times the rest must not drown the prefixes before it, in one block or in many.
    for width in (24, 6):
        hidden, lengths, rows = random_hidden(0, 1, 40, width), torch.tensor([40]), torch.tensor([[10, 20, 30, 33]])
        expected = prefix_functionals(hidden, lengths, rows, ENTROPIES, SVD)
        hidden[0, 33] *= 1e9
        assert_same(prefix_functionals(hidden, lengths, rows, ENTROPIES, options), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [(60, 90), (150, 20)], ids=["one block", "blocks"])
def test_neighbour_of_another_range_does_not_matter(size):
    # The second response reads shifts so small that the rounding of the first one's Gram matrix exceeds them.
    length = size[0]
    hidden, lengths = random_hidden(0, 2, *size), torch.tensor([length, length])
    hidden[0] = hidden[0, :, :2] @ random_hidden(1, 2, size[1])
    hidden[1, length - 5] *= 1e9
    rows = all_prefixes(length).repeat(2, 1)
    both = prefix_functionals(hidden, lengths, rows, ENTROPIES, NESTED)
    for response in range(2):
        alone = prefix_functionals(hidden[response, None], lengths[:1], rows[:1], ENTROPIES, NESTED)
        assert_same({name: values[response, None] for name, values in both.items()}, alone)


@every_method
@pytest.mark.parametrize("scale", [1e-180, 1e180])
def test_extreme_scales_stay_in_range(options, scale):
    hidden = random_hidden(0, 1, 9, 4)
    lengths, rows = torch.tensor([9]), torch.tensor([[9, 4]])
    expected = prefix_functionals(hidden, lengths, rows, ENTROPIES, options)
    assert_same(prefix_functionals(hidden * scale, lengths, rows, ENTROPIES, options), expected, rtol=1e-6)
    sums = prefix_spectral_sums(hidden * scale, lengths, rows, [SUM_S], options) / scale
    torch.testing.assert_close(sums, prefix_spectral_sums(hidden, lengths, rows, [SUM_S], options), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [(70, 90), (150, 20)], ids=["one block", "blocks"])
def test_workspace_does_not_change_the_result(size):
    hidden = random_hidden(0, 4, *size)
    lengths = torch.tensor([size[0], 4, 61, 6])
    rows = torch.minimum(all_prefixes(size[0]), lengths[:, None])
    whole = prefix_functionals(hidden, lengths, rows, ENTROPIES, NESTED)
    for workspace_bytes in (1, 100_000, 10**6):
        options = SpectralOptions("nested", workspace_bytes=workspace_bytes)
        assert_same(prefix_functionals(hidden, lengths, rows, ENTROPIES, options), whole, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("options", [NESTED, EIGH, SpectralOptions("eigh", svd_rank=2)], ids=["nested", "eigh", "low"])
def test_empty_batch_and_no_prefixes(options):
    for shape in ((0, 2), (2, 0)):
        lengths, rows = torch.full(shape[:1], 4), torch.zeros(shape).long()
        result = prefix_functionals(torch.ones(shape[0], 4, 3), lengths, rows, ENTROPIES, options)
        assert [tuple(values.shape) for values in result.values()] == [shape] * 2


def test_largest_singular_values_alone():
    hidden, lengths, rows = random_hidden(0, 1, 20, 12), torch.tensor([20]), torch.tensor([[20, 3]])
    for method in ("auto", "eigh", "svd"):
        options = SpectralOptions(method, svd_rank=4)
        values = prefix_singular_values(hidden, lengths, rows, options)
        full = prefix_singular_values(hidden, lengths, rows, SVD)
        torch.testing.assert_close(values[..., :4], full[..., :4], rtol=1e-9, atol=1e-9)
        assert not values[..., 4:].any()
        total = prefix_spectral_sums(hidden, lengths, rows, [SUM_S], options)[0]
        torch.testing.assert_close(total, full[..., :4].sum(-1), rtol=1e-9, atol=0)
        rank = prefix_functionals(hidden, lengths, rows, ["effective_rank"], options)["effective_rank"]
        assert (rank <= torch.tensor([[4.0, 2.0]])).all()


@every_method
def test_masked_responses(options):
    hidden = random_hidden(0, 3, 8, 5)
    lengths, rows = torch.tensor([8, 8, 6]), torch.tensor([[8, 3]] * 2 + [[6, 3]])
    names = names_for(options)
    masking = SpectralOptions(options.method, on_nonfinite="mask")
    whole = prefix_functionals(hidden, lengths, rows, names, masking)
    hidden[1, 7, 0] = math.inf
    with pytest.raises(ValueError, match="response 1: .*NaN or infinity"):
        prefix_functionals(hidden, lengths, rows, names, options)
    for name, values in prefix_functionals(hidden, lengths, rows, names, masking).items():
        assert values.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
        torch.testing.assert_close(values[[0, 2]], whole[name][[0, 2]], rtol=1e-9, atol=1e-9)
    sums = prefix_spectral_sums(hidden, lengths, rows, [SUM_S_LOG_S], masking)
    assert sums.isnan().tolist() == [[[False] * 2, [True] * 2, [False] * 2]]
    if options.method != "nested":
        values = prefix_singular_values(hidden, lengths, rows, masking)
        assert values.isnan().flatten(1).all(1).tolist() == [False, True, False]
        assert not values[[0, 2]].isnan().any()


HIDDEN, LENGTHS = random_hidden(0, 2, 5, 3), torch.tensor([5, 4])
WHOLE, EFFECTIVE_RANK = LENGTHS[:, None], ["effective_rank"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((HIDDEN[0], LENGTHS, WHOLE, EFFECTIVE_RANK), r"hidden: expected floating point \[B, T, D\]"),
        ((HIDDEN.to(torch.float8_e4m3fn), LENGTHS, WHOLE, EFFECTIVE_RANK), r"hidden: expected floating point"),
        ((HIDDEN, LENGTHS[:1], WHOLE, EFFECTIVE_RANK), r"lengths: expected integers \[2\]"),
        ((HIDDEN, torch.tensor([6, 4]), WHOLE, EFFECTIVE_RANK), "between 0 and the 5 padded rows"),
        ((HIDDEN, LENGTHS, torch.tensor([[5], [5]]), EFFECTIVE_RANK), "between 0 rows and the response's length"),
        ((HIDDEN, LENGTHS, LENGTHS, EFFECTIVE_RANK), r"prefix_rows: expected integers \[2, P\]"),
        ((HIDDEN, LENGTHS, WHOLE, ["rank"]), "names: 'rank' is not one of"),
        ((HIDDEN, LENGTHS, WHOLE, ["traditional_rank"], NESTED), "'nested'.*no singular values"),
        ((HIDDEN, LENGTHS, WHOLE, ENTROPIES, SpectralOptions(tolerance=1.0)), "tolerance=1.0"),
        ((HIDDEN, LENGTHS, WHOLE, ENTROPIES, SpectralOptions(condition=1e12)), "condition=1000000000000.0"),
        ((HIDDEN, LENGTHS, WHOLE, ENTROPIES, SpectralOptions(on_nonfinite="skip")), "on_nonfinite='skip'"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        prefix_functionals(*arguments)


@pytest.mark.parametrize(
    "options", [{"method": "qr"}, {"svd_rank": 0}, {"svd_rank": 3, "method": "nested"}, {"workspace_bytes": 0}], ids=str
)
def test_options_are_checked(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"^{name}={value!r}"):
        SpectralOptions(**options)


def test_nested_method_has_no_singular_values():
    with pytest.raises(ValueError, match="'nested'.*no singular values"):
        prefix_singular_values(HIDDEN, LENGTHS, WHOLE, NESTED)
    assert prefix_functionals(HIDDEN, LENGTHS, WHOLE, []) == {}
