import math

import pytest
import torch
from conftest import rank_metrics

from verl.batch import Batch
from verl.config.judge import JUDGE
from verl.rewards.registry import CUSTOM_FUNCTIONS
from verl.rewards.score import with_score
from verl.trainer.logging.rollout_metrics import (
    at_k_metrics,
    dataset_scalars,
    filtered_length_metrics,
    judge_metrics,
    lag_metrics,
    learning_metrics,
    length_metrics,
    logged_sources,
    metrics_by_source,
    policy_metrics,
    rank_scalars,
    response_metrics,
    verdict_metrics,
)
from verl.verifiers.verdict import Verdict


def batch_of(correct: list[bool]) -> Batch:
    """Two responses: prompts of 1 and 3 tokens, responses of 2 and 4, the second cut at the limit."""
    truncated = torch.tensor([False, True])
    columns = {"truncated": truncated, "correct": torch.tensor(correct)}
    return Batch(torch.tensor([1, 3]), torch.tensor([2, 4]), 4, **columns)


def figures(name: str, *values: float) -> dict[str, float]:
    """A metric's mean, largest and smallest value and share of the limit, as many as given."""
    return {f"{name}/{figure}": v for figure, v in zip(("mean", "max", "min", "clip_ratio"), values, strict=False)}


def test_lengths():
    lengths = figures("prompt_length", 2.0, 3.0, 1.0, 0.5) | figures("response_length", 3.0, 4.0, 2.0, 0.5)
    assert length_metrics(batch_of([True, False]), 3) == lengths
    correct = figures("response_length/correct", 2.0, 2.0, 2.0, 0.0)
    incorrect = figures("response_length/incorrect", 4.0, 4.0, 4.0, 1.0)
    counts = {"cal/num_correct": 1.0, "cal/num_incorrect": 1.0}
    assert response_metrics(batch_of([True, False]), None, 1) == counts | correct | incorrect
    # A group without responses has no length.
    none_right = {"cal/num_correct": 0.0, "cal/num_incorrect": 2.0} | figures("response_length/incorrect", 3, 4, 2, 0.5)
    assert response_metrics(batch_of([False, False]), None, 1) == none_right


def test_emptied_responses_have_no_length():
    batch = Batch.of([[1]] * 4, [[1] * 4] * 4)
    batch.fill(learn_mask=torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool())
    expected = figures("filtered_response_length", 7 / 3, 4.0, 1.0, 1 / 3)
    assert filtered_length_metrics(batch, 4) == pytest.approx(expected)
    assert filtered_length_metrics(batch, 8)["filtered_response_length/clip_ratio"] == 0.0
    assert filtered_length_metrics(batch[[1]], 4) == {}


def test_learning_metrics_cover_masked_tokens_only():
    of_responses = {
        "score_0": torch.tensor([1.0, -0.5]),
        "score": torch.tensor([1.25, -0.5]),
        "rewards": torch.tensor([1.0, -1.0]),
    }
    of_tokens = {
        "advantages_0": torch.tensor([[1.0, 1.0], [-2.0, 99.0]]),
        "advantages": torch.tensor([[1.5, 1.5], [-1.5, 99.0]]),
        "returns": torch.tensor([[1.0, 2.0], [3.0, 99.0]]),
        "values": torch.tensor([[1.0, 1.0], [3.0, -99.0]]),
    }
    metrics = learning_metrics(of_responses, of_tokens, torch.tensor([[True, True], [True, False]]))
    expected = {
        "score_0": (0.25, 1.0, -0.5),
        "score": (0.375, 1.25, -0.5),
        "rewards": (0.0, 1.0, -1.0),
        "advantages_0": (0.0, 1.0, -2.0),
        "advantages": (0.5, 1.5, -1.5),
        "returns": (2.0, 3.0, 1.0),
        "values": (5 / 3, 3.0, 1.0),
    }
    # variances: 2/9 of the errors 0, 1, 0 and 2/3 of the returns
    assert metrics.pop("critic/vf_explained_var") == pytest.approx(1 - (2 / 9) / (2 / 3 + 1e-5))
    by_name = [figures(f"critic/{name}", *values) for name, values in expected.items()]
    assert metrics == pytest.approx({name: value for each in by_name for name, value in each.items()})

    # Without tokens to learn from, nothing is made up of them.
    metrics = learning_metrics(of_responses, of_tokens, torch.zeros(2, 2, dtype=torch.bool))
    assert {name.split("/")[1] for name in metrics} == of_responses.keys()


def layer(*values: float) -> dict[str, torch.Tensor]:
    return {"Effective Rank": torch.tensor(values)}


def one(value: float) -> tuple[float, float, float]:
    """Mean, largest and smallest of a single response."""
    return value, value, value


NAN = float("nan")


