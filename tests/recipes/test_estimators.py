"""Advantage estimators of the recipes, against numbers by hand."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from tests.kit import stored
from tests.method.batches import batch_of
from verl.algorithms.advantages.estimators import grpo_advantages
from verl.batch import Batch
from verl.config import ConfigError
from verl.recipes.a_grae import a_grae
from verl.recipes.confucius3 import hardness_weighted
from verl.recipes.gdpo import gdpo
from verl.recipes.maxrl import maxrl
from verl.recipes.noisy_verifier import Appeals, appealed, forward, last_word
from verl.recipes.recap import EPS, Reweighted, weighted_grpo
from verl.recipes.w_reinforce import weighted


@pytest.mark.parametrize(
    ("positive", "negative", "expected"),
    [(0.1, 1.0, [0.1, -1.0, -1.0, 0.1]), (0.0, 1.0, [0.0, -1.0, -1.0, 0.0]), (1.0, 0.0, [1.0, 0.0, 0.0, 1.0])],
)
def test_right_and_wrong_responses_have_weights_of_their_own(positive, negative, expected):
    assert weighted(batch_of([1, 0, 0, 1]), positive, negative).tolist() == expected


def test_forward_correction_of_a_noisy_verifier():
    assert forward(batch_of([1, 0]), false_negative=0.25).tolist() == [0.25, -0.75]
    # Of 100 right responses 80 pass, of 100 wrong ones 10.
    for verdicts, mean in (([1] * 80 + [0] * 20, 0.0), ([1] * 10 + [0] * 90, -0.7)):
        assert forward(batch_of(verdicts), 0.2).mean().item() == pytest.approx(mean)
    with pytest.raises(ConfigError, match=r"adv_estimator_kwargs.false_negative=1.0: must be"):
        forward(batch_of([1]), 1.0)


def test_rewards_are_normalised_one_by_one(refused, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    rewards = torch.randn(12, 2, generator=rng, dtype=torch.float64)
    extras = [{"right": r, "short": s, "length": 7.0} for r, s in rewards.tolist()]
    del extras[5]["short"]  # the function returned None
    uids = [0, 1, 2] * 4
    batch = batch_of([1] * 12, uids=uids, extras=extras)
    weights = {"right": 1.0, "short": 0.5}

    def expected(row: int) -> float:
        def part(name: str, i: int) -> float:
            if name not in extras[i]:
                return 0.0
            group = [extras[j][name] for j in range(12) if uids[j] == uids[i] and name in extras[j]]
            return (extras[i][name] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)

        sums = [sum(weight * part(name, i) for name, weight in weights.items()) for i in range(12)]
        return (sums[row] - statistics.mean(sums)) / (statistics.stdev(sums) + 1e-6)

    found = gdpo(batch, weights)
    torch.testing.assert_close(found, torch.tensor([expected(i) for i in range(12)], dtype=torch.float64))
    order = torch.randperm(12, generator=rng)
    torch.testing.assert_close(gdpo(batch[order], weights), found[order])
    line = (
        "...weights={'right': 1.0, 'stlye': 1.0}: no function or response has the reward stlye; add ... name some of "
    )
    with refused(f"{line}length, right, short"):
        gdpo(batch, {"right": 1.0, "stlye": 1.0})
    with refused("algorithm.adv_estimator_kwargs.weights: name rewards with their weights, ..."):
        gdpo(batch, {})
    # A reward that a batch lacks, or that one response of a group has, is no signal.
    monkeypatch.setattr("verl.recipes.gdpo.CUSTOM_FUNCTIONS", {"rare": "a.py:right+b.py:style"})
    torch.testing.assert_close(gdpo(batch, weights | {"style": 1.0}), found)
    assert gdpo(batch, {"style": 1.0}).tolist() == [0.0] * 12
    extras[0]["once"] = 50.0
    torch.testing.assert_close(gdpo(batch_of([1] * 12, uids=uids, extras=extras), weights | {"once": 1.0}), found)


def test_combinations_of_rewards_stay_apart():
    """Of two binary rewards in groups of two, GRPO gives (1, 0) against (0, 0) what it gives (1, 1) against (0, 0)."""
    extras = [{"a": a, "b": b} for a, b in [(0, 0), (1, 0), (0, 0), (1, 1)]]
    none, one, nothing, both = gdpo(batch_of([0, 1, 0, 2], uids=[0, 0, 1, 1], extras=extras), {"a": 1, "b": 1}).tolist()
    assert nothing < none < 0 < one < both


REWARDS = [1.0, 0.0, 0.0, 1.0, 0.25, 1.0, 0.0, 1.0, 0.0, 0.5]
UIDS = [0, 0, 1, 1, 0, 1, 2, 1, 2, 3]
"""Groups of three, four, two (without a reward) and one, mixed."""


def rewarded(rewards: list[float] = REWARDS) -> Batch:
    return batch_of([1] * 10, uids=UIDS).fill(rewards=torch.tensor(rewards, dtype=torch.float64))


def mean_of(row: int) -> float:
    return statistics.mean(r for r, uid in zip(REWARDS, UIDS, strict=True) if uid == UIDS[row])


def test_maxrl_divides_by_the_mean_reward(refused):
    expected = [(reward - mean_of(i)) / (mean_of(i) + 1e-6) for i, reward in enumerate(REWARDS)]
    assert maxrl(rewarded()).tolist() == pytest.approx(expected, rel=1e-12)
    assert expected[6] == expected[8] == expected[9] == 0  # no correct response, and no other one
    with refused("algorithm.adv_estimator=verl.recipes.maxrl:maxrl: ... one is -0.5; use rewards of at least 0..."):
        maxrl(rewarded([-0.5, *REWARDS[1:]]))


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.25])
def test_a_grae_damps_and_moves_to_hard_prompts(alpha: float, refused):
    overall = statistics.mean([mean_of(0), mean_of(2), mean_of(6), mean_of(9)])

    def expected(row: int) -> float:
        group = [r for r, uid in zip(REWARDS, UIDS, strict=True) if uid == UIDS[row]]
        # As GRPO has it here: a group of one has mean 0 and deviation 1.
        mean, deviation = (statistics.mean(group), statistics.stdev(group)) if len(group) > 1 else (0.0, 1.0)
        advantage, root = (REWARDS[row] - mean) / (deviation + 1e-6), math.sqrt(mean_of(row))
        easy, hard = 0.5 * advantage / (1 - root + 1e-6), 0.5 * advantage / (root + 1e-6)
        both = (1 - overall) * easy + overall * hard
        return both * min(1.0, overall / alpha) if both > 0 else both

    found = a_grae(rewarded(), alpha).tolist()
    assert found == pytest.approx([expected(i) for i in range(10)], rel=1e-12)
    assert 0.25 < overall < 0.5 and min(found) < 0 < max(found)
    with refused("algorithm.adv_estimator_kwargs.alpha=0: must be above 0"):
        a_grae(rewarded(), 0)
    for wrong in (1.5, -0.5):
        with refused(f"algorithm.adv_estimator=...: ... one reward is {wrong}; use rewards from 0 to 1"):
            a_grae(rewarded([wrong, *REWARDS[1:]]))


class LongIsRight(Appeals):
    """A second verifier that takes responses of more than 4 tokens for right."""

    def recheck(self, batch: Batch) -> list[bool]:
        self.rechecked = batch.texts
        return (batch.response_lengths > 4).tolist()


def test_appeals_estimate_the_rate_of_false_negatives(small_config):
    method = LongIsRight(verifier="unused:here", share=1.0, half_life=1.0)
    method.config, method.step = small_config, 1

    def weights(method: Appeals, scores: list[int], lengths: list[int]) -> list[float]:
        batch = batch_of(scores, lengths=lengths)
        assert method.shape_rewards(batch, batch.scores).tolist() == scores
        return appealed(batch).tolist()

    # Of four negatives one is right, as are the three positives.
    assert weights(method, [1, 1, 1, 0, 0, 0, 0], [4] * 6 + [5]) == [0.25] * 3 + [-0.75] * 4
    again = LongIsRight(verifier="unused:here", share=0.25, half_life=1.0)
    again.load_state_dict(stored(method.state_dict()))
    again.config, again.step = small_config, 2
    # The sums halve: 0.5 and 1.5. One of the negatives is drawn and right, so both are taken to be: 2.5 of 5.
    assert weights(again, [1, 0, 0], [4, 5, 5]) == [0.5, -0.5, -0.5] and len(again.rechecked) == 1
    # 1.25 and 1.25, and two more positives: 1.25 of 4.5.
    assert weights(again, [1, 1], [4, 4]) == pytest.approx([1.25 / 4.5] * 2)
    nothing = LongIsRight(verifier="unused:here")
    nothing.config = small_config
    assert weights(nothing, [0, 0], [4, 4]) == [-1.0, -1.0]
    with pytest.raises(ConfigError, match=r"share=0 must be in \(0, 1\]"):
        Appeals("unused:here", share=0)


@pytest.mark.slow
def test_appeals_ask_the_second_verifier(small_config):
    method = Appeals(verifier="verl.recipes.noisy_verifier:last_word")
    method.config = small_config
    batch = batch_of([0, 0, 0]).fill(texts=["it is \\(7\\).", "7 it is", ""])
    assert method.recheck(batch) == [True, False, False]
    assert last_word("set", "so 17", "7") is False


def test_harder_prompts_weigh_more():
    # Three of four correct: mu = 0.5 and D = 1.128. One of four: mu = -0.5 and D = 1.384. All: nothing to learn.
    batch = batch_of([1, 1, 1, 0, 1, 0, 0, 0, 1, 1], uids=[0] * 4 + [1] * 4 + [2] * 2)
    easy, hard = [0.5 * 1.128] * 3 + [-1.5 * 1.128], [1.5 * 1.384] + [-0.5 * 1.384] * 3
    assert hardness_weighted(batch).tolist() == pytest.approx([*easy, *hard, 0.0, 0.0])


def by_source(math_correct: list[int], code_correct: list[int]) -> Batch:
    """Two groups, of the sources math and code."""
    size = len(math_correct)
    batch = batch_of(math_correct + code_correct, uids=[0] * size + [1] * size)
    sources = ["math"] * size + ["code"] * size
    records = [replace(record, data_source=s) for record, s in zip(batch.records, sources, strict=True)]
    last = torch.nn.functional.one_hot(batch.response_lengths - 1, 16)
    return batch.fill(records=records, token_rewards=batch.scores[:, None].double() * last)


def advantages_of(method: Reweighted, batch: Batch):
    rewards = batch.scores.double()
    assert method.shape_rewards(batch, rewards) is rewards
    return weighted_grpo(batch)


def test_recap_weights_follow_convergence_and_instability():
    method = Reweighted(window=2, temperature=0.5)

    def plain(batch: Batch):
        return grpo_advantages(batch.padded("token_rewards"), batch.mask.long(), batch.group, norm_by_std=True)

    # Losses of math: 1, 0.5, then 0.5, 0; of code always 0.5.
    steps = [([0, 0], [1, 0]), ([1, 0], [1, 0]), ([1, 0], [0, 1]), ([1, 1], [1, 0])]
    for correct in steps[:3]:
        batch = by_source(*correct)
        assert torch.equal(advantages_of(method, batch), plain(batch)) and set(method.weights().values()) == {1.0}
    # To the bit after a resume.
    again = Reweighted(window=2, temperature=0.5)
    again.load_state_dict(stored(method.state_dict()))
    batch = by_source(*steps[3])
    advantages = advantages_of(method, batch)
    assert torch.equal(advantages_of(again, by_source(*steps[3])), advantages)
    # c and i of math: 0.25 of 0.75, and a deviation of 0.25; of code: 1 and none.
    of_math = (0.25 + EPS) / (0.75 + EPS) + 0.25 / (1 + 2 * EPS)
    powers = {"math": math.exp(of_math / 0.5), "code": math.exp(1 / 0.5)}
    expected = {source: 2 * power / sum(powers.values()) for source, power in powers.items()}
    assert method.weights() == pytest.approx(expected) and expected["math"] < 1 < expected["code"]
    weights = torch.tensor([expected["math"]] * 2 + [expected["code"]] * 2, dtype=torch.float64)
    torch.testing.assert_close(advantages, plain(batch) * weights[:, None])


def test_recap_a_source_weighs_1_until_its_windows_are_full():
    method = Reweighted(window=1)
    method.losses = {"math": [0.5, 0.5], "new": [0.25]}
    assert method.weights() == {"math": 1.0, "new": 1.0}
    method.losses["new"] = [0.0, 0.0]  # solved: no loss, and no error
    assert method.weights() == pytest.approx({"math": 1.0, "new": 1.0})
    method.losses["new"] = [0.0, 1.0]  # 1000 times as large: all the weight, and no overflow
    method.temperature = 0.1
    assert method.weights() == {"math": 0.0, "new": 2.0}
    with pytest.raises(ValueError, match="window=0"):
        Reweighted(window=0)
