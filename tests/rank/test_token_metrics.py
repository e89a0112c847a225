"""Metrics of tokens, a user's own metrics of tokens and of spectra, and Phi as the paper's later release makes it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import rank_columns

from tests.kit import ppo_config
from tests.rank.reference_loop import effective_rank, mask_of, terms, velocity_and_acceleration
from verl.batch import Batch
from verl.config import ConfigError
from verl.rank.calculator import RepresentationMetricsCalculator, capture_options, reduce_states
from verl.rank.dynamics import by_layer
from verl.rank.own_metrics import own_measures
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import fill_token_metrics

NAMES = ["avg_log_probs", "avg_response_entropy", "avg_logits_entropy"]


def measure(ranks, names, tokens, lengths, logprobs=None, entropy=None):
    """Metrics of responses with one prompt token each; what stands beyond a response's length is padding."""
    prompts, lengths = torch.ones(len(tokens), dtype=torch.int64), torch.tensor(lengths)
    batch = Batch(prompts, lengths, tokens.shape[1], **ranks)
    ids = torch.cat([torch.ones(len(tokens), 1, dtype=torch.int64), tokens], dim=1)
    batch.fill(tokens=ids[torch.arange(ids.shape[1]) < 1 + lengths[:, None]], logprobs=logprobs, entropy=entropy)
    fill_token_metrics(batch, names)
    return batch.rank_metrics


TOKENS = torch.tensor([[5, 5, 7, 9], [5, 5, 5, 0], [3, 4, 0, 0]])
LENGTHS = [4, 3, 2]


def test_literal_values_in_every_layer():
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -6.0], [-1.0, -1.0, -4.0, 9.0], [-0.5, -1.5, 9.0, 9.0]])
    entropy = torch.tensor([[1.0, 1.0, 2.0, 4.0], [3.0, 0.0, 0.0, 9.0], [0.25, 0.75, 9.0, 9.0]])
    layers = {"Effective Rank": torch.tensor([1.0, 2.0, 3.0])}
    metrics = measure(rank_columns(layers, layers), NAMES, TOKENS, LENGTHS, logprobs, entropy)
    assert list(metrics) == ["Effective Rank", *NAMES] and len(by_layer(metrics)) == 2
    # Shares 1/2, 1/4, 1/4; 1; and 1/2, 1/2.
    expected = {
        "Effective Rank": [1.0, 2.0, 3.0],
        "avg_log_probs": [-3.0, -2.0, -1.0],
        "avg_response_entropy": [1.5 * math.log(2), 0.0, math.log(2)],
        "avg_logits_entropy": [2.0, 1.0, 0.5],
    }
    for layer in by_layer(metrics):
        for name, values in expected.items():
            assert layer[name].tolist() == pytest.approx(values, abs=1e-12), name
    assert metrics["avg_log_probs"].dtype == torch.float64
    # A response that is masked in a layer gets no signal from its tokens there.
    masked = rank_columns({"Effective Rank": torch.tensor([2.0, 3.0, math.nan])}, layers)
    found = measure(masked, NAMES[1:2], TOKENS, LENGTHS)["avg_response_entropy"].T.tolist()
    entropies = expected["avg_response_entropy"]
    assert found == [pytest.approx([*entropies[:2], math.nan], nan_ok=True), pytest.approx(entropies)]


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
    config = ppo_config("experiment=released_code_later")
    # Rounding would hide errors.
    calculator = replace(config.calculator, diff_stride=4, prefix_rule=rule, metrics_dtype="float64")
    weights = {"w_explore": [0.0, 0.25, 1.0, 0.5, 0.0], "w_exploit": [0.5, 1.0, 0.0, 0.0, 0.75]}
    signal = replace(config.reward_manager, **weights)
    signal = signal if guide is None else replace(signal, guidance_metric=guide)
    ranks_of, manager = RepresentationMetricsCalculator(calculator).measure, RewardManager(signal)
    loop = Loop(rule, 4, signal.indicator_names, *weights.values(), signal.gain, signal.ema_alpha, signal.guide)
    for step, (states, lengths, tokens, logprobs, entropy) in enumerate(batches(5)):
        rows = [states[i, :length] for i, length in enumerate(lengths)]
        whole = ranks_of([row[:, None] for row in rows])
        measured = {name: getattr(whole, name) for name in whole.names}
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


