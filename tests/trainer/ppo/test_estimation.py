"""From the rewards of a step to its advantages, by code of a user's own."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.ppo.test_samples import learned, sampled
from verl.config import ConfigError, PPOConfig, load_config
from verl.trainer.ppo.estimation import SignalEstimation

SOURCE = """
import torch

def seen(inputs, scale):
    assert (inputs.step, inputs.total_steps, inputs.max_response_length) == (3, 7, 160)
    assert [record.uid for record in inputs.records] == [5, 5, 9, 9]
    assert [verdict["boxed"] for verdict in inputs.verdicts] == [True] * 4
    assert inputs.texts[:2] == ["7", "8"] and inputs.scores.tolist() == [1, 0, 1, 0]
    assert inputs.correct.tolist() == [True, False, True, False] and inputs.lengths.tolist() == [3, 3, 2, 1]
    assert inputs.truncated.tolist() == [False, True, False, False] and inputs.learned.all()
    assert inputs.rewards.tolist() == [2, 4, 6, 0] and inputs.token_rewards.sum(dim=1).tolist() == [20, 40, 60, 0]
    assert inputs.learned_mask.sum(dim=1).tolist() == [3, 0, 2, 1]
    assert inputs.rank_metrics.by_name["Effective Rank"].shape == (4, 1)
    inputs.rewards.zero_(), inputs.token_rewards.zero_()  # its own copies
    return scale * inputs.group_means(inputs.scores * torch.tensor([1, 1, 3, 1]))

def by_token(inputs):
    return torch.where(inputs.response_mask.bool(), inputs.responses.float() + 1, torch.nan)

def integers(inputs):
    return torch.ones(4, dtype=torch.int64)

def wide(inputs):
    return torch.ones(4, 2)

def infinite(inputs):
    return 1 / inputs.scores

class Running:
    def __init__(self):
        self.total = 0.0

    def __call__(self, inputs):
        self.total += inputs.rewards.sum().item()
        return inputs.rewards + self.total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]
"""
REWARDS = torch.tensor([2.0, 4.0, 6.0, 0.0], dtype=torch.float64)


@pytest.fixture
def estimation(tmp_path: Path):
    (tmp_path / "own.py").write_text(SOURCE)

    def make(field, name, *overrides):
        return SignalEstimation(
            load_config(PPOConfig, "ppo_trainer", [f"algorithm.{field}={tmp_path}/own.py:{name}", *overrides]), 7
        )

    return make


def advantages(estimation, tokenizer):
    batch = sampled(tokenizer, [3, 3, 2, 1])
    outputs, signal = learned(batch)
    last = torch.nn.functional.one_hot(batch.rollout.response_mask.sum(dim=1) - 1, 3)
    token_rewards, rewards = 10 * REWARDS[:, None] * last, REWARDS.clone()
    estimate = estimation.advantages(3, batch, outputs, rewards, token_rewards, signal.mask, None)
    assert torch.equal(rewards, REWARDS) and token_rewards.sum() == 10 * REWARDS.sum()
    return estimate


def transformed(estimation, tokenizer):
    batch = sampled(tokenizer, [3, 3, 2, 1])
    return estimation.transformed(3, batch, learned(batch)[0], REWARDS)


def test_an_estimator_sees_the_step_and_gives_one_number_a_response(estimation, tiny_tokenizer):
    found = advantages(estimation("adv_estimator", "seen", "++algorithm.adv_estimator_kwargs.scale=2"), tiny_tokenizer)
    assert found.returns is None
    assert found.advantages.tolist() == [[1, 1, 1], [1, 1, 1], [3, 3, 0], [3, 0, 0]]


def test_an_estimator_gives_one_number_a_token(estimation, tiny_tokenizer):
    found = advantages(estimation("adv_estimator", "by_token"), tiny_tokenizer)
    assert found.advantages.tolist() == [[2, 2, 2], [2, 2, 2], [2, 2, 0], [2, 0, 0]]
    assert found.advantages.dtype == torch.float64


@pytest.mark.parametrize(
    ("field", "name", "message"),
    [
        (
            "adv_estimator",
            "integers",
            "returned torch.int64 [4]; expected a tensor of floating point numbers",
        ),
        (
            "adv_estimator",
            "wide",
            "returned torch.float32 [4, 2]; expected a tensor of floating point numbers",
        ),
        ("adv_estimator", "infinite", "returned NaN or infinity for response 1; expected finite"),
        (
            "reward_transform",
            "by_token",
            "returned torch.float32 [4, 3]; expected a tensor of",
        ),
        ("reward_transform", "infinite", "returned NaN or infinity for response 1; expected finite"),
    ],
)
def test_what_it_returns_is_checked(estimation, tiny_tokenizer, field, name, message):
    call = {"adv_estimator": advantages, "reward_transform": transformed}[field]
    with pytest.raises(ConfigError) as raised:
        call(estimation(field, name), tiny_tokenizer)
    assert str(raised.value).startswith(f"algorithm.{field}='") and message in str(raised.value)


def test_a_transform_goes_on_from_its_state(estimation, tiny_tokenizer):
    first = estimation("reward_transform", "Running")
    rewards, metrics = transformed(first, tiny_tokenizer)
    assert rewards.tolist() == [14, 16, 18, 12]
    assert metrics == {"train/reward_transform/mean": 15.0, "train/reward_transform/change": 12.0}
    resumed = estimation("reward_transform", "Running")
    resumed.load_state(first.state())
    assert transformed(resumed, tiny_tokenizer)[0].tolist() == [26, 28, 30, 24]
    with pytest.raises(ConfigError, match="the checkpoint was written with another algorithm.reward_transform"):
        estimation("reward_transform", "Running").load_state({})


def test_without_code_of_ones_own_nothing_happens(tiny_tokenizer):
    plain = SignalEstimation(load_config(PPOConfig, "ppo_trainer"), 7)
    rewards, metrics = transformed(plain, tiny_tokenizer)
    assert rewards is REWARDS and metrics == {} and plain.state() == {}
    plain.load_state({})


def test_the_variances_of_weighted_tokens():
    options = ["actor.tis_level=token", "actor.tis_cap=3.0", "algorithm=optimal_token_baseline"]
    # Probabilities of 1/2 and 1/4 here, 1/4 and 1/16 in the engine: weights of 2 and, capped, 3.
    logprobs = torch.tensor([[0.5, 0.25]]).log()
    rollout = SimpleNamespace(response_mask=torch.ones(1, 2), rollout_logprobs=torch.tensor([[0.25, 0.0625]]).log())
    scores = SimpleNamespace(logprobs=logprobs, statistics={"sum_pi_squared": torch.tensor([[0.5, 0.75]])})
    for given, expected in ((options, [[2.0, 11.25]]), (options[2:], [[0.5, 1.25]])):
        estimation = SignalEstimation(load_config(PPOConfig, "ppo_trainer", given), 1)
        torch.testing.assert_close(estimation._variances(rollout, scores), torch.tensor(expected))
    assert estimation._variances(rollout, None) is None
