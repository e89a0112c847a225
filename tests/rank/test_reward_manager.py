import dataclasses
import json
import math
from typing import NamedTuple

import pytest
import torch
from conftest import rank_metrics as measured
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit import f64, ppo_config
from verl.config.rewards import RewardManagerConfig
from verl.rank.reward_manager import RewardManager
from verl.rank.shaping import controller_weights, exploration_beta, relative_deviation, shaped_advantages

ERA, ERV = "Effective Rank diff 2", "Effective Rank diff"


def config(**changes):
    base = RewardManagerConfig(
        add_reward=True,
        add_adv=True,
        shaping_placement="all_tokens",
        phi_without_reward=True,
        baseline_start="first_batch",
        indicator_names=[ERA, ERV],
        guidance_metric=None,
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


def batch(era, erv):
    """Rank metrics of one layer."""
    return measured(layer(era, erv))


class Shaping(NamedTuple):
    phi: torch.Tensor
    token_rewards: torch.Tensor
    metrics: dict[str, float]


def shape(manager, rank_metrics, tokens=2):
    """What the manager says of a batch, which never changes its state."""
    zeros, before = torch.zeros(len(rank_metrics[ERA]), tokens), json.dumps(manager.state_dict())
    phi, metrics = manager.compute_phi(rank_metrics)
    shaping = Shaping(phi, manager.shape_rewards(zeros, zeros + 1, phi), metrics)
    assert json.dumps(manager.state_dict()) == before
    return shaping


def test_first_step_is_measured_against_the_batch_itself():
    # means 2 and 4: deviations of the guide -0.5, 0.5, of the velocity 0.25, -0.25, both at weight 0.5
    result = shape(RewardManager(config()), batch([1.0, 3.0], [5.0, 3.0]))
    phi = 0.5 * math.tanh(-0.5) + 0.5 * math.tanh(0.25)
    assert result.phi.tolist() == pytest.approx([phi, -phi], rel=1e-7)
    assert result.token_rewards[:, 0].tolist() == [0.0, 0.0]
    assert result.token_rewards[:, 1].tolist() == pytest.approx([phi, -phi], rel=1e-6)
    expected = {"layer_1/phi": 0.0, "layer_1/beta": 0.5, "layer_1/beta_min": 0.5, "layer_1/beta_max": 0.5, "scale": 1.0}
    expected |= {"phi_mean": 0.0, "phi_min": phi, "phi_max": -phi, "phi_std": -phi}
    for name, mu in ((ERA, 2.0), (ERV, 4.0)):
        expected |= {f"layer_1/{name}/{term}": v for term, v in (("mu", mu), ("deviation", 0.0), ("weight", 0.5))}
    expected = {f"reward_manager/{name}": value for name, value in expected.items()}
    assert result.metrics == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_later_steps_are_measured_against_the_steps_before():
    manager = RewardManager(config())
    manager.update(torch.tensor([1.0, 0.0]), batch([1.0, 3.0], [4.0, 4.0]))
    state = manager.state_dict()
    assert state == {"baselines": {"1": {ERA: 2.0, ERV: 4.0}}, "ema_score": 0.5}
    manager = RewardManager(config())
    manager.load_state_dict(json.loads(json.dumps(state)))
    manager.state_dict()["baselines"]["1"][ERA] = 9.0  # a copy
    second = batch([6.0, 6.0], [4.0, 0.0])
    result = shape(manager, second)
    expected = [0.5 * math.tanh(2.0), 0.5 * math.tanh(2.0) + 0.5 * math.tanh(-1.0)]
    assert result.phi.tolist() == pytest.approx(expected, rel=1e-7)
    assert result.metrics[f"reward_manager/layer_1/{ERA}/deviation"] == pytest.approx(2.0, rel=1e-7)
    assert result.metrics[f"reward_manager/layer_1/{ERV}/deviation"] == pytest.approx(-0.5, rel=1e-7)
    manager.update(torch.tensor([-1.0, -0.5]), second)
    # 0.75 * 2 + 0.25 * 6, 0.75 * 4 + 0.25 * 2, 0.75 * 0.5 + 0.25 * -0.75
    assert manager.state_dict() == {"baselines": {"1": {ERA: 3.0, ERV: 3.5}}, "ema_score": 0.1875}


def test_plan_b_lets_the_guide_set_the_weights():
    manager = RewardManager(config(hypothesis_type="PlanB", gain=2.0))
    manager.update(torch.zeros(2), batch([1.0, 1.0], [1.0, 1.0]))
    result = shape(manager, batch([1.0 + math.log(3) / 2, 1.0], [2.0, 2.0]))
    # beta = sigmoid(log 3) = 3/4 and 1/2; exploring follows the velocity (d = 1), exploiting the guide
    expected = [0.75 * math.tanh(1.0) + 0.25 * math.tanh(math.log(3) / 2), 0.5 * math.tanh(1.0)]
    assert result.phi.tolist() == pytest.approx(expected, rel=1e-6)
    terms = {"beta": 0.625, "beta_min": 0.5, "beta_max": 0.75, f"{ERA}/deviation": math.log(3) / 4}
    terms |= {f"{ERV}/deviation": 1.0, f"{ERV}/weight": 0.625, f"{ERA}/weight": 0.375}
    for name, value in terms.items():
        assert result.metrics[f"reward_manager/layer_1/{name}"] == pytest.approx(value, rel=1e-6), name


def test_layers_are_averaged():
    one, two = layer([1.0, 3.0], [5.0, 3.0]), layer([2.0, 9.0], [1.0, 1.0])
    manager = RewardManager(config())
    both = shape(manager, measured(one, two))
    expected = (shape(manager, measured(one)).phi + shape(manager, measured(two)).phi) / 2
    torch.testing.assert_close(both.phi, expected)
    # The first layer's deviations are of mean 0; the second's are -7/11 and 7/11 of the guide, 0 of the velocity.
    assert both.metrics["reward_manager/layer_1/phi"] == pytest.approx(0.0, abs=1e-12)
    assert both.metrics["reward_manager/phi_max"] == pytest.approx(float(expected.max()))
    assert both.metrics["reward_manager/phi_std"] == pytest.approx(float((expected[1] - expected[0]).abs() / 2))
    assert manager.baselines == {}
    manager.update(torch.zeros(2), measured(one, two))
    assert manager.baselines == {ERA: 2.0, ERV: 4.0}
    result = shape(manager, measured(layer([3.0, 3.0], [4.0, 4.0]), layer([22.0, 22.0], [1.0, 1.0])))
    for name, deviation, mu in (("layer_1", 0.5, 2.0), ("layer_2", 3.0, 5.5)):
        assert result.metrics[f"reward_manager/{name}/{ERA}/mu"] == mu
        assert result.metrics[f"reward_manager/{name}/{ERA}/deviation"] == pytest.approx(deviation)
        assert result.metrics[f"reward_manager/{name}/phi"] == pytest.approx(0.5 * math.tanh(deviation))


def test_nan_metrics_carry_no_signal():
    manager = RewardManager(config())
    rank_metrics = batch([math.nan, 1.0, 3.0], [math.nan, 4.0, math.inf])
    phi = shape(manager, rank_metrics).phi.tolist()
    assert phi[0] == 0.0
    assert phi[1:] == pytest.approx([0.5 * math.tanh(-0.5), 0.5 * math.tanh(0.5)], rel=1e-7)
    manager.update(torch.tensor([1.0, math.nan, 0.0]), rank_metrics)
    state = manager.state_dict()
    assert state == {"baselines": {"1": {ERA: 2.0, ERV: 4.0}}, "ema_score": 0.5}
    nothing = batch([math.nan] * 3, [math.nan] * 3)
    manager.update(torch.full((3,), math.nan), nothing)
    assert manager.state_dict() == state
    fresh = RewardManager(config())
    fresh.update(torch.full((3,), math.nan), nothing)
    assert fresh.state_dict() == {"baselines": {"1": {}}, "ema_score": None}
    assert shape(fresh, nothing).phi.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("score", "factor"), [(None, 0.5), (-1.0, 1.0), (0.5, 0.25), (1.0, 0.0), (3.0, 0.0)])