@pytest.mark.parametrize(
    ("layers", "correct", "overall", "right", "wrong"),
    [
        (
            *([layer(1.0, 3.0), layer(10.0, 30.0)], [True, False]),
            *([(2.0, 3.0, 1.0), (20.0, 30.0, 10.0)], [one(1.0), one(10.0)], [one(3.0), one(30.0)]),
        ),
        # A group without responses has no mean.
        ([layer(1.0, 3.0)], [True, True], [(2.0, 3.0, 1.0)], [(2.0, 3.0, 1.0)], []),
        # Responses without finite metrics are counted and left out.
        (
            *([layer(NAN, 3.0), layer(1.0, 2.0)], [True, False]),
            *([one(3.0), (1.5, 2.0, 1.0)], [(), one(1.0)], [one(3.0), one(2.0)]),
        ),
    ],
)
def test_rank_metrics_are_split_by_correctness_and_layer(layers, correct, overall, right, wrong):
    scalars = rank_scalars(rank_metrics(*layers), torch.tensor(correct))
    for number, values in enumerate(layers, start=1):
        nonfinite = scalars.pop(f"cal/overall/layer_{number}/nonfinite")
        assert nonfinite == float(values["Effective Rank"].isnan().sum())
    assert scalars == {
        name: value
        for group, by_layer in (("overall", overall), ("correct", right), ("incorrect", wrong))
        for number, values in enumerate(by_layer, start=1)
        for name, value in figures(f"cal/{group}/layer_{number}/Effective Rank", *values).items()
    }


def test_rank_metrics_need_captured_states(make_calculator):
    assert rank_scalars({}, torch.tensor([True, False])) == {}
    assert dataset_scalars(Batch.of([[1]], [[2]]), make_calculator(), 2) == {}


def test_rank_of_two_mean_states_is_one_once_centred(make_calculator):
    states = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])
    scalars = dataset_scalars(Batch.of([[1]] * 2, [[2]] * 2, mean_states=states), make_calculator(), 1)
    # One prefix of two rows: neither velocity nor acceleration.
    assert scalars == {
        "cal/layer_1/global/Effective Rank": pytest.approx(1.0, abs=1e-12),
        "cal/layer_1/cumulative/Effective Rank diff": 0.0,
        "cal/layer_1/cumulative/Effective Rank diff 2": 0.0,
    }


def test_distance_of_the_engine_from_the_policy():
    engine, policy = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.25])
    columns = {"rollout_logprobs": engine, "logprobs": policy, "entropy": torch.tensor([1.0, 2.0])}
    metrics = policy_metrics(Batch(torch.tensor([1]), torch.tensor([2]), 2, **columns), "none", 2.0)
    expected = {"rollout/logprob_abs_diff": 0.375, "rollout/logprob_abs_diff_max": 0.5, "actor/entropy": 1.5}
    assert {name: metrics[name] for name in expected} == expected
    assert [name for name in metrics if name.startswith("rollout_corr/")]


def test_figures_by_lag():
    engine = torch.tensor([-1.0, -1.0, -2.0, -1.0, -1.0])
    batch = Batch(torch.tensor([1, 1]), torch.tensor([3, 2]), 3, rollout_logprobs=engine)
    batch.fill(version=torch.tensor([3, 3, 4, 4, 4]), rewards=torch.tensor([1.0, 0.5]).double())
    # Of the two tokens that are one version behind, one is twice as likely today.
    batch.fill(logprobs=engine + torch.tensor([math.log(2), 0, 0, 0, 0]))
    ranks = {"Effective Rank": ([3.0, 5.0], [3.5, 4.0]), "Curvature": ([1.0, 1.0], [2.0, 2.0])}
    for name, (of_engine, of_trainer) in ranks.items():
        pair = {f"rank/{name}": of_engine, f"trainer_rank/{name}": of_trainer}
        batch.fill("episode", **{column: torch.tensor(values)[:, None] for column, values in pair.items()})
    approx = {
        "async/lag/mean": 0.4,
        "async/lag/max": 1.0,
        "async/lag_0/tokens": 0.6,
        "async/lag_0/kl": 0.0,
        "async/lag_0/eff_sample_size": 1.0,
        "async/lag_0/capped": 0.0,
        "async/lag_0/reward": 0.5,
        "async/lag_0/response_length": 2.0,
        # Of the last version that a response saw, which is that of both.
        "async/lag_0/layer_1/Effective Rank/change": -0.25,
        "async/lag_0/layer_1/Effective Rank/abs_change": 0.75,
        "async/lag_1/tokens": 0.4,
        "async/lag_1/kl": (1 - math.log(2)) / 2,
        # Weights 1.5, where they are capped, and 1: 1.25^2 / 1.625.
        "async/lag_1/eff_sample_size": 0.9615384,
        "async/lag_1/capped": 0.5,
        "async/lag_1/reward": 1.0,
        "async/lag_1/response_length": 3.0,
    }
    assert lag_metrics(batch, 5, 1.5) == pytest.approx(approx, abs=1e-6)


