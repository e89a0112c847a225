import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config.signal import RewardManagerConfig
from verl.trainer.reward_manager_versions import RewardManager

ERA, ERV = "Effective Rank diff 2", "Effective Rank diff"


def config(**changes):
    base = RewardManagerConfig(
        add_reward=True,
        add_adv=True,
        shaping_placement="all_tokens",
        indicator_names=[ERA, ERV],
        w_explore=[0.0, 1.0],
        w_exploit=[1.0, 0.0],
        hypothesis_type="FixTwo",
        gain=1.0,
        kappa=2.0,
        ema_alpha=0.25,
        aux_reward_global_weight=1.0,
        aux_fix=True,
    )
    return dataclasses.replace(base, **changes)


def layer(era, erv):
    return {ERA: torch.tensor(era, dtype=torch.float64), ERV: torch.tensor(erv, dtype=torch.float64)}


def shape(manager, rank_metrics, tokens=2):
    batch = len(next(iter(rank_metrics.values()))[ERA])
    return manager.shape(torch.zeros(batch, tokens), torch.ones(batch, tokens), rank_metrics)


def test_first_step_is_measured_against_the_batch_itself():
    # means 2 and 4: deviations of the guide -0.5, 0.5, of the velocity 0.25, -0.25, both at weight 0.5
    result = shape(RewardManager(config()), {"1": layer([1.0, 3.0], [5.0, 3.0])})
    phi = 0.5 * math.tanh(-0.5) + 0.5 * math.tanh(0.25)
    assert result.phi.tolist() == pytest.approx([phi, -phi], rel=1e-7)
    assert result.token_rewards[:, 0].tolist() == [0.0, 0.0]
    assert result.token_rewards[:, 1].tolist() == pytest.approx([phi, -phi], rel=1e-6)
    assert result.metrics == pytest.approx(
        {
            "reward_manager/layer_1/beta": 0.5,
            f"reward_manager/layer_1/{ERA}/mu": 2.0,
            f"reward_manager/layer_1/{ERA}/deviation": 0.0,
            f"reward_manager/layer_1/{ERA}/weight": 0.5,
            f"reward_manager/layer_1/{ERV}/mu": 4.0,
            f"reward_manager/layer_1/{ERV}/deviation": 0.0,
            f"reward_manager/layer_1/{ERV}/weight": 0.5,
            "reward_manager/phi_mean": 0.0,
        },
        abs=1e-12,
    )


def test_later_steps_are_measured_against_the_steps_before():
    manager = RewardManager(config())
    manager.update(torch.tensor([1.0, 0.0]), {"1": layer([1.0, 3.0], [4.0, 4.0])})
    assert manager.state_dict() == {"baselines": {"1": {ERA: 2.0, ERV: 4.0}}, "ema_score": 0.5}
    second = {"1": layer([6.0, 6.0], [4.0, 0.0])}
    result = shape(manager, second)
    expected = [0.5 * math.tanh(2.0), 0.5 * math.tanh(2.0) + 0.5 * math.tanh(-1.0)]
    assert result.phi.tolist() == pytest.approx(expected, rel=1e-7)
    assert result.metrics[f"reward_manager/layer_1/{ERA}/deviation"] == pytest.approx(2.0, rel=1e-7)
    assert result.metrics[f"reward_manager/layer_1/{ERV}/deviation"] == pytest.approx(-0.5, rel=1e-7)
    manager.update(torch.tensor([-1.0, -0.5]), second)
    # 0.75 * 2 + 0.25 * 6, 0.75 * 4 + 0.25 * 2, 0.75 * 0.5 + 0.25 * -0.75
    assert manager.state_dict() == {"baselines": {"1": {ERA: 3.0, ERV: 3.5}}, "ema_score": 0.1875}


def test_shape_never_changes_state():
    manager = RewardManager(config())
    rank_metrics = {"1": layer([1.0, 3.0], [5.0, 3.0])}
    shape(manager, rank_metrics)
    assert manager.state_dict() == {"baselines": {}, "ema_score": None}
    manager.update(torch.tensor([1.0, 1.0]), rank_metrics)
    before = json.dumps(manager.state_dict())
    shape(manager, {"1": layer([9.0, 9.0], [9.0, 9.0])})
    assert json.dumps(manager.state_dict()) == before


