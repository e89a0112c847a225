"""What every advantage estimator promises, whatever its formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import (
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
    whitened,
)

# Each takes token rewards [B, R], values [B, R], mask [B, R], group ids [B] and baseline scores [B].
ESTIMATORS = {
    "gae_advantages": lambda rewards, values, mask, groups, scores: gae_advantages(rewards, values, mask, 0.9, 0.8)[0],
    "gae_returns": lambda rewards, values, mask, groups, scores: gae_advantages(rewards, values, mask, 0.9, 0.8)[1],
    "whitened": lambda rewards, values, mask, groups, scores: whitened(rewards, mask),
    "grpo": lambda rewards, values, mask, groups, scores: grpo_advantages(rewards, mask, groups, True),
    "dr_grpo": lambda rewards, values, mask, groups, scores: grpo_advantages(rewards, mask, groups, False),
    "rloo": lambda rewards, values, mask, groups, scores: rloo_advantages(rewards, mask, groups),
    "reinforce++": lambda rewards, values, mask, groups, scores: reinforce_plus_plus_advantages(rewards, mask, 0.9),
    "reinforce++_baseline": lambda rewards, values, mask, groups, scores: reinforce_plus_plus_baseline_advantages(
        rewards, mask, groups, mask
    ),
    "gpg": lambda rewards, values, mask, groups, scores: gpg_advantages(rewards, mask, groups, mask),
    "opo": lambda rewards, values, mask, groups, scores: opo_advantages(rewards, mask, groups),
    "grpo_passk": lambda rewards, values, mask, groups, scores: grpo_passk_advantages(rewards, mask, groups, True),
    "optimal_token_baseline": lambda rewards, values, mask, groups, scores: optimal_token_baseline_advantages(
        rewards, mask, groups, values.square(), True
    ),
    "remax": lambda rewards, values, mask, groups, scores: remax_advantages(rewards, mask, scores),
}
OF_THE_BATCH = ("whitened", "reinforce++", "reinforce++_baseline", "gpg")
"""Those that put the whole batch on one scale."""

each_estimator = pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS.keys())
seeds = st.integers(0, 2**31 - 1)


def batch(seed):
    """Six responses of up to five tokens, some empty, with gaps; two groups, interleaved."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < torch.rand(6, 1, generator=generator) * 1.5
    return rewards, values, mask, torch.tensor([4, -1, 4, -1, -1, 4]), torch.randn(6, generator=generator)


@each_estimator
@given(seed=seeds, padding=st.sampled_from([float("nan"), float("inf"), -1e30, 7.0]))
@settings(max_examples=20, deadline=None)
def test_what_stands_on_padding_never_matters(estimate, seed, padding):
    rewards, values, mask, groups, scores = batch(seed)
    clean = estimate(rewards.where(mask, 0.0), values.where(mask, 0.0), mask, groups, scores)
    dirty = estimate(rewards.where(mask, padding), values.where(mask, padding), mask.long(), groups, scores)
    assert torch.equal(dirty, clean)
    assert clean.isfinite().all()
    assert not clean[~mask].any()


@each_estimator
@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_more_padding_never_matters(estimate, seed):
    rewards, values, mask, groups, scores = batch(seed)

    def wider(tensor):
        return torch.nn.functional.pad(tensor, (2, 3), value=0 if tensor is mask else 5)

    result = estimate(wider(rewards), wider(values), wider(mask), groups, scores)
    expected = estimate(rewards, values, mask, groups, scores)
    torch.testing.assert_close(result[:, 2:-3], expected, rtol=1e-12, atol=1e-12)


@each_estimator
@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_permuting_responses_permutes_the_result(estimate, seed):
    tensors = batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    permuted = estimate(*(tensor[order] for tensor in tensors))
    torch.testing.assert_close(permuted, estimate(*tensors)[order], rtol=1e-10, atol=1e-12)


@each_estimator
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_float32_rewards_lose_nothing_inside(estimate, seed):
    rewards, values, mask, groups, scores = batch(seed)
    single = estimate(rewards.float(), values, mask, groups, scores)
    double = estimate(rewards.float().double(), values, mask, groups, scores)
    assert torch.equal(single, double.float())


@each_estimator
def test_inputs_are_not_changed_and_an_empty_batch_is_empty(estimate):
    tensors = batch(0)
    copies = [tensor.clone() for tensor in tensors]
    estimate(*tensors)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert estimate(*(tensor[:0] for tensor in tensors)).shape == (0, 5)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in OF_THE_BATCH])
@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_a_prompt_by_itself_has_the_same_advantages(name, seed):
    tensors = batch(seed)
    whole = ESTIMATORS[name](*tensors)
    for group in (4, -1):
        rows = tensors[3] == group
        alone = ESTIMATORS[name](*(tensor[rows] for tensor in tensors))
        torch.testing.assert_close(alone, whole[rows], rtol=1e-10, atol=1e-12)


ONES, ALL_ONE = torch.ones(3, 1), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "estimate",
    [
        lambda scores: grpo_advantages(scores, ONES, ALL_ONE, norm_by_std=True),
        lambda scores: rloo_advantages(scores, ONES, ALL_ONE),
        lambda scores: reinforce_plus_plus_advantages(scores, ONES, gamma=1.0),
        lambda scores: reinforce_plus_plus_baseline_advantages(scores, ONES, ALL_ONE, ONES),
        lambda scores: whitened(scores, ONES),
    ],
    ids=["grpo", "rloo", "reinforce++", "reinforce++_baseline", "whitened"],
)
@pytest.mark.parametrize("score", [0.5, 0.1])
def test_equal_scores_give_zero_advantage(estimate, score):
    advantages = estimate(torch.full((3, 1), score))
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [[0.0], [0.0], [0.0]]


A, B, GROUPS = torch.ones(2, 2), torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: gae_advantages(A, B, A, 1.0, 1.0),
            r"token_rewards \(2, 2\), values \(2, 3\), response_mask \(2, 2\)",
        ),
        (lambda: reinforce_plus_plus_advantages(A, B, 1.0), r"token_rewards \(2, 2\), response_mask \(2, 3\)"),
        (lambda: remax_advantages(A, A, A[:, :1]), r"baseline_scores \(2, 1\): expected \[B, R\], \[B, R\] and \[B\]"),
        (lambda: whitened(A, A[0]), r"advantages \(2, 2\), response_mask \(2,\)"),
        (lambda: grpo_advantages(A, A, GROUPS, norm_by_std=True), r"group_ids \(4,\)"),
        (lambda: rloo_advantages(A, A, GROUPS), r"group_ids \(4,\)"),
        (lambda: reinforce_plus_plus_baseline_advantages(A, A, GROUPS, A), r"group_ids \(4,\)"),
    ],
)
def test_shapes_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()