def test_signal_fades_as_the_score_rises(score, factor):
    rank_metrics = batch([1.0, 3.0], [5.0, 3.0])
    fixed, fading = RewardManager(config()), RewardManager(config(aux_fix=False, aux_reward_global_weight=2.0))
    if score is not None:
        fading.load_state_dict({"baselines": {}, "ema_score": score})
    result = shape(fading, rank_metrics)
    torch.testing.assert_close(result.phi, 2.0 * factor * shape(fixed, rank_metrics).phi)
    assert result.metrics["reward_manager/scale"] == 2.0 * factor


def test_switches_are_independent():
    rank_metrics = batch([1.0, 3.0, 2.0], [4.0, 4.0, 4.0])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    advantages, bonus = torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, 3), 0.5 * math.tanh(0.5)
    for add_reward, add_adv in ((False, False), (False, True), (True, False)):
        manager = RewardManager(config(add_reward=add_reward, add_adv=add_adv))
        phi, _ = manager.compute_phi(rank_metrics)
        assert phi.tolist() == pytest.approx([-bonus, bonus, 0.0], rel=1e-6)
        change = torch.tensor([[0.0, -bonus, 0.0], [0.0, 0.0, bonus], [0.0, 0.0, 0.0]]) * add_reward
        torch.testing.assert_close(manager.shape_rewards(rewards, mask, phi), rewards + change)
        shaped, metrics = manager.shape_advantages(advantages, mask, phi)
        # Two of the four tokens change, those of the second response, from -1.
        changes = {"token_share": 0.5, "mean_change": bonus / 2, "relative_change": bonus} if add_adv else {}
        changes = {f"reward_manager/shaped_{name}": value for name, value in changes.items()}
        assert metrics == pytest.approx(changes) and torch.equal(shaped[[0, 2]], advantages[[0, 2]])
        assert shaped[1].tolist() == pytest.approx([-1 + bonus * add_adv, -1.0, -1 + bonus * add_adv], rel=1e-6)


