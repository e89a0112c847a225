"""Methods that change rewards, against literals from the formulas of their papers."""

import numpy as np
import pytest
import torch
from conftest import changed

from tests.kit import ppo_config, stored
from tests.method.batches import batch_of
from verl.config import ConfigError
from verl.method import Method
from verl.method.calls import MethodCalls
from verl.recipes.cosine_length import CosineLength
from verl.recipes.laser import Laser, LaserD, band_of, expected_correct, repeats, target_length
from verl.recipes.noisy_verifier import Backward
from verl.recipes.rep_exp import leverages, sparse_projection
from verl.recipes.rlsp import Exploring
from verl.recipes.rubric_anchors import Rubrics

PLAIN = {"knees": {}, "vetoes": {}, "pairs": [], "power": 1.0}
EXTRAS = [{"style": 1.0, "care": 0.5}, {"style": 0.5, "care": 0.0}, {"style": 0.0, "care": 1.0}]


def rewards_of(method: Method, scores, **fields) -> list[float]:
    method.config = changed(ppo_config(), data={"max_response_length": 16}, rollout={"n": 8})
    batch = batch_of(scores, **fields)
    return method.shape_rewards(batch, batch.scores.double()).tolist()


def test_laser():
    assert rewards_of(Laser(target_share=0.5), [1, 1, 0, 0], lengths=[8, 9, 2, 12]) == [1.5, 1.0, -0.5, -0.5]
    assert [band_of(share) for share in (0, 1 / 3, 0.4, 2 / 3, 0.7, 1)] == [
        *("hard", "hard", "medium", "medium", "easy", "easy")
    ]


@pytest.mark.parametrize(
    ("lengths", "expected_of", "target"),
    [
        ([3, 5, 7, 9, 11], 5, 3),  # one of five is complete at 3 tokens
        ([3, 5, 7, 9, 11], 2, 7),  # three of five at 7, half or more
        ([3, 5, 7, 9, 11], 1, 11),
        ([1, 1], 5, 2),  # the grid begins at an eighth of 16
        ([], 1, None),
    ],
)
def test_laser_d_targets(lengths, expected_of, target):
    assert target_length(lengths, expected_of, longest=16) == target


@pytest.mark.parametrize(
    ("n", "expected"), [(2, (1, 0, 1)), (4, (1, 1, 2)), (8, (1, 2, 5)), (16, (1, 5, 10)), (32, (1, 10, 21))]
)
def test_laser_d_counts_on_the_least_right_responses_of_a_band(n: int, expected: tuple[int, int, int]):
    assert expected_correct(n) == expected


def test_laser_d_follows_its_bands_and_resumes():
    # An easy prompt, 3 of 4 right, and a hard one, 1 of 4.
    step = {"lengths": [4, 6, 8, 10, 9, 12, 14, 16], "uids": [5, 5, 5, 5, 2, 2, 2, 2]}
    correct = [1, 1, 1, 0, 1, 0, 0, 0]
    method = LaserD(every=2)
    first = [1.5, 1.5, 1.5, -0.5, 1.5, -0.5, -0.5, -0.5]
    method.step = 1
    assert rewards_of(method, correct, **step) == first  # until then the target is the maximal length
    resumed = LaserD(every=2)
    resumed.load_state_dict(stored(method.state_dict()))
    for one in (method, resumed):
        one.step = 2
        assert rewards_of(one, correct, **step) == first
        assert one.targets == {"easy": 4, "hard": 16}
        one.step = 3
        assert rewards_of(one, correct, **step) == [1.5, 1.0, 1.0, -0.5, 1.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 1, 2, 1, 2, 1, 2], False),  # too short to tell
        (list(range(20)), False),
        ([1, 2, *range(3, 7), 1, 2, *range(7, 19)], False),  # the pair (1, 2) again after 6 of 20 tokens, a third
        ([1, 2, *range(3, 6), 1, 2, *range(7, 20)], True),  # and after 5
        ([1, 2, 3, 4, *range(5, 25), 1, 2, 3, 4], True),  # twice the same four tokens, however far apart
        ([*range(40), *[7, 7, 7, 7], *range(50, 60)], False),  # a run of one token
        ([*range(40), *[7] * 7, *range(50, 60)], True),  # six of them twice
        ([*range(90), 1, 2, 3, 4, *range(95, 205)], False),  # of 204 tokens, twice is not three times
        ([*range(100), 1, 2, 3, 4, 200, 1, 2, 3, 4, *range(205, 305)], True),
    ],
)
def test_repetition(tokens: list[int], expected: bool):
    assert repeats(tokens) is expected


