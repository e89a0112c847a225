"""Which tokens the trainer's distance from the rollout engine rejects, and the weights of the others."""

import math

import pytest
import torch

from tests.kit import f64
from verl.algorithms.losses.per_token import gmpo_loss, ppo_clip_loss
from verl.algorithms.rollout_correction import (
    loss_weights,
    mean_rollout_weight,
    mismatch_metrics,
    rejection_mask,
    rollout_weights,
)

# Ratios trainer / rollout 4, 0.5 | 0.5, 1, 0.25 | 1. Their products: 2, 1/8, 1; geometric means: sqrt(2), 1/2, 1.
RATIOS = torch.tensor([[4.0, 0.5, 9.0], [0.5, 1.0, 0.25], [1.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
ROLLOUT = torch.full_like(RATIOS, -2.0)
OLD = ROLLOUT + RATIOS.log()
LOG2 = math.log(2)


VETO = ("seq_max_k1", None, 3.0)


@pytest.mark.parametrize(
    ("rules", "kept", "tokens", "sequences"),
    [
        # Bounds of the ratio rollout / trainer: 1/4, 2 | 2, 1, 4 | 1 by token, 1/2, 8, 1 by response.
        ([("token_k1", 0.4, 2.5)], [[0, 1, 0], [1, 1, 0], [1, 0, 0]], 2 / 6, 2 / 3),
        ([("token_k1", 0.2, 2.5)], [[1, 1, 0], [1, 1, 0], [1, 0, 0]], 1 / 6, 1 / 3),
        ([("seq_sum_k1", 0.6, 9.0)], [[0, 0, 0], [1, 1, 1], [1, 0, 0]], 2 / 6, 1 / 3),
        ([("seq_sum_k1", 0.4, 2.1)], [[1, 1, 0], [0, 0, 0], [1, 0, 0]], 3 / 6, 1 / 3),
        ([("seq_mean_k1", 0.6, 2.1)], [[1, 1, 0], [1, 1, 1], [1, 0, 0]], 0, 0),
        ([("seq_mean_k1", 0.8, 1.9)], [[0, 0, 0], [0, 0, 0], [1, 0, 0]], 5 / 6, 2 / 3),
        # k2: 0.96, 0.24 | 0.24, 0, 0.96 | 0
        ([("token_k2", None, 0.3)], [[0, 1, 0], [1, 1, 0], [1, 0, 0]], 2 / 6, 2 / 3),
        ([("seq_mean_k2", None, 0.5)], [[0, 0, 0], [1, 1, 1], [1, 0, 0]], 2 / 6, 1 / 3),
        # k3: 1.614, 0.193 | 0.193, 0, 0.636 | 0
        ([("token_k3", None, 0.7)], [[0, 1, 0], [1, 1, 1], [1, 0, 0]], 1 / 6, 1 / 3),
        # A token veto: ratios trainer / rollout below 1/3.
        ([VETO], [[1, 1, 0], [0, 0, 0], [1, 0, 0]], 3 / 6, 1 / 3),
        ([("seq_max_k1", None, 5.0)], [[1, 1, 0], [1, 1, 1], [1, 0, 0]], 0, 0),
        ([("seq_max_k3", None, 0.7)], [[0, 0, 0], [1, 1, 1], [1, 0, 0]], 2 / 6, 1 / 3),
        ([("seq_sum_k3", None, 0.8)], [[0, 0, 0], [0, 0, 0], [1, 0, 0]], 5 / 6, 2 / 3),
        ([("token_k1", 0.4, 2.5), ("seq_max_k2", None, 0.5)], [[0, 0, 0], [0, 0, 0], [1, 0, 0]], 5 / 6, 2 / 3),
    ],
)
def test_tokens_rejected_by_each_rule(rules, kept, tokens, sequences):
    keep, metrics = rejection_mask(OLD, ROLLOUT, MASK, rules)
    assert keep.long().tolist() == kept
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(tokens)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(sequences)
    if len(rules) == 1:
        assert metrics[f"rollout_rs_{rules[0][0]}_masked_fraction"] == pytest.approx(tokens)


def test_veto_has_no_lower_bound():
    # The trainer is surer of every token, and no column is padding, whose ratio is 1.
    keep, _ = rejection_mask(torch.tensor([[-1.0, -2.0]]), torch.full((1, 2), -9.0), torch.ones(1, 2), [VETO])
    assert keep.all()


def test_padding_and_extreme_ratios_do_no_harm():
    old = torch.tensor([[-1.0, math.nan], [-900.0, -1.0]])
    rollout = torch.tensor([[-1.0, math.inf], [-1.0, -1.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    for rule in ("token_k3", "seq_sum_k3"):
        keep, metrics = rejection_mask(old, rollout, mask, [(rule, None, 18.0)])
        assert keep.tolist() == [[True, False], [False, rule == "token_k3"]]
        assert metrics["rollout_rs_seq_masked_fraction"] == 0.5
    # k2 of a log-ratio of -899 is that of -20, and bounds belong to what they bound.
    assert rejection_mask(old, rollout, mask, [("token_k2", None, 200.0)])[0].tolist() == mask.bool().tolist()
    keep, _ = rejection_mask(OLD, ROLLOUT, MASK, [("token_k1", 1.0, 5.0)])
    assert keep.long().tolist() == [[0, 1, 0], [1, 1, 1], [1, 0, 0]]
    up = mismatch_metrics(-rollout.abs(), old.clamp(min=-900.0), mask, "sequence", 2.0)
    assert up["chi2_seq"] == pytest.approx((math.exp(40) - 1) / 2)
    figures = mismatch_metrics(old, rollout, mask, "token", 2.0)
    assert figures["kl"] == pytest.approx(899 / 3) and figures["k3_kl"] == pytest.approx((19 + math.exp(-20)) / 3)


def test_figures_of_the_mismatch():
    figures = mismatch_metrics(OLD, ROLLOUT, MASK, "token", 2.5)
    expected = {
        # log ratios trainer / rollout: 2, -1 | -1, 0, -2 | 0, times log 2
        "kl": 2 / 6 * LOG2,
        "k3_kl": (3 - 2 * LOG2 + 2 * (-0.5 + LOG2) - 0.75 + 2 * LOG2) / 6,
        "chi2_token": (16 + 0.25 + 0.25 + 1 + 0.0625 + 1) / 6 - 1,
        "chi2_seq": (4 + 1 / 64 + 1) / 3 - 1,
        "rollout_ppl": math.exp(2),
        "rollout_log_ppl": 2.0,
        "training_log_ppl": 2 + (-0.5 + 1) * LOG2 / 3,
        "log_ppl_diff": (-0.5 + 1) * LOG2 / 3,
        "log_ppl_abs_diff": 1.5 * LOG2 / 3,
        "log_ppl_diff_max": LOG2,
        "log_ppl_diff_min": -0.5 * LOG2,
        "ppl_ratio": (2**-0.5 + 2 + 1) / 3,
        "rollout_is_mean": 7.25 / 6,
        "rollout_is_max": 4.0,
        "rollout_is_min": 0.25,
        "rollout_is_ratio_fraction_high": 1 / 6,
        "rollout_is_ratio_fraction_low": 1 / 6,
        # weights within [0.4, 2.5]: 2.5, 0.5, 0.5, 1, 0.4, 1, of sum 5.9 and sum of squares 8.91
        "rollout_is_eff_sample_size": 5.9**2 / 6 / 8.91,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures.keys() - expected == {"training_ppl"}


def test_effective_sample_size_of_whole_responses():
    figures = mismatch_metrics(OLD, ROLLOUT, MASK, "sequence", 4.0)
    # Weights 2, 1/8 -> 1/4 and 1 on 2, 3 and 1 tokens.
    assert figures["rollout_is_eff_sample_size"] == pytest.approx(5.75**2 / 6 / (8 + 3 / 16 + 1))
    # Of responses, one of three is below 1/4; above 1.5, the first.
    assert (figures["rollout_is_ratio_fraction_low"], figures["rollout_is_ratio_fraction_high"]) == (1 / 3, 0.0)
    assert mismatch_metrics(OLD, ROLLOUT, MASK, "sequence", 1.5)["rollout_is_ratio_fraction_high"] == 1 / 3
    alike = mismatch_metrics(OLD, OLD, MASK, "sequence", 4.0)
    assert (alike["rollout_is_eff_sample_size"], alike["chi2_seq"], alike["kl"], alike["k3_kl"]) == (1.0, 0.0, 0.0, 0.0)


def test_weight_of_a_response_is_over_all_that_it_sampled():
    keep, _ = rejection_mask(OLD, ROLLOUT, MASK, [("token_k1", 0.4, 2.5)])
    weights, metrics = rollout_weights(OLD, ROLLOUT, keep, "sequence", 5.0, MASK)
    expected = torch.tensor([[0.0, 2.0, 0.0], [0.125, 0.125, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)
    assert (metrics["tis_weight"].item(), metrics["num_tokens"].item()) == (pytest.approx(3.25), 4)


# token ratios trainer / rollout 4, 0.5 | 0.5, 0.5, 0.25 | 1.5
ENGINE_RATIOS = [[4.0, 0.5, 9.0], [0.5, 0.5, 0.25], [1.5, 9.0, 9.0]]
ENGINE_MASK = [[1, 1, 0], [1, 1, 1], [1, 0, 0]]


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
    old = f64(*ENGINE_RATIOS).log().requires_grad_()
    weights, metrics = rollout_weights(old - 1.0, torch.full_like(old, -1.0), torch.tensor(ENGINE_MASK), level, cap)
    torch.testing.assert_close(weights, f64(*expected), rtol=1e-12, atol=0)
    assert not weights.requires_grad
    assert metrics["tis_weight"].item() == pytest.approx(total, rel=1e-12)
    assert metrics["tis_capped"].item() == capped
    assert metrics["num_tokens"].item() == 6


@pytest.mark.parametrize(
    ("level", "expected", "outside", "mean"),
    [
        ("token", [[0.0, 0.5, 0.0], [0.5, 0.5, 0.0], [1.5, 0.0, 0.0]], 2, 3 / 6),
        ("sequence", [[2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.5, 0.0, 0.0]], 3, 3.5 / 3),
    ],
)
def test_weights_outside_a_band_are_zero(level, expected, outside, mean):
    pair, mask = (f64(*ENGINE_RATIOS).log(), torch.zeros(3, 3, dtype=torch.float64)), torch.tensor(ENGINE_MASK)
    band = {"cap": 2.0 + 1e-9, "floor": 0.5 - 1e-9}
    weights, metrics = rollout_weights(*pair, mask, level, **band)
    torch.testing.assert_close(weights, f64(*expected), rtol=1e-12, atol=0)
    assert metrics["tis_capped"].item() == outside
    assert mean_rollout_weight(*pair, mask, level, **band) == pytest.approx(mean)
    figures, used = mismatch_metrics(*pair, mask, level, **band), weights[mask.bool()]
    assert figures["rollout_is_eff_sample_size"] == pytest.approx(float(used.mean() ** 2 / used.square().mean()))
    assert figures["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 6 if level == "token" else 1 / 3)
    assert mismatch_metrics(*pair, mask, level, 9e9, 8e9)["rollout_is_eff_sample_size"] == 0


def test_gmpo_takes_the_geometric_mean_of_a_responses_weights():
    weights = f64([2.0, 0.5, 0.0], [4.0, 2.0, 1.0], [0.0, 0.0, 0.0])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    for loss in ("ppo_clip", "gspo", "cispo"):
        assert loss_weights(loss, weights, mask) is weights
    expected = f64([1.0, 1.0, 0.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0])
    torch.testing.assert_close(loss_weights("gmpo", weights, mask), expected, rtol=1e-9, atol=0)
    vanished = loss_weights("gmpo", f64([1.0, 0.0]), torch.ones(1, 2))
    torch.testing.assert_close(vanished, f64([1e-5, 1e-5]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_padding_never_matters_and_no_log_ratio_overflows(level):
    nan, inf = math.nan, math.inf
    old = torch.tensor([[-1.0, nan, inf], [nan, -inf, inf], [-1.0, 0.0, 0.0], [-500.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    rollout = torch.tensor([[-1.5, 0.0, inf], [inf, nan, 0.0], [-500.0, 9, 9], [-1.0, 9, 9], [-inf, 9, 9]])
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    for cap, largest, capped in ((2.0, 2.0, 2), (1e30, math.exp(20), 0)):
        weights, metrics = rollout_weights(old, rollout, mask, level, cap)
        expected = torch.tensor([[math.exp(0.5)], [0.0], [largest], [0.0], [largest]])
        torch.testing.assert_close(weights, torch.nn.functional.pad(expected, (0, 2)))
        assert metrics["tis_weight"].item() == pytest.approx(math.exp(0.5) + 2 * largest)
        assert (metrics["tis_capped"].item(), metrics["num_tokens"].item()) == (capped, 4)
    agreeing, _ = rollout_weights(rollout, rollout, mask, level, 1.0)
    assert torch.equal(agreeing[:4], mask[:4].float())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_and_their_sums_add_over_micro_batches(level):
    old, rollout = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([[4], [0], [2], [1], [3]])
    weights, metrics = rollout_weights(old, rollout, mask, level, 1.5)
    parts = [rollout_weights(old[i], rollout[i], mask[i], level, 1.5) for i in torch.arange(5).split([1, 2, 2])]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), weights)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), value)


def test_normalized_weights_equal_scaled_advantages():
    old, rollout, mask = f64(*ENGINE_RATIOS).log(), torch.zeros(3, 3, dtype=torch.float64), torch.tensor(ENGINE_MASK)
    # 5.25 over 6 tokens; (2 + 1/16 + 1.5) over 3 responses
    assert mean_rollout_weight(old, rollout, mask, "token", 2.0) == 0.875
    mean = mean_rollout_weight(old, rollout, mask, "sequence", 2.5)
    assert mean == 1.1875
    assert mean_rollout_weight(old, rollout + 100, mask, "token", 2.0) == 1.0
    weights, _ = rollout_weights(old, rollout, mask, "sequence", 2.5)
    logprobs, advantages = old + f64([0.5, -0.5, 0], [0.1, 0.9, -2], [2, 0, 0]), f64([1.0], [-2.0], [-1.0])
    for loss in (gmpo_loss, lambda *parts: ppo_clip_loss(*parts, clip_ratio_c=3.0)):
        by_weight, _ = loss(logprobs, old, advantages.expand(3, 3), mask, 0.2, 0.2)
        by_advantage, _ = loss(logprobs, old, advantages.expand(3, 3) / mean, mask, 0.2, 0.2)
        torch.testing.assert_close(by_weight * (weights / mean), by_advantage * weights)