def test_missing_indicator_names_those_available():
    manager = RewardManager(config(indicator_names=["Efective Rank", ERV]))
    rank_metrics = batch([1.0, 3.0], [5.0, 3.0])
    message = "'Efective Rank' is not among the metrics; available: Effective Rank diff, Effective Rank diff 2"
    for refused in (lambda: shape(manager, rank_metrics), lambda: manager.update(torch.zeros(2), rank_metrics)):
        with pytest.raises(ValueError, match=message):
            refused()
    guided = RewardManager(config(guidance_metric="Curvature"))
    with pytest.raises(ValueError, match="guidance_metric: 'Curvature' is not among the metrics; available: Effective"):
        guided.compute_phi(batch([1.0], [1.0]))
    with pytest.raises(ValueError, match="rank_metrics is empty"):
        manager.update(torch.zeros(2), {})


def test_baselines_from_zero_follow_a_step_late():
    """Four steps worked out by hand: a = 1/4, both indicators weigh 1/2."""
    manager = RewardManager(config(baseline_start="zero"))
    half, one, five = (math.tanh(deviation) for deviation in (0.5, 1.0, 5.0))
    # Rank metrics, scores, 2 Phi, then after the update: baselines, score average. Deviations are against 0 in the
    # second step (5, -5 of the guide, 5, 0 of the velocity), then against a quarter of the first step's means 2 and 4.
    # Baselines keep 3/4 and take 1/4 of the step before's means: 2 and 4, -1/4 and 1, 1/2 and 3/2.
    steps = [
        (layer([1.0, 3.0], [4.0, 4.0]), [1.0, 1.0], [0.0, 0.0], {}, 0.0),
        (layer([0.5, -1.0], [2.0, 0.0]), [1.0, 0.0], [2 * five, -five], {ERA: 0.5, ERV: 1.0}, 0.125),
        (layer([0.75, 0.25], [2.0, 1.0]), [-0.5, -0.5], [half + one, -half], {ERA: 0.3125, ERV: 1.0}, -0.03125),
        (layer([0.625, 0.3125], [1.5, 0.5]), [0.0, 0.0], [one + half, -half], {ERA: 0.359375, ERV: 1.125}, -3 / 128),
    ]
    for indicators, scores, phi, baselines, ema_score in steps:
        rank_metrics = measured(indicators)
        # A run that resumes here goes on alike.
        resumed = RewardManager(manager.config)
        resumed.load_state_dict(json.loads(json.dumps(manager.state_dict())))
        result = shape(resumed, rank_metrics)
        # In the first step there is no signal.
        assert any("/layer_1/" in name for name in result.metrics) == (ema_score != 0.0)
        assert (2 * result.phi).tolist() == pytest.approx(phi, rel=1e-6, abs=1e-12)
        assert (2 * result.token_rewards[:, -1]).tolist() == pytest.approx(phi, rel=1e-6, abs=1e-12)
        for each in (manager, resumed):
            each.update(torch.tensor(scores), rank_metrics)
            means = {name: float(values.mean()) for name, values in indicators.items()}
            known = {"baselines": {"1": baselines} if baselines else {}, "ema_score": ema_score}
            assert each.state_dict() == known | {"previous_means": {"1": means}}
            assert each.baselines == {name: baselines.get(name, 0.0) for name in (ERA, ERV)}