def test_laser_de_rewards_wrong_responses_that_explore():
    # A hard prompt: of its responses one is right, three go beyond the target of 4; one repeats itself, one is cut off.
    batch = {"lengths": [4, 12, 4, 12, 12], "truncated": torch.tensor([False, False, False, False, True])}
    tokens = [1, 2, *range(20, 24), 1, 2, *range(30, 42), 1, 2, *range(30, 34), 1, 2, *[8, 9] * 6, 1, 2, *range(30, 42)]
    fields = batch | {"tokens": torch.tensor(tokens)}
    for explore, bonus in ((True, 0.5), (False, 0.0)):
        method = LaserD(every=5, explore=explore)
        method.step, method.targets = 1, {"hard": 4}
        assert rewards_of(method, [1, 0, 0, 0, 0], **fields) == [1.5, -0.5 + bonus, -0.5, -0.5, -0.5]


def test_cosine_length():
    fields = {"lengths": [4, 8, 16, 4, 8, 16]}  # cosines 0.7071, 0 and -1
    expected = [0.9267767, 0.75, 0.5, -0.9267767, -0.75, -0.5]
    assert rewards_of(CosineLength(), [1, 1, 1, 0, 0, 0], **fields) == pytest.approx(expected)
    flat = CosineLength(correct=(2.0, 2.0), wrong=(0.0, 1.0))
    assert rewards_of(flat, [1, 0], lengths=[8, 8]) == pytest.approx([2.0, 0.5])


def test_backward_is_unbiased():
    assert rewards_of(Backward(0.1, 0.2), [1, 0]) == pytest.approx([9 / 7, -1 / 7])
    # Of 100 right responses 80 pass, of 100 wrong ones 10.
    for truth, verdicts in ((1, [1] * 80 + [0] * 20), (0, [1] * 10 + [0] * 90)):
        assert sum(rewards_of(Backward(0.1, 0.2), verdicts)) / 100 == pytest.approx(truth)
    with pytest.raises(ConfigError, match="false_positive=0.5 and false_negative=0.5 must be .* their sum below 1"):
        Backward(0.5, 0.5)


def test_exploring():
    # Half of the exploration reward at 4 tokens, three quarters at 8, none for what was cut off at 16.
    fields = {"lengths": [4, 8, 16], "truncated": torch.tensor([False, False, True])}
    assert rewards_of(Exploring(alpha=0.8, half_share=0.25), [1, 0, 0], **fields) == pytest.approx([0.9, 0.15, 0.0])