def test_users_metrics(tmp_path):
    (tmp_path / "tokens.py").write_text(OWN)
    paths = [f"{tmp_path}/tokens.py:{name}" for name in ("surprise", "spread")]
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -6.0], [-1.0, -1.0, -4.0, torch.nan], [-0.5, -1.5, 0.0, 0.0]])
    entropy = torch.tensor([[1.0, 1.0, 2.0, 4.0], [3.0, 0.0, 0.0, 0.0], [0.25, 0.75, 0.0, 0.0]])
    args = (TOKENS, LENGTHS, logprobs, entropy)
    layers = {"Effective Rank": torch.tensor([1.0, 2.0, torch.nan])}
    metrics = measure(rank_columns(layers), paths, *args)
    assert list(metrics) == ["Effective Rank", "surprise", "spread"]
    # Of tokens the mean over the response, padding left out; of responses as it is; masked where the ranks are.
    torch.testing.assert_close(metrics["surprise"][:, 0], torch.tensor([3.0, 2.0, torch.nan]).double(), equal_nan=True)
    torch.testing.assert_close(metrics["spread"][:, 0], torch.tensor([3.0, 3.0, torch.nan]).double(), equal_nan=True)
    with pytest.raises(ConfigError, match=r"returned shape \[3, 1\]; expected a tensor of shape \[3, 4\] or \[3\]"):
        measure(rank_columns(layers), [f"{tmp_path}/tokens.py:wide"], *args)


SOURCE = """
import torch

def effective(spectra):
    # The effective rank again, by another way.
    shares = spectra.singular_values / spectra.singular_values.sum(dim=1, keepdim=True)
    return torch.special.entr(shares).sum(dim=1).exp()

def rows_and_width(spectra):
    assert spectra.singular_values.shape[1] == min(spectra.rows, spectra.width)
    return torch.full((len(spectra.singular_values),), 100 * spectra.rows + spectra.width)

def largest(spectra):
    return spectra.singular_values[:, 0]

def one_number(spectra):
    return spectra.singular_values.sum()

def unstable(spectra):
    return spectra.singular_values.log().sum(dim=1)
"""


@pytest.fixture
def paths(tmp_path: Path):
    (tmp_path / "own.py").write_text(SOURCE)
    return lambda *names: [f"{tmp_path}/own.py:{name}" for name in names]


def states(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).cumsum(1)


@pytest.mark.parametrize("rule", ["after_stride", "at_stride_and_whole"])
def test_velocity_and_acceleration_match_the_built_in_metric(make_calculator, paths, rule):
    calculator = make_calculator(own_metrics=paths("effective"), metric_indices=[1], diff_stride=3, prefix_rule=rule)
    metrics = calculator(states(4, 20, 2, 6), mask_of([20, 13, 4, 1], 20))
    assert list(metrics["1"]) == [f"{n}{s}" for n in ("Effective Rank", "effective") for s in ("", " diff", " diff 2")]
    for layer in metrics.values():
        for suffix in ("", " diff", " diff 2"):
            # A response of one row has no spectrum: an effective rank of 1, and 0 for one's own.
            built_in, own = layer[f"Effective Rank{suffix}"][:3], layer[f"effective{suffix}"]
            torch.testing.assert_close(own[:3], built_in, rtol=1e-5, atol=1e-7)
            assert own[3] == 0
    names = calculator.dataset_metrics(states(9, 5), 2)
    assert names["global/effective"] == pytest.approx(names["global/Effective Rank"], rel=1e-5)


def test_own_metric_gets_rows_width_and_unscaled_values(make_calculator, paths):
    options = {"own_metrics": paths("rows_and_width", "largest"), "metric_indices": [2], "compute_diff": False}
    hidden = torch.zeros(1, 4, 1, 3)
    hidden[0, :2, 0, 1], hidden[0, 2:, 0, 1] = 1e5, -1e5  # centred as it is: one singular value, 2e5
    metrics = make_calculator(**options)(hidden, mask_of([4], 4))["1"]
    assert metrics["rows_and_width"].tolist() == [403.0]
    assert metrics["largest"].item() == pytest.approx(2e5)
    masked = make_calculator(**options, on_nonfinite="mask")(hidden / 0.0, mask_of([4], 4))["1"]
    assert masked["largest"].isnan().all()
    assert make_calculator(**options)(torch.ones(1, 4, 1, 3), mask_of([4], 4))["1"]["largest"].tolist() == [0.0]


def test_engine_loads_own_metrics_from_its_options(make_calculator, paths):
    calculator = make_calculator(own_metrics=paths("effective"), metric_indices=[1], diff_stride=3)
    options = capture_options(calculator.config)["reducer_options"]
    columns = reduce_states([states(1, 20, 2, 6)[0]], **options)
    expected = calculator(states(1, 20, 2, 6), mask_of([20], 20))
    assert columns["rank/effective diff"][0].tolist() == [
        expected[layer]["effective diff"].item() for layer in ("1", "2")
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_number", "returned shape []; expected a tensor of shape [2], one number for each spectrum"),
        ("unstable", "returned NaN or infinity in row 1; expected finite numbers for 3 rows (some singular"),
        ("gone", "has no function or class 'gone'"),
    ],
)
def test_own_metric_is_tried_before_training(paths, name, message):
    with pytest.raises(ConfigError) as raised:
        own_measures(paths(name))
    assert str(raised.value).startswith("calculator.own_metrics=") and message in str(raised.value)