ER = "Effective Rank"


def shaped_twice(settings):
    """Advantages of three responses, those after shaping in the second step and the third, and the third's metrics."""
    manager = RewardManager(settings)
    generator = torch.Generator().manual_seed(0)
    advantages, mask = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.5, 0.5]]), torch.ones(3, 2)
    results = []
    for step in range(3):
        # Growing metrics: all deviations are positive.
        values = 4.0**step * (torch.rand(3, 3, generator=generator, dtype=torch.float64) + 1)
        rank_metrics = measured(dict(zip((ERA, ERV, ER), values, strict=True)))
        phi, _ = manager.compute_phi(rank_metrics)
        results.append(manager.shape_advantages(advantages, mask, phi))
        manager.update(torch.tensor([1.0, 0.0, 0.5]), rank_metrics)
    return advantages, [shaped for shaped, _ in results[1:]], results[-1][1]


def test_only_the_released_code_is_plain_grpo():
    shipped = ppo_config("experiment=verl_grpo").reward_manager
    released = ppo_config("experiment=released_code").reward_manager
    for each in (shipped, released):
        assert (each.add_adv, each.add_reward) == (True, False)
    advantages, shaped, metrics = shaped_twice(shipped)
    assert all((after - advantages).abs().max() > 0.01 for after in shaped)
    assert metrics["reward_manager/shaped_token_share"] == 1.0
    advantages, shaped, metrics = shaped_twice(released)
    assert all(torch.equal(after, advantages) for after in shaped)
    assert metrics == {"reward_manager/shaped_token_share": 0.0, "reward_manager/shaped_mean_change": 0.0}
    # With add_reward the same code does shape, the last token alone, and so do the release's later versions.
    for changes in ({"add_reward": True}, {"phi_without_reward": True}):
        advantages, shaped, metrics = shaped_twice(dataclasses.replace(released, **changes))
        # Every deviation of the second step is 5, so Phi is tanh 5 > |A| / 2: half of |A| is added.
        assert shaped[0].tolist() == [[1.0, 1.5], [-1.0, -0.5], [0.5, 0.75]]
        assert not torch.equal(shaped[1], advantages) and torch.equal(shaped[1][:, 0], advantages[:, 0])