def test_plan_b_lets_the_guide_set_the_weights():
    manager = RewardManager(config(hypothesis_type="PlanB", gain=2.0))
    manager.update(torch.zeros(2), {"1": layer([1.0, 1.0], [1.0, 1.0])})
    result = shape(manager, {"1": layer([1.0 + math.log(3) / 2, 1.0], [2.0, 2.0])})
    # beta = sigmoid(log 3) = 3/4 and 1/2; exploring follows the velocity (d = 1), exploiting the guide
    expected = [0.75 * math.tanh(1.0) + 0.25 * math.tanh(math.log(3) / 2), 0.5 * math.tanh(1.0)]
    assert result.phi.tolist() == pytest.approx(expected, rel=1e-6)
    assert result.metrics["reward_manager/layer_1/beta"] == pytest.approx(0.625, rel=1e-6)
    assert result.metrics[f"reward_manager/layer_1/{ERV}/weight"] == pytest.approx(0.625, rel=1e-6)


def test_layers_are_averaged():
    one, two = layer([1.0, 3.0], [5.0, 3.0]), layer([2.0, 9.0], [1.0, 1.0])
    manager = RewardManager(config())
    both = shape(manager, {"1": one, "2": two})
    expected = (shape(manager, {"1": one}).phi + shape(manager, {"2": two}).phi) / 2
    torch.testing.assert_close(both.phi, expected)
    assert both.metrics[f"reward_manager/layer_2/{ERA}/mu"] == 5.5


def test_nan_metrics_carry_no_signal():
    manager = RewardManager(config())
    rank_metrics = {"1": layer([math.nan, 1.0, 3.0], [math.nan, 4.0, math.inf])}
    phi = shape(manager, rank_metrics).phi.tolist()
    assert phi[0] == 0.0
    assert phi[1:] == pytest.approx([0.5 * math.tanh(-0.5), 0.5 * math.tanh(0.5)], rel=1e-7)
    manager.update(torch.tensor([1.0, math.nan, 0.0]), rank_metrics)
    state = manager.state_dict()
    assert state == {"baselines": {"1": {ERA: 2.0, ERV: 4.0}}, "ema_score": 0.5}
    nothing = {"1": layer([math.nan] * 3, [math.nan] * 3)}
    manager.update(torch.full((3,), math.nan), nothing)
    assert manager.state_dict() == state
    fresh = RewardManager(config())
    fresh.update(torch.full((3,), math.nan), nothing)
    assert fresh.state_dict() == {"baselines": {"1": {}}, "ema_score": None}
    assert shape(fresh, nothing).phi.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("score", "factor"), [(None, 0.5), (-1.0, 1.0), (0.5, 0.25), (1.0, 0.0), (3.0, 0.0)])
def test_signal_fades_as_the_score_rises(score, factor):
    rank_metrics = {"1": layer([1.0, 3.0], [5.0, 3.0])}
    fixed, fading = RewardManager(config()), RewardManager(config(aux_fix=False, aux_reward_global_weight=2.0))
    if score is not None:
        fading.load_state_dict({"baselines": {}, "ema_score": score})
    torch.testing.assert_close(shape(fading, rank_metrics).phi, 2.0 * factor * shape(fixed, rank_metrics).phi)


def test_switches_are_independent():
    rank_metrics = {"1": layer([1.0, 3.0], [4.0, 4.0])}
    advantages, mask = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.ones(2, 2)
    off = RewardManager(config(add_reward=False, add_adv=False))
    result = shape(off, rank_metrics)
    assert not result.token_rewards.any()
    assert result.phi.tolist() == pytest.approx([-0.5 * math.tanh(0.5), 0.5 * math.tanh(0.5)], rel=1e-6)
    assert off.shape_advantages(advantages, mask, result.phi) == (advantages, {})
    only_adv = RewardManager(config(add_reward=False))
    result = shape(only_adv, rank_metrics)
    assert not result.token_rewards.any()
    shaped, _ = only_adv.shape_advantages(advantages, mask, result.phi)
    assert shaped[0].tolist() == [1.0, 1.0]
    assert shaped[1].tolist() == pytest.approx([-1 + 0.5 * math.tanh(0.5)] * 2, rel=1e-6)


