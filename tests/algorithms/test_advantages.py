"""Advantage estimators: what all of them promise, numbers worked out by hand, and each against the others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from tests.kit import f64
from verl.algorithms.advantages.estimators import (
    gae_advantages,
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    opo_advantages,
    optimal_token_baseline_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    token_variances,
    whitened,
)

NAN = float("nan")
seeds = st.integers(0, 2**31 - 1)
strict = {"rtol": 1e-12, "atol": 0}

# Each takes token rewards [B, R], values [B, R], mask [B, R], group ids [B] and baseline scores [B].
ESTIMATORS = {
    "gae_advantages": lambda r, v, m, g, s: gae_advantages(r, v, m, 0.9, 0.8)[0],
    "gae_returns": lambda r, v, m, g, s: gae_advantages(r, v, m, 0.9, 0.8)[1],
    "whitened": lambda r, v, m, g, s: whitened(r, m),
    "grpo": lambda r, v, m, g, s: grpo_advantages(r, m, g, True),
    "dr_grpo": lambda r, v, m, g, s: grpo_advantages(r, m, g, False),
    "rloo": lambda r, v, m, g, s: rloo_advantages(r, m, g),
    "reinforce++": lambda r, v, m, g, s: reinforce_plus_plus_advantages(r, m, 0.9),
    "reinforce++_baseline": lambda r, v, m, g, s: reinforce_plus_plus_baseline_advantages(r, m, g, m),
    "gpg": lambda r, v, m, g, s: gpg_advantages(r, m, g, m),
    "opo": lambda r, v, m, g, s: opo_advantages(r, m, g),
    "grpo_passk": lambda r, v, m, g, s: grpo_passk_advantages(r, m, g, True),
    "optimal_token_baseline": lambda r, v, m, g, s: optimal_token_baseline_advantages(r, m, g, v.square()),
    "remax": lambda r, v, m, g, s: remax_advantages(r, m, s),
}
OF_THE_BATCH = ("whitened", "reinforce++", "reinforce++_baseline", "gpg")
"""Those that put the whole batch on one scale."""


def batch(seed):
    """Six responses of up to five tokens, some empty, with gaps; two groups, interleaved."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < torch.rand(6, 1, generator=generator) * 1.5
    return rewards, values, mask, torch.tensor([4, -1, 4, -1, -1, 4]), torch.randn(6, generator=generator)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=seeds, padding=st.sampled_from([NAN, float("inf"), -1e30, 7.0]))
@settings(max_examples=20, deadline=None)
def test_padding_order_and_float32_never_matter(name, seed, padding):
    rewards, values, mask, groups, scores = tensors = batch(seed)
    estimate, copies = ESTIMATORS[name], [tensor.clone() for tensor in tensors]
    clean = estimate(rewards.where(mask, 0.0), values.where(mask, 0.0), mask, groups, scores)
    assert clean.isfinite().all() and not clean[~mask].any()
    # What stands on padding, and how much of it there is.
    dirty = rewards.where(mask, padding), values.where(mask, padding)
    assert torch.equal(estimate(*dirty, mask.long(), groups, scores), clean)
    wide = estimate(*(pad(t, (2, 3), value=padding) for t in dirty), pad(mask, (2, 3)), groups, scores)
    torch.testing.assert_close(wide[:, 2:-3], clean, rtol=1e-12, atol=1e-12)
    # The order of the responses.
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(estimate(*(t[order] for t in tensors)), clean[order], rtol=1e-10, atol=1e-12)
    # Rewards in float32 lose nothing inside.
    single, double = (estimate(r, *tensors[1:]) for r in (rewards.float(), rewards.float().double()))
    assert torch.equal(single, double.float())
    # A prompt by itself has the same advantages.
    for group in (4, -1) if name not in OF_THE_BATCH else ():
        rows = groups == group
        torch.testing.assert_close(estimate(*(t[rows] for t in tensors)), clean[rows], rtol=1e-10, atol=1e-12)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert estimate(*(tensor[:0] for tensor in tensors)).shape == (0, 5)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_tokens_of_an_environment_never_count(name, seed):
    rewards, values, mask, groups, scores = batch(seed)
    moved = [torch.zeros_like(t) for t in (rewards, values, mask)]
    for row, positions in enumerate(mask):
        for column, position in enumerate(positions.nonzero().flatten()):
            for to, tensor in zip(moved, (rewards, values, mask), strict=True):
                to[row, column] = tensor[row, position]
    apart, together = (ESTIMATORS[name](*tensors, groups, scores) for tensors in ((rewards, values, mask), moved))
    torch.testing.assert_close(apart[mask], together[moved[2]], rtol=1e-10, atol=1e-12)


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_token_baseline_agrees_with_a_loop_over_tokens(seed):
    rewards, values, mask, groups, _ = batch(seed)
    expected = torch.zeros_like(rewards)
    places = [row.nonzero().flatten().tolist() for row in mask]
    for i, t in ((i, t) for i, own in enumerate(places) for t in range(len(own))):
        sums = [0.0, 0.0, 0]
        for j, own in enumerate(places):
            if groups[i] == groups[j] and t < len(own):
                weight = sum(float(values[j, k]) ** 2 for k in own[: t + 1])
                sums[0] += weight * sum(float(rewards[j, k]) for k in own[t:])
                sums[1] += weight
                sums[2] += 1
        baseline = sums[0] / (sums[1] + 1e-8) if sums[2] > 1 else 0.0
        expected[i, places[i][t]] = sum(float(rewards[i, k]) for k in places[i][t:]) - baseline
    actual = optimal_token_baseline_advantages(rewards, mask, groups, values.square())
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


