"""Metrics of tokens, and Phi as the paper's later release makes it of them and of hidden states."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import rank_metrics

from tests.rank.reference_loop import effective_rank, mask_of, terms, velocity_and_acceleration
from verl.batch import Batch
from verl.config import ConfigError, PPOConfig, load_config
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import frequency_entropy, with_token_metrics

NAMES = ["avg_log_probs", "avg_response_entropy", "avg_logits_entropy"]


def measure(ranks, names, tokens, lengths, logprobs=None, entropy=None):
    """Metrics of responses with one prompt token each; what stands beyond a response's length is padding."""
    prompts, lengths = torch.ones(len(tokens), dtype=torch.int64), torch.tensor(lengths)
    batch = Batch(prompts, lengths, tokens.shape[1], rank_metrics=ranks)
    ids = torch.cat([torch.ones(len(tokens), 1, dtype=torch.int64), tokens], dim=1)
    batch.fill(tokens=ids[torch.arange(ids.shape[1]) < 1 + lengths[:, None]], logprobs=logprobs, entropy=entropy)
    return with_token_metrics(batch, names)


TOKENS = torch.tensor([[5, 5, 7, 9], [5, 5, 5, 0], [3, 4, 0, 0]])
LENGTHS = [4, 3, 2]


def test_literal_values_in_every_layer():
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -6.0], [-1.0, -1.0, -4.0, 9.0], [-0.5, -1.5, 9.0, 9.0]])
    entropy = torch.tensor([[1.0, 1.0, 2.0, 4.0], [3.0, 0.0, 0.0, 9.0], [0.25, 0.75, 9.0, 9.0]])
    layers = {"Effective Rank": torch.tensor([1.0, 2.0, 3.0])}
    metrics = measure(rank_metrics(layers, layers), NAMES, TOKENS, LENGTHS, logprobs, entropy)
    assert metrics.metric_names == ["Effective Rank", *NAMES] and metrics.num_layers == 2
    # Shares 1/2, 1/4, 1/4; 1; and 1/2, 1/2.
    expected = {
        "Effective Rank": [1.0, 2.0, 3.0],
        "avg_log_probs": [-3.0, -2.0, -1.0],
        "avg_response_entropy": [1.5 * math.log(2), 0.0, math.log(2)],
        "avg_logits_entropy": [2.0, 1.0, 0.5],
    }
    for layer in metrics.by_layer():
        for name, values in expected.items():
            assert layer[name].tolist() == pytest.approx(values, abs=1e-12), name
    assert metrics.by_name["avg_log_probs"].dtype == torch.float64
    alone = measure(rank_metrics(layers), NAMES[1:2], TOKENS, LENGTHS)
    assert alone.by_layer()[0]["avg_response_entropy"].tolist() == pytest.approx(expected["avg_response_entropy"])


def test_a_masked_response_gets_no_signal_from_its_tokens():
    measured = rank_metrics({"Effective Rank": torch.tensor([2.0, 3.0, math.nan])}, {"Effective Rank": torch.ones(3)})
    metrics = measure(measured, NAMES[1:2], TOKENS, LENGTHS)
    expected = [1.5 * math.log(2), 0.0, math.nan]
    assert metrics.by_layer()[0]["avg_response_entropy"].tolist() == pytest.approx(expected, nan_ok=True)
    assert metrics.by_layer()[1]["avg_response_entropy"].tolist() == pytest.approx([*expected[:2], math.log(2)])


def test_the_entropy_of_frequencies_is_the_mean_surprise_of_the_tokens():
    generator = torch.Generator().manual_seed(0)
    tokens, lengths = torch.randint(0, 6, (5, 30), generator=generator), [30, 17, 1, 8, 0]
    for row, length, value in zip(
        tokens.tolist(), lengths, frequency_entropy(tokens, mask_of(lengths, 30)), strict=True
    ):
        kept = row[:length]
        expected = [-math.log(kept.count(token) / length) for token in kept]
        assert float(value) == pytest.approx(sum(expected) / max(1, length), abs=1e-12)


class Loop:
    """Phi of the later release, response by response in plain floats."""

    def __init__(self, rule, stride, indicators, explore, exploit, gain, alpha, guide):
        self.rule, self.stride, self.indicators, self.guide = rule, stride, indicators, guide
        self.explore, self.exploit, self.gain, self.alpha = explore, exploit, gain, alpha
        self.baselines = dict.fromkeys([*indicators, guide], 0.0)
        self.previous = None

    def metrics(self, states, tokens, logprobs, entropy):
        velocity, acceleration = velocity_and_acceleration(terms(self.rule, states, self.stride, None, "start"))
        return {
            "Effective Rank": effective_rank(states),
            "Effective Rank diff": velocity,
            "Effective Rank diff 2": acceleration,
            "avg_log_probs": float(np.mean(logprobs)),
            "avg_response_entropy": float(np.mean([-math.log(tokens.count(t) / len(tokens)) for t in tokens])),
            "avg_logits_entropy": float(np.mean(entropy)),
        }

    def deviation(self, metrics, name):
        mu = self.baselines[name]
        return max(-5.0, min(5.0, (metrics[name] - mu) / (abs(mu) + 1e-8)))

    def step(self, batch):
        phis = []
        for metrics in batch:
            beta = 1 / (1 + math.exp(-self.gain * self.deviation(metrics, self.guide)))
            phi = 0.0
            for name, explore, exploit in zip(self.indicators, self.explore, self.exploit, strict=True):
                phi += (beta * explore + (1 - beta) * exploit) * math.tanh(self.deviation(metrics, name))
            phis.append(phi if self.previous is not None else 0.0)
        for name in self.baselines if self.previous is not None else []:
            mean = sum(metrics[name] for metrics in self.previous) / len(self.previous)
            self.baselines[name] = (1 - self.alpha) * self.baselines[name] + self.alpha * mean
        self.previous = batch
        return phis