def test_rubrics():
    mean = Rubrics(weights={"correct": 3.0, "style": 1.0}, **PLAIN)
    assert rewards_of(mean, [1, 1, 0], extras=EXTRAS) == [1.0, 0.875, 0.0]
    # Saturation, interaction and shaping. Style 1 counts 0.75: (2 * 0.75 + 2 * 0.75 * 0.5) / 4 = 0.5625; 0.5: 1 / 4;
    # 0: 0. Then squares.
    options = {"knees": {"style": 0.5}, "vetoes": {}, "pairs": [["style", "care", 2.0]], "power": 2.0}
    assert rewards_of(Rubrics(weights={"style": 2.0}, **options), [1, 1, 1], extras=EXTRAS) == [0.5625**2, 0.0625, 0.0]
    veto = Rubrics(weights={"correct": 1.0}, **(PLAIN | {"vetoes": {"finished": 1.0, "care": 0.4}}))
    truncated = torch.tensor([False, False, True])
    assert rewards_of(veto, [1, 1, 1], truncated=truncated, extras=EXTRAS) == [1.0, 0.0, 0.0]
    with pytest.raises(
        ConfigError, match=r"the verifier of 'set' gives tone=None; a rubric is correct, boxed, finished"
    ):
        rewards_of(Rubrics(weights={"tone": 1.0}, **PLAIN), [1])
    with pytest.raises(ConfigError, match="must be at least 0 and not all 0"):
        Rubrics(weights={"correct": -1.0}, **PLAIN)


def rep_exp(*options: str, step: int = 1, **kwargs) -> MethodCalls:
    arguments = [f"+trainer.method_kwargs.{name}={value}" for name, value in kwargs.items()]
    calls = MethodCalls(ppo_config("seed=3", "trainer.method=verl.recipes.rep_exp:RepExp", *arguments, *options), None)
    calls.begin_step(step)
    return calls


def test_rep_exp_rewards_unusual_states():
    states = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0))
    states[5] = torch.nan
    scores, uids = [1, 0, 0, 1, 0, 1, 0, 0], [4, 4, 6, 4, 6, 4, 6, 5]
    batch = batch_of(scores, uids=uids, mean_states=states)
    found, _ = rep_exp(beta=0.5, lam=0.1, dim=4, step=7).shape_rewards(batch, batch.scores.double())
    projection = sparse_projection(16, 4, [3, 7]).numpy()
    expected = [float(score) for score in scores]
    # Only prompt 4 has correct responses; the state of response 5 is not finite.
    rows = [0, 1, 3]
    features = {i: projection @ states[i, -1].double().numpy() for i in rows}
    mean = sum(features.values()) / 3
    inverse = np.eye(4) / 0.1
    for i in rows:  # by updates of rank one, as the authors invert it
        h = (features[i] - mean)[:, None]
        inverse = inverse - inverse @ h @ h.T @ inverse / (1 + h.T @ inverse @ h)
    for i in rows:
        h = features[i] - mean
        expected[i] += 0.5 * float(h @ inverse @ h)
    assert found.tolist() == pytest.approx(expected, rel=1e-9) and min(expected[i] - scores[i] for i in rows) > 0.01
    again, _ = rep_exp(beta=0.5, lam=0.1, dim=4, step=8).shape_rewards(batch, batch.scores.double())
    assert again.tolist() != found.tolist()  # another projection


def test_rep_exp_projection_is_sparse():
    drawn = sparse_projection(64, 5000, [0, 1])
    # One entry in sqrt(64) differs from 0, and its square is sqrt(64) / 5000.
    assert drawn.shape == (5000, 64) and set(drawn.abs().unique().tolist()) == {0.0, 0.04}
    assert (drawn != 0).double().mean().item() == pytest.approx(1 / 8, abs=0.003)
    assert (drawn > 0).double().mean().item() == pytest.approx(1 / 16, abs=0.003)
    assert torch.equal(sparse_projection(64, 8, [0, 1]), sparse_projection(64, 8, [0, 1]))


def test_leverages_of_two_opposite_states():
    # Centred, they are -1 and 1 in one dimension: 1 / (0.5 + 2).
    assert leverages(torch.tensor([[3.0, 1.0], [5.0, 1.0]], dtype=torch.float64), 0.5).tolist() == [0.4, 0.4]


def test_rep_exp_needs_states_and_sound_values():
    with pytest.raises(ConfigError, match="calculator.enable=False: RepExp reads hidden states"):
        rep_exp("calculator.enable=false", "reward_manager=unshaped")
    with pytest.raises(ConfigError, match="lam=0, dim=32"):
        rep_exp(lam=0)