A, B, GROUPS = torch.ones(2, 2), torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gae_advantages(A, B, A, 1.0, 1.0), r"rewards \(2, 2\), values \(2, 3\), response_mask \(2, 2\)"),
        (lambda: reinforce_plus_plus_advantages(A, B, 1.0), r"token_rewards \(2, 2\), response_mask \(2, 3\)"),
        (lambda: remax_advantages(A, A, A[:, :1]), r"baseline_scores \(2, 1\): expected \[B, R\], \[B, R\] and \[B\]"),
        (lambda: whitened(A, A[0]), r"advantages \(2, 2\), response_mask \(2,\)"),
        (lambda: grpo_advantages(A, A, GROUPS, norm_by_std=True), r"group_ids \(4,\)"),
        (lambda: reinforce_plus_plus_baseline_advantages(A, A, GROUPS[:2], B), r"learned_mask \(2, 3\)"),
    ],
)
def test_shapes_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def random_batch(seed, rows=3, columns=5):
    """Rewards, values and a mask of responses of random lengths; 100 and -100 on padding."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    mask = torch.arange(columns) < torch.randint(0, columns + 1, (rows, 1), generator=generator)
    return rewards.where(mask, 100.0), values.where(mask, -100.0), mask


# Group 7 has scores 1 and -1 (mean 0, unbiased std sqrt 2); group 3 has 1, 0.5, 0 (mean 0.5, std 0.5).
PAIR_AND_TRIPLE = (
    f64([0.0, 1.0], [1.0, 9.0], [0.25, 0.25], [-1.0, 9.0], [0.0, 0.0]),
    [[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]],
    [7, 3, 3, 7, 3],
)
SQRT2, HALF = 1 / (2**0.5 + 1e-6), 0.5 / (0.5 + 1e-6)
# Group 7 has scores 1, 4 and 2, of variance 7/3; the two best of group 3 are alike.
BEST = (
    f64([1.0, 0.0], [1.0, 3.0], [0.0, 5.0], [2.0, 0.0], [5.0, 0.0]),
    [[1, 0], [1, 1], [1, 1], [1, 0], [1, 0]],
    [7, 7, 3, 7, 3],
)
LEAD = 2 / ((7 / 3) ** 0.5 + 1e-6)
# Group 7 has scores 1 and 0, group 3 has 0, 0 and 3; two of five scores are not 0.
SPARSE = (
    f64([0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0, 1.0]),
    [[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]],
    [7, 7, 3, 3, 3],
)
# Group 7 has scores 3 and 1 (mean 2) on 2 tokens and 1; group 3 has 0 and 0 on one token each.
# Tokens 1, 1, -1, 0, 0: mean 0.2, unbiased variance (0.64 + 0.64 + 1.44 + 0.04 + 0.04) / 4 = 0.7.
CENTRED = (f64([1.0, 2.0], [0.0, 9.0], [1.0, 9.0], [0.0, 9.0]), [[1, 1], [1, 0], [1, 0], [1, 0]], [7, 3, 7, 3])
STD = 0.7**0.5 + 1e-8
# Scores 2 and 0 beside 1.125 and 0.875: 1, -1, 0.125 and -0.125 have variance (1 + 1 + 1/64 + 1/64) / 3 = 65/96.
NEARLY_EQUAL = (f64([2.0], [0.0], [1.125], [0.875]), [[1]] * 4, [0, 0, 1, 1])
SMALL = (65 / 96) ** 0.5 + 1e-8
# A single response of score 3 among scores 1 and 4.
ALONE = (f64([1.0], [3.0], [4.0]), [[1]] * 3, [9, 4, 9])
# The first response has returns 1, 1, 1 and weights 1, 2, 4, the second returns 0, 0 and weights 3, 5: baselines of
# 1/4, 2/7 and 1. The third has no others.
TOKENS = (f64([0.0, 0.0, 1.0], [0.0, 0.0, 9.0], [2.0, 9.0, 9.0]), [[1, 1, 1], [1, 1, 0], [1, 0, 0]], [7, 7, 3])
VARIANCES = f64([1.0, 1.0, 2.0], [3.0, 2.0, 9.0], [1.0, 9.0, 9.0])


def grpo(rewards, mask, groups):
    return grpo_advantages(rewards, mask, groups, norm_by_std=True)


def dr_grpo(rewards, mask, groups):
    return grpo_advantages(rewards, mask, groups, norm_by_std=False)


def passk(norm_by_std):
    return lambda *batch: grpo_passk_advantages(*batch, norm_by_std)


def learning_from(estimate, rows):
    """``estimate`` with a ``learned_mask`` of the responses that are 1 in ``rows``; of all of them if it is None."""
    return lambda rewards, mask, groups: estimate(
        rewards, mask, groups, mask if rows is None else mask * torch.tensor(rows)[:, None]
    )


def token_baseline(variances=VARIANCES):
    return lambda *batch: optimal_token_baseline_advantages(*batch, variances)


gpg, baseline = (learning_from(f, None) for f in (gpg_advantages, reinforce_plus_plus_baseline_advantages))


@pytest.mark.parametrize(
    ("estimate", "batch", "expected"),
    [
        (grpo, PAIR_AND_TRIPLE, [[SQRT2, SQRT2], [HALF, 0], [0, 0], [-SQRT2, 0], [-HALF, -HALF]]),
        (dr_grpo, PAIR_AND_TRIPLE, [[1, 1], [0.5, 0], [0, 0], [-1, 0], [-0.5, -0.5]]),
        # The others of group 3 have means 0.25, 0.5 and 0.75.
        (rloo_advantages, PAIR_AND_TRIPLE, [[2, 2], [0.75, 0], [0, 0], [-2, 0], [-0.75, -0.75]]),
        (passk(False), BEST, [[0, 0], [2, 2], [0, 0], [0, 0], [0, 0]]),
        (passk(True), BEST, [[0, 0], [LEAD, LEAD], [0, 0], [0, 0], [0, 0]]),
        (gpg, SPARSE, [[1.25, 1.25], [-1.25, 0], [-2.5, -2.5], [-2.5, -2.5], [5, 5]]),
        # Filler, here group 3, does not scale the others: one of two scores is not 0. It keeps its place in its group.
        (learning_from(gpg_advantages, [1, 1, 0, 0, 0]), SPARSE, [[1, 1], [-1, 0], [-2, -2], [-2, -2], [4, 4]]),
        (learning_from(gpg_advantages, [0] * 5), (0 * SPARSE[0], *SPARSE[1:]), [[0, 0]] * 5),
        # A score of 1 with one token and a score of 0 with three: the mean weighted by length is 1/4.
        (
            opo_advantages,
            (f64([1.0, 9.0, 9.0], [0.0, 0.0, 0.0]), [[1, 0, 0], [1, 1, 1]], [7, 7]),
            [[0.75, 0, 0], [-0.25, -0.25, -0.25]],
        ),
        (baseline, CENTRED, [[0.8 / STD, 0.8 / STD], [-0.2 / STD, 0], [-1.2 / STD, 0], [-0.2 / STD, 0]]),
        (baseline, NEARLY_EQUAL, [[1 / SMALL], [-1 / SMALL], [0.125 / SMALL], [-0.125 / SMALL]]),
        # Scores 3 and 1 (mean 2) and a third of 2, not learned from: 1 and -1 have mean 0 and unbiased variance 2.
        (
            learning_from(reinforce_plus_plus_baseline_advantages, [1, 1, 0]),
            (f64([3.0], [1.0], [2.0]), [[1]] * 3, [0] * 3),
            [[1 / (2**0.5 + 1e-8)], [-1 / (2**0.5 + 1e-8)], [0]],
        ),
        # A response without others keeps its score.
        (dr_grpo, ALONE, [[-1.5], [3.0], [1.5]]),
        (grpo, ALONE, [[-1.5 / (4.5**0.5 + 1e-6)], [3 / (1 + 1e-6)], [1.5 / (4.5**0.5 + 1e-6)]]),
        (rloo_advantages, ALONE, [[-3.0], [3.0], [3.0]]),
        (gpg, ALONE, [[-1.5], [3.0], [1.5]]),
        (opo_advantages, ALONE, [[-1.5], [3.0], [1.5]]),
        (token_baseline(torch.ones(3, 1)), ALONE, [[-1.5], [3.0], [1.5]]),
        (baseline, ALONE, [[-2.5 / 5.25**0.5], [2 / 5.25**0.5], [0.5 / 5.25**0.5]]),
        # The first response alone goes on to a third token, which keeps its return.
        (token_baseline(), TOKENS, [[3 / 4, 5 / 7, 1], [-1 / 4, -2 / 7, 0], [2, 0, 0]]),
    ],
)
def test_literal_advantages_of_groups(estimate, batch, expected):
    rewards, mask, groups = batch[0], torch.tensor(batch[1]), torch.tensor(batch[2])
    advantages = estimate(rewards, mask, groups)
    # The epsilons of some divisors are left out of what is expected.
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=2e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("rewards", "values", "mask", "advantages", "returns"),
    [
        # gamma = lam = 1/2, from the last token backwards. Three tokens: delta = 4 - 8 = -4, 2 + 8/2 - 4 = 2,
        # 1 + 4/2 - 2 = 1; A = -4, 2 - 4/4 = 1, 1 + 1/4 = 1.25.
        ([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [1, 1, 1], [1.25, 1.0, -4.0], [3.25, 5.0, 4.0]),
        # Two tokens: delta = 1 - 0.25 = 0.75, 0 + 0.25/2 - 0.5 = -0.375; A = 0.75, -0.375 + 0.75/4 = -0.1875.
        ([0.0, 1.0, NAN], [0.5, 0.25, NAN], [1, 1, 0], [-0.1875, 0.75, 0.0], [0.3125, 1.0, 0.0]),
        ([5.0, 5.0, 5.0], [5.0, 5.0, 5.0], [0, 0, 0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        # With a gap, the last token's delta is 4 - 8 = -4; the next value of the first is 8: 1 + 8/2 - 2 = 3;
        # A = 3 - 4/4 = 2.
        ([1.0, NAN, 4.0], [2.0, NAN, 8.0], [1, 0, 1], [2.0, 0.0, -4.0], [4.0, 0.0, 4.0]),
    ],
)
def test_literal_advantages_over_a_critic(rewards, values, mask, advantages, returns):
    actual = gae_advantages(f64(rewards), f64(values), torch.tensor([mask]), gamma=0.5, lam=0.5)
    assert [t.tolist() for t in actual] == [[advantages], [returns]]


def test_computed_in_float64_and_returned_in_the_dtype():
    # 1 - 2**25 has no float32: the last return, that advantage plus 2**25, would come back as 0 instead of 1.
    rewards, values = torch.tensor([[2.0**25, 1.0]]), f64([0.0, 2.0**25])
    advantages, returns = gae_advantages(rewards, values, torch.ones(1, 2), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[2.0**25, -(2.0**25)]] and returns.tolist() == [[2.0**25, 1.0]]
    assert advantages.dtype == returns.dtype == torch.float32
    # Around 2**24 float32 resolves whole numbers only: a float32 sum would lose the deviations.
    result = whitened(torch.tensor([[16777214.0, 16777215.0, 16777216.0]]), torch.ones(1, 3))
    assert result.dtype == torch.float32 and result.tolist() == [[-1.0, 0.0, 1.0]]


@given(seeds, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_gae_is_the_weighted_sum_of_one_step_differences(seed, gamma, lam):
    rewards, values, mask = random_batch(seed)
    # lam = 0: the temporal difference itself.
    after = torch.cat([values.where(mask, 0.0), values.new_zeros(3, 1)], dim=1)
    deltas = (rewards + gamma * after[:, 1:] - after[:, :-1]).where(mask, 0.0)
    actual, returns = gae_advantages(rewards, values, mask, gamma, lam=0.0)
    torch.testing.assert_close(actual, deltas, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, (deltas + values).where(mask, 0.0), rtol=0, atol=1e-12)
    # Eq. 16 of the paper.
    advantages, _ = gae_advantages(rewards, values, mask, gamma, lam)
    for t in range(5):
        expected = sum((gamma * lam) ** (later - t) * deltas[:, later] for later in range(t, 5)) * mask[:, t]
        torch.testing.assert_close(advantages[:, t], expected, rtol=0, atol=1e-12)
    # A critic that knows the returns leaves no advantage.
    _, perfect = gae_advantages(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)
    advantages, returns = gae_advantages(rewards, perfect, mask, gamma, lam)
    torch.testing.assert_close(advantages, torch.zeros_like(rewards), rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, perfect, rtol=0, atol=1e-12)


@given(seeds, st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_estimators_that_are_special_cases_of_others(seed, gamma):
    rewards, _, mask = random_batch(seed, rows=6)
    generator = torch.Generator().manual_seed(seed)
    mask &= torch.rand(6, 5, generator=generator) < 0.7
    groups, greedy = torch.arange(6) % 2, torch.randn(6, generator=generator, dtype=torch.float64)
    close = {"rtol": 1e-10, "atol": 1e-12}
    # ReMax: a critic that says the score of the greedy response. REINFORCE++: one that says 0.
    expected, _ = gae_advantages(rewards, greedy[:, None].expand(6, 5), mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(remax_advantages(rewards, mask, greedy), expected, **close)
    returns, _ = gae_advantages(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)
    actual = reinforce_plus_plus_advantages(rewards, mask, gamma)
    torch.testing.assert_close(actual, whitened(returns, mask), **close)
    # Of Dr.GRPO: whitened, and times n / (n - 1).
    relative = dr_grpo(rewards, mask, groups)
    torch.testing.assert_close(baseline(rewards, mask, groups), whitened(relative, mask), **close)
    torch.testing.assert_close(rloo_advantages(rewards, mask, groups), relative * 3 / 2, **close)


def test_literal_advantages_over_a_greedy_response():
    # Rewards to go: 7, 6, 4 minus 3; 1, 1 minus -0.5; with a gap 5, 4 minus 1.
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, NAN], [1.0, NAN, 4.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]])
    advantages = remax_advantages(rewards, mask, torch.tensor([3.0, -0.5, 1.0, 2.0]))
    assert advantages.tolist() == [[4.0, 3.0, 1.0], [1.5, 1.5, 0.0], [4.0, 0.0, 3.0], [0.0, 0.0, 0.0]]
    assert advantages.dtype == torch.float32


THIRD = (4 / 3) ** 0.5 + 1e-8


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        # Returns 2, 4 and 2 have mean 8/3 and unbiased variance (4/9 + 16/9 + 4/9) / 2 = 4/3; 4, 4 and 2 mean 10/3 and
        # the same variance; the rewards 0, 4 and 2 themselves mean 2 and std 2.
        (0.5, [[-2 / 3 / THIRD, 4 / 3 / THIRD], [-2 / 3 / THIRD, 0.0]]),
        (1.0, [[2 / 3 / THIRD, 2 / 3 / THIRD], [-4 / 3 / THIRD, 0.0]]),
        (0.0, [[-2 / (2 + 1e-8), 2 / (2 + 1e-8)], [0.0, 0.0]]),
    ],
)
def test_literal_whitened_returns(gamma, expected):
    rewards, mask = f64([0.0, 4.0], [2.0, NAN]), torch.tensor([[1, 1], [1, 0]])
    actual = reinforce_plus_plus_advantages(rewards, mask, gamma)
    torch.testing.assert_close(actual, f64(*expected), rtol=1e-12, atol=1e-15)


def test_literal_whitening():
    # Tokens 1, 5, 3, 3: mean 3, squared deviations 4 + 4 + 0 + 0 over 3, std sqrt(8/3). The 9s are padding.
    a = 2 / ((8 / 3) ** 0.5 + 1e-8)
    actual = whitened(f64([1.0, 5.0], [3.0, 9.0], [9.0, 3.0]), torch.tensor([[1, 1], [1, 0], [0, 1]]))
    torch.testing.assert_close(actual, f64([-a, a], [0.0, 0.0], [0.0, 0.0]), **strict)
    # Mean 0 and std 1e-8: half of the divisor is the epsilon.
    size = 1e-8 / 2**0.5
    torch.testing.assert_close(
        whitened(f64([size, -size]), torch.ones(1, 2)), f64([0.5 / 2**0.5, -0.5 / 2**0.5]), **strict
    )
    # Nothing to compare.
    assert whitened(f64([0.5, 0.5], [0.5, 7.0]), torch.tensor([[1, 1], [1, 0]])).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    for mask in ([[1, 0]], [[0, 0]]):
        assert whitened(f64([4.0, NAN]), torch.tensor(mask)).tolist() == [[0.0, 0.0]]


def test_token_variance_is_the_squared_gradient_norm():
    logits = f64(0.5, 0.3, 0.2).log().requires_grad_()
    for token, expected in enumerate([0.38, 0.78, 0.98]):
        logprob = logits.log_softmax(0)[token]
        (gradient,) = torch.autograd.grad(logprob, logits)
        assert gradient.square().sum().item() == pytest.approx(expected)
        assert token_variances(logprob, torch.tensor(0.38)).item() == pytest.approx(expected)