def batches(count):
    """Hidden states [B, T, D], lengths, tokens and what a policy says of them; no response is too short to speed up."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        lengths = [24, 17, 20, 13]
        states = torch.randn(4, 24, 6, generator=generator, dtype=torch.float64).cumsum(1)
        tokens = torch.randint(0, 9, (4, 24), generator=generator)
        logprobs, entropy = (torch.rand(4, 24, generator=generator) for _ in range(2))
        yield states, lengths, tokens, -3 * logprobs, 2 * entropy


@pytest.mark.parametrize("rule", ["after_stride_and_whole", "at_stride_and_whole"])
@pytest.mark.parametrize("guide", [None, "avg_logits_entropy"])
def test_phi_of_the_later_release(rule, guide):
    """From hidden states, tokens and log-probabilities to Phi over five steps, saved and restored on the way."""
    config = load_config(PPOConfig, "ppo_trainer", ["experiment=released_code_later"])
    # Rounding would hide errors.
    calculator = replace(config.calculator, diff_stride=4, prefix_rule=rule, metrics_dtype="float64")
    weights = {"w_explore": [0.0, 0.25, 1.0, 0.5, 0.0], "w_exploit": [0.5, 1.0, 0.0, 0.0, 0.75]}
    signal = replace(config.reward_manager, **weights)
    signal = signal if guide is None else replace(signal, guidance_metric=guide)
    ranks_of, manager = RepresentationMetricsCalculator(calculator).measure, RewardManager(signal)
    loop = Loop(rule, 4, signal.indicator_names, *weights.values(), signal.gain, signal.ema_alpha, signal.guide)
    for step, (states, lengths, tokens, logprobs, entropy) in enumerate(batches(5)):
        rows = [states[i, :length] for i, length in enumerate(lengths)]
        measured = ranks_of([row[:, None] for row in rows])
        metrics = measure(measured, calculator.token_metrics, tokens, lengths, logprobs, entropy)
        phi, logged = manager.compute_phi(metrics)
        manager.update(torch.zeros(4), metrics)
        spoken = zip(rows, lengths, tokens.tolist(), logprobs.double(), entropy.double(), strict=True)
        expected = loop.step([loop.metrics(r.numpy(), t[:n], p[:n].numpy(), e[:n].numpy()) for r, n, t, p, e in spoken])
        assert phi.tolist() == pytest.approx(expected, abs=2e-5), step
        assert manager.baselines == pytest.approx(loop.baselines, rel=1e-4, abs=1e-7)
        assert (max(map(abs, expected)) > 0.1) == (step > 0)
        assert (f"reward_manager/layer_1/{signal.guide}/mu" in logged) == (step > 0)
        state = json.loads(json.dumps(manager.state_dict()))
        manager = RewardManager(signal)
        manager.load_state_dict(state)


OWN = """
import torch

def surprise(batch):
    return -batch.padded("logprobs")

def spread(batch):
    entropy = batch.padded("entropy")
    return entropy.amax(dim=1) - entropy.amin(dim=1)

def wide(batch):
    return batch.padded("entropy")[:, :1]
"""


def test_a_users_metrics(tmp_path):
    (tmp_path / "tokens.py").write_text(OWN)
    paths = [f"{tmp_path}/tokens.py:{name}" for name in ("surprise", "spread")]
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -6.0], [-1.0, -1.0, -4.0, torch.nan], [-0.5, -1.5, 0.0, 0.0]])
    entropy = torch.tensor([[1.0, 1.0, 2.0, 4.0], [3.0, 0.0, 0.0, 0.0], [0.25, 0.75, 0.0, 0.0]])
    args = (TOKENS, LENGTHS, logprobs, entropy)
    layers = {"Effective Rank": torch.tensor([1.0, 2.0, torch.nan])}
    metrics = measure(rank_metrics(layers), paths, *args).by_layer()[0]
    assert list(metrics) == ["Effective Rank", "surprise", "spread"]
    # Of tokens the mean over the response, padding left out; of responses as it is; masked where the ranks are.
    torch.testing.assert_close(metrics["surprise"], torch.tensor([3.0, 2.0, torch.nan]).double(), equal_nan=True)
    torch.testing.assert_close(metrics["spread"], torch.tensor([3.0, 3.0, torch.nan]).double(), equal_nan=True)
    with pytest.raises(ConfigError, match=r"returned shape \[3, 1\]; expected a tensor of shape \[3, 4\] or \[3\]"):
        measure(rank_metrics(layers), [f"{tmp_path}/tokens.py:wide"], *args)