@pytest.mark.parametrize("start", ["first_batch", "zero"])
def test_baselines_stay_where_phi_is_not_computed(start):
    manager = RewardManager(config(add_reward=False, phi_without_reward=False, baseline_start=start))
    before, rank_metrics = manager.state_dict(), batch([1.0, 3.0], [5.0, 3.0])
    for _ in range(2):
        assert shape(manager, rank_metrics).phi.tolist() == [0.0, 0.0]
        manager.update(torch.ones(2), rank_metrics)
    assert manager.state_dict() == before


@pytest.mark.parametrize(
    ("start", "state", "message"),
    [
        ("first_batch", {"baselines": {}}, "expected the keys baselines and ema_score"),
        ("first_batch", [], "expected the keys"),
        ("first_batch", {"baselines": [], "ema_score": 0.0}, "expected a mapping of layers"),
        ("first_batch", {"baselines": {"1": 2.0}, "ema_score": 0.0}, r"baselines\['1'\]=2.0"),
        ("first_batch", {"baselines": {1: {}}, "ema_score": 0.0}, r"baselines\[1\]"),
        ("first_batch", {"baselines": {"1": {ERA: math.nan}}, "ema_score": 0.0}, "expected a finite number"),
        ("first_batch", {"baselines": {"1": {ERA: True}}, "ema_score": 0.0}, "expected a finite number"),
        ("first_batch", {"baselines": {}, "ema_score": math.inf}, "ema_score=inf"),
        ("zero", {"baselines": {}, "ema_score": 0.0}, "expected the keys baselines and ema_score and previous_means"),
        ("zero", {"baselines": {}, "ema_score": None, "previous_means": None}, "ema_score=None: expected a finite"),
        ("zero", {"baselines": {}, "ema_score": 0.0, "previous_means": {"1": {ERA: "x"}}}, r"previous_means\['1'\]"),
    ],
)
def test_malformed_state_is_rejected_and_changes_nothing(start, state, message):
    manager = RewardManager(config(baseline_start=start))
    manager.update(torch.zeros(2), batch([1.0, 3.0], [5.0, 3.0]))
    before = manager.state_dict()
    with pytest.raises(ValueError, match=message):
        manager.load_state_dict(state)
    assert manager.state_dict() == before


ENTROPY = "avg_logits_entropy"


def guided(era, erv, entropy):
    return measured(layer(era, erv) | {ENTROPY: torch.tensor(entropy, dtype=torch.float64)})


def test_guide_apart_from_the_indicators():
    manager = RewardManager(config(hypothesis_type="PlanB", gain=2.0, guidance_metric=ENTROPY))
    manager.update(torch.zeros(2), guided([1.0, 1.0], [1.0, 1.0], [3.0, 5.0]))
    assert manager.baselines == {ERA: 1.0, ERV: 1.0, ENTROPY: 4.0}
    result = shape(manager, guided([2.0, 2.0], [3.0, 3.0], [4.0 + 2 * math.log(3), 4.0]))
    # beta = sigmoid(log 3) = 3/4 and sigmoid(0) = 1/2; exploring follows the velocity, exploiting the acceleration
    expected = [0.75 * math.tanh(2.0) + 0.25 * math.tanh(1.0), 0.5 * math.tanh(2.0) + 0.5 * math.tanh(1.0)]
    assert result.phi.tolist() == pytest.approx(expected, rel=1e-7)
    logged = {name.removeprefix("reward_manager/layer_1/"): v for name, v in result.metrics.items() if ENTROPY in name}
    assert logged == pytest.approx({f"{ENTROPY}/mu": 4.0, f"{ENTROPY}/deviation": math.log(3) / 4}, rel=1e-7)