def test_reward_goes_to_the_last_response_token():
    manager = RewardManager(config())
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    result = manager.shape(rewards, mask, {"1": layer([1.0, 3.0, 2.0], [4.0, 4.0, 4.0])})
    bonus = 0.5 * math.tanh(0.5)
    expected = torch.tensor([[0.0, 1.0 - bonus, 0.0], [1.0 + bonus, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(result.token_rewards, expected)
    assert rewards[0, 1] == 1.0


def test_advantage_metrics():
    manager = RewardManager(config())
    advantages = torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    shaped, metrics = manager.shape_advantages(advantages, mask, torch.tensor([0.25, -1.0]))
    assert shaped.tolist() == [[1.25, 1.25, 0.0], [-1.0, -1.0, -1.0]]
    assert metrics == {"reward_manager/shaped_token_share": 0.4, "reward_manager/shaped_mean_change": 0.1}
    _, metrics = manager.shape_advantages(advantages, torch.zeros(2, 3), torch.tensor([0.25, -1.0]))
    assert metrics == {"reward_manager/shaped_token_share": 0.0, "reward_manager/shaped_mean_change": 0.0}


def test_missing_indicator_names_those_available():
    manager = RewardManager(config(indicator_names=["Efective Rank", ERV]))
    rank_metrics = {"1": layer([1.0, 3.0], [5.0, 3.0])}
    message = (
        "'Efective Rank' is not among the metrics of layer 1; available: Effective Rank diff, Effective Rank diff 2"
    )
    with pytest.raises(ValueError, match=message):
        shape(manager, rank_metrics)
    with pytest.raises(ValueError, match=message):
        manager.update(torch.zeros(2), rank_metrics)
    with pytest.raises(ValueError, match="rank_metrics is empty"):
        manager.update(torch.zeros(2), {})


@given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), st.floats(-1, 1))
@settings(max_examples=30, deadline=None)
def test_state_round_trip_through_json_is_exact(values, score):
    first = RewardManager(config(aux_fix=False))
    first.update(torch.tensor([score], dtype=torch.float64), {"1": layer(values[:2], values[2:])})
    first.update(torch.tensor([0.1], dtype=torch.float64), {"1": layer(values[2:], values[:2])})
    second = RewardManager(config(aux_fix=False))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    rank_metrics = {"1": layer([0.3, 0.7], [0.1, 0.9])}
    assert torch.equal(shape(second, rank_metrics).phi, shape(first, rank_metrics).phi)


def test_state_is_a_copy():
    manager = RewardManager(config())
    state = {"baselines": {"1": {ERA: 1.0, ERV: 1.0}}, "ema_score": 0.0}
    manager.load_state_dict(state)
    manager.state_dict()["baselines"]["1"][ERA] = 9.0
    state["baselines"]["1"][ERA] = 9.0
    assert manager.state_dict()["baselines"]["1"][ERA] == 1.0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"baselines": {}}, "expected the keys baselines and ema_score"),
        ({"baselines": {}, "ema_score": 0.0, "step": 3}, "expected the keys"),
        ([], "expected the keys"),
        ({"baselines": [], "ema_score": 0.0}, "expected a mapping of layers"),
        ({"baselines": {"1": 2.0}, "ema_score": 0.0}, r"baselines\['1'\]=2.0"),
        ({"baselines": {1: {}}, "ema_score": 0.0}, r"baselines\[1\]"),
        ({"baselines": {"1": {ERA: "x"}}, "ema_score": 0.0}, "expected a finite number"),
        ({"baselines": {"1": {ERA: math.nan}}, "ema_score": 0.0}, "expected a finite number"),
        ({"baselines": {"1": {ERA: True}}, "ema_score": 0.0}, "expected a finite number"),
        ({"baselines": {}, "ema_score": math.inf}, "ema_score=inf"),
    ],
)
def test_malformed_state_is_rejected_and_changes_nothing(state, message):
    manager = RewardManager(config())
    manager.update(torch.zeros(2), {"1": layer([1.0, 3.0], [5.0, 3.0])})
    before = manager.state_dict()
    with pytest.raises(ValueError, match=message):
        manager.load_state_dict(state)
    assert manager.state_dict() == before