def test_single_source_has_no_metrics_of_its_own():
    assert logged_sources(["a", "a"]) == [] and logged_sources([]) == []
    assert logged_sources(["a", "b", "b"]) == ["b", "a"]
    many = [f"source {i}" for i in range(1000)] + ["common", "common"]
    assert logged_sources(many) == ["common", *(f"source {i}" for i in range(15))]


def test_rows_of_each_source():
    sources = ["b", "a", "b", "c"]
    metrics = metrics_by_source(
        sources,
        ["a", "b", "absent"],
        lambda rows: {"rows": float((rows * 2 ** torch.arange(4)).sum()), "rows/max": 1.0, "rows/min": 0.0},
    )
    assert metrics == {"a/rows": 2.0, "b/rows": 5.0}


def test_verdict_metrics_by_source_and_group():
    extras = [{"format": 1.0, "pred": "5"}, {"format": 0.0}, {"format": 0.5}, {}]
    corrects = [True, False, True, True]
    results = [
        with_score(Verdict(correct, True, "custom", score=float(correct), extras=extra), "mix")
        for correct, extra in zip(corrects, extras, strict=True)
    ]
    metrics = verdict_metrics(results, 2, ["a", "a", "b", "b"], ["a", "b"])
    assert metrics == {
        **{"score/mean": 0.75, "train/pass@1": 0.75, "train/groups_without_variance": 0.5, "verifier/custom": 4.0},
        **{"train/reward_extra/format/mean": 0.5, "train/reward_extra/format/count": 3.0},
        **{"train/a/pass@1": 0.5, "train/a/score/mean": 0.5},
        **{"train/a/reward_extra/format/mean": 0.5, "train/a/reward_extra/format/count": 2.0},
        **{"train/b/pass@1": 1.0, "train/b/score/mean": 1.0},
        **{"train/b/reward_extra/format/mean": 0.5, "train/b/reward_extra/format/count": 1.0},
    }
    assert not [name for name in verdict_metrics(results, 2, ["a"] * 4, []) if "/a/" in name]
    # One response to a prompt has no others; of all four as one group, one is wrong.
    for n, share in ((1, None), (2, 0.5), (4, 0.0)):
        assert verdict_metrics(results, n, ["a"] * 4, []).get("train/groups_without_variance") == share


SCORES = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0])
CORRECT = torch.tensor([True, False, True, False, False, False, False, True])
"""Two of the first prompt's four responses are correct, and one of the second's."""


def verdicts(answers: list[str]) -> list[Verdict]:
    rows = zip(SCORES.tolist(), CORRECT.tolist(), answers, strict=True)
    return [
        Verdict(right, True, "exact" if right else "different", answer, score=score) for score, right, answer in rows
    ]


def test_figures_of_four_responses():
    # The first prompt's wrong answers differ; the second's agree, and one response has none.
    figures = at_k_metrics(verdicts(["7", "8", "7", "9", "5", "5", "", "3"]), 4)
    expected = {
        # 1 - C(2, 2) / C(4, 2) and 1 - C(3, 2) / C(4, 2)
        "pass@2": (5 / 6 + 1 / 2) / 2,
        "pass@4": 1.0,
        # Pairs of 0, 0, 0.5, 1: best 0, 0.5, 0.5, 1, 1, 1, worst once 0.5, else 0; of 0, 0, 0, 1: half have the 1.
        "best@2/mean": (4 / 6 + 1 / 2) / 2,
        "best@4/mean": 1.0,
        "worst@2/mean": (0.5 / 6 + 0.0) / 2,
        "worst@4/mean": 0.0,
        # Votes of two: 1 + 4 / 2 of 6; against the 5s 2 / 2, and 1 without a vote against it, of 6.
        "maj@2/mean": (3 / 6 + 2 / 6) / 2,
        # Two against one and one; one against two.
        "maj@4/mean": 0.5,
    }
    assert figures == pytest.approx(expected)


def test_k_of_other_numbers_and_no_answers():
    assert at_k_metrics(verdicts([""] * 8), 1) == {}
    assert list(at_k_metrics(verdicts([""] * 8), 8)) == [
        f"{name}@{k}{suffix}"
        for k in (2, 4, 8)
        for name, suffix in (("pass", ""), ("best", "/mean"), ("worst", "/mean"))
    ]


def test_value_of_the_judges_name_is_read_only_from_a_judge(monkeypatch: pytest.MonkeyPatch):
    values = ["good", [1], None, 0.25, math.inf, 0.75, True]
    verdicts = [Verdict(True, True, "custom", score=1.0, extras={"judge": value}) for value in values]
    assert judge_metrics(verdicts) == {}
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "*", f"0.5*{JUDGE}")
    assert judge_metrics(verdicts) == {"judge/score/mean": 0.5, "judge/failed_share": 0.0}
