import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.losses import gmpo_loss, loss_weights, mean_rollout_weight, ppo_clip_loss, rollout_weights


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


# token ratios trainer / rollout 4, 0.5 | 0.5, 0.5, 0.25 | 1.5
RATIOS = [[4.0, 0.5, 9.0], [0.5, 0.5, 0.25], [1.5, 9.0, 9.0]]
MASK = [[1, 1, 0], [1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("level", "cap", "expected", "total", "capped"),
    [
        ("token", 2.0, [[2.0, 0.5, 0.0], [0.5, 0.5, 0.25], [1.5, 0.0, 0.0]], 5.25, 1),
        # products 2, 1/16, 1.5
        ("sequence", 2.5, [[2.0, 2.0, 0.0], [0.0625, 0.0625, 0.0625], [1.5, 0.0, 0.0]], 5.6875, 0),
        ("sequence", 1.0, [[1.0, 1.0, 0.0], [0.0625, 0.0625, 0.0625], [1.0, 0.0, 0.0]], 3.1875, 3),
    ],
)
def test_literal_weights(level, cap, expected, total, capped):
    old = f64(RATIOS).log().requires_grad_()
    weights, metrics = rollout_weights(old - 1.0, torch.full_like(old, -1.0), torch.tensor(MASK), level, cap)
    torch.testing.assert_close(weights, f64(expected), rtol=1e-12, atol=0)
    assert not weights.requires_grad
    assert metrics["tis_weight"].item() == pytest.approx(total, rel=1e-12)
    assert metrics["tis_capped"].item() == capped
    assert metrics["num_tokens"].item() == 6


def test_gmpo_takes_the_geometric_mean_of_a_responses_weights():
    weights = f64([[2.0, 0.5, 0.0], [4.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    for loss in ("ppo_clip", "gspo", "cispo"):
        assert loss_weights(loss, weights, mask) is weights
    expected = f64([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(loss_weights("gmpo", weights, mask), expected, rtol=1e-9, atol=0)
    vanished = loss_weights("gmpo", f64([[1.0, 0.0]]), torch.ones(1, 2))
    torch.testing.assert_close(vanished, f64([[1e-5, 1e-5]]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_padding_never_matters(level):
    nan, inf = math.nan, math.inf
    old = torch.tensor([[-1.0, nan, inf], [nan, -inf, inf]])
    rollout = torch.tensor([[-1.5, 0.0, inf], [inf, nan, 0.0]])
    mask = torch.tensor([[1, 0, 0], [0, 0, 0]])
    weights, metrics = rollout_weights(old, rollout, mask, level, 2.0)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(0.5), 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics["tis_weight"].item() == pytest.approx(math.exp(0.5))
    assert (metrics["tis_capped"].item(), metrics["num_tokens"].item()) == (0, 1)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_log_ratio_overflows(level):
    old = torch.tensor([[-1.0], [-500.0], [-1.0]])
    rollout = torch.tensor([[-500.0], [-1.0], [-math.inf]])
    weights, metrics = rollout_weights(old, rollout, torch.ones(3, 1), level, 2.0)
    assert weights.tolist() == [[2.0], [0.0], [2.0]]
    assert metrics["tis_capped"].item() == 2
    uncapped, _ = rollout_weights(old, rollout, torch.ones(3, 1), level, 1e30)
    torch.testing.assert_close(uncapped, torch.tensor([[math.exp(20)], [0.0], [math.exp(20)]]))


@given(st.integers(0, 2**31 - 1), st.sampled_from(["token", "sequence"]), st.floats(0.1, 5))
@settings(max_examples=60, deadline=None)
def test_bounded_additive_and_one_where_the_engines_agree(seed, level, cap):
    generator = torch.Generator().manual_seed(seed)
    old, rollout = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.randint(0, 5, (5, 1), generator=generator)
    weights, metrics = rollout_weights(old, rollout, mask, level, cap)
    assert (weights[mask] > 0).all()
    assert (weights[mask] <= cap).all()
    assert (weights[~mask] == 0).all()
    for i in range(5):
        alone, _ = rollout_weights(old[i : i + 1], rollout[i : i + 1], mask[i : i + 1], level, cap)
        torch.testing.assert_close(alone, weights[i : i + 1])
        if level == "sequence" and mask[i].any():
            product = math.prod(math.exp(float(d)) for d in (old - rollout)[i][mask[i]])
            assert float(weights[i, 0]) == pytest.approx(min(product, cap), rel=1e-9)
    parts = [rollout_weights(old[i], rollout[i], mask[i], level, cap)[1] for i in torch.arange(5).split([2, 3])]
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value)
    agreeing, metrics = rollout_weights(old, old, mask, level, 1.0)
    assert torch.equal(agreeing, mask.double())
    assert metrics["tis_capped"].item() == 0


def test_weights_divided_by_their_mean_are_advantages_divided_by_it():
    old, rollout, mask = f64(RATIOS).log(), torch.zeros(3, 3, dtype=torch.float64), torch.tensor(MASK)
    # 5.25 over 6 tokens; (2 + 1/16 + 1.5) over 3 responses
    assert mean_rollout_weight(old, rollout, mask, "token", 2.0) == 0.875
    mean = mean_rollout_weight(old, rollout, mask, "sequence", 2.5)
    assert mean == 1.1875
    assert mean_rollout_weight(old, rollout + 100, mask, "token", 2.0) == 1.0
    weights, _ = rollout_weights(old, rollout, mask, "sequence", 2.5)
    logprobs, advantages = old + f64([[0.5, -0.5, 0], [0.1, 0.9, -2], [2, 0, 0]]), f64([[1.0], [-2.0], [-1.0]])
    for loss in (gmpo_loss, lambda *parts: ppo_clip_loss(*parts, clip_ratio_c=3.0)):
        by_weight, _ = loss(logprobs, old, advantages.expand(3, 3), mask, 0.2, 0.2)
        by_advantage, _ = loss(logprobs, old, advantages.expand(3, 3) / mean, mask, 0.2, 0.2)
        torch.testing.assert_close(by_weight * (weights / mean), by_advantage * weights)