@pytest.mark.parametrize("start", ["first_batch", "zero"])
def test_state_from_before_the_guide_had_a_baseline(start):
    older, newer = (
        RewardManager(config(hypothesis_type="PlanB", baseline_start=start, guidance_metric=guide))
        for guide in (None, ENTROPY)
    )
    batches = [guided([1.0, 3.0], [5.0, 3.0], [2.0, 6.0]), guided([2.0, 3.0], [4.0, 1.0], [6.0, 2.0])]
    for each in batches:
        older.update(torch.zeros(2), each)
    newer.load_state_dict(older.state_dict())
    result = shape(newer, batches[0])
    # Against the batch's own mean of 4, or against 0, where every deviation is 5.
    expected = (4.0, 0.0) if start == "first_batch" else (0.0, 5.0)
    prefix = f"reward_manager/layer_1/{ENTROPY}"
    assert (result.metrics[f"{prefix}/mu"], result.metrics[f"{prefix}/deviation"]) == expected
    newer.update(torch.zeros(2), batches[0])
    newer.update(torch.zeros(2), batches[0])
    assert newer.baselines[ENTROPY] == {"first_batch": 4.0, "zero": 1.0}[start]
    again = RewardManager(newer.config)
    again.load_state_dict(json.loads(json.dumps(newer.state_dict())))
    assert again.state_dict() == newer.state_dict()


def test_relative_deviation():
    metric = f64(3.0, 1.0, 100.0, -100.0, math.nan, math.inf, 2.0)
    expected = f64(0.5, -0.5, 5.0, -5.0, 0.0, 0.0, 0.0)
    torch.testing.assert_close(relative_deviation(metric, 2.0), expected, rtol=1e-8, atol=0)
    # a negative baseline divides by its size: above it is positive
    torch.testing.assert_close(relative_deviation(f64(-1.0, -3.0), -2.0), f64(0.5, -0.5), rtol=1e-8, atol=0)
    # a zero baseline: any real difference saturates
    assert relative_deviation(f64(0.01, -0.01, 0.0), 0.0).tolist() == [5.0, -5.0, 0.0]


def test_weights_of_each_hypothesis():
    deviation, explore, exploit = f64(0.0, math.log(3) / 2, -math.log(3) / 2), f64(1.0, 0.0), f64(0.2, 0.8)
    expected = {
        "PlanB": [[0.6, 0.4], [0.8, 0.2], [0.4, 0.6]],  # beta = 1/2, 3/4, 1/4
        "FixTwo": [[0.6, 0.4]] * 3,
        "FixOne": [[1.2, 0.8]] * 3,
    }
    for name, weights in expected.items():
        beta = exploration_beta(deviation, name, gain=2.0)
        torch.testing.assert_close(controller_weights(beta, explore, exploit, name), f64(*weights))


def test_literal_shaped_advantages():
    advantages = torch.tensor([[2.0, 2.0, 0.0], [-2.0, -2.0, -2.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    phi = f64(0.25, 3.0, -3.0, 1.0)
    expected = [[2.25, 2.25, 0.0], [-1.5, -1.5, -1.5], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert shaped_advantages(advantages, mask, phi, kappa=4.0, placement="all_tokens").tolist() == expected
    expected = [[2.0, 2.25, 0.0], [-2.0, -2.0, -1.5], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert shaped_advantages(advantages, mask, phi, kappa=4.0, placement="last_token").tolist() == expected


@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.floats(-10, 10, width=32)), min_size=1, max_size=8),
    st.floats(1, 10),
    st.sampled_from(["all_tokens", "last_token"]),
)
@settings(max_examples=60, deadline=None)
def test_bonus_is_bounded_and_keeps_the_sign(rows, kappa, placement):
    advantages = torch.tensor([[a, a] for a, _ in rows])
    phi = torch.tensor([p for _, p in rows])
    shaped = shaped_advantages(advantages, torch.ones_like(advantages), phi, kappa, placement)
    bonus = shaped.double() - advantages.double()
    assert (bonus >= 0).all()
    # the sum is rounded to float32, whose steps are 2^-24 of the value, or 1e-45 near zero
    assert (bonus <= advantages.double().abs() * (1 / kappa + 1e-6) + 1e-44).all()
    assert (shaped * advantages.sign() >= 0).all()
    assert (bonus[phi <= 0] == 0).all()
    assert (bonus[(phi > 0.01) & (advantages[:, 0].abs() > 0.01), -1] > 0).all()
