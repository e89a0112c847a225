import pytest
import torch
from conftest import rank_metrics

from verl.batch import Batch, RankMetrics
from verl.trainer.logging.rollout_metrics import (
    dataset_scalars,
    filtered_length_metrics,
    group_metrics,
    learning_metrics,
    length_metrics,
    logprob_agreement,
    rank_scalars,
    response_metrics,
)


def batch_of(correct: list[bool]) -> Batch:
    """Two responses: prompts of 1 and 3 tokens, responses of 2 and 4, the second cut at the limit."""
    truncated = torch.tensor([False, True])
    return Batch(torch.tensor([1, 3]), torch.tensor([2, 4]), 4, truncated=truncated, correct=torch.tensor(correct))


def figures(name: str, *values: float) -> dict[str, float]:
    """A metric's mean, largest and smallest value and share of the limit, as many as given."""
    return {f"{name}/{figure}": v for figure, v in zip(("mean", "max", "min", "clip_ratio"), values, strict=False)}


def test_lengths():
    lengths = figures("prompt_length", 2.0, 3.0, 1.0, 0.5) | figures("response_length", 3.0, 4.0, 2.0, 0.5)
    assert length_metrics(batch_of([True, False]), 3) == lengths
    correct = figures("response_length/correct", 2.0, 2.0, 2.0, 0.0)
    incorrect = figures("response_length/incorrect", 4.0, 4.0, 4.0, 1.0)
    counts = {"cal/num_correct": 1.0, "cal/num_incorrect": 1.0}
    assert response_metrics(batch_of([True, False])) == counts | correct | incorrect
    # A group without responses has no length.
    none_right = {"cal/num_correct": 0.0, "cal/num_incorrect": 2.0} | figures("response_length/incorrect", 3, 4, 2, 0.5)
    assert response_metrics(batch_of([False, False])) == none_right


def test_emptied_responses_have_no_length():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    expected = figures("filtered_response_length", 7 / 3, 4.0, 1.0, 1 / 3)
    assert filtered_length_metrics(mask, 4) == pytest.approx(expected)
    assert filtered_length_metrics(mask, 8)["filtered_response_length/clip_ratio"] == 0.0
    assert filtered_length_metrics(torch.zeros(2, 4, dtype=torch.int64), 4) == {}


def test_what_the_update_learns_from():
    metrics = learning_metrics(
        scores_0=torch.tensor([1.0, -0.5]),
        token_scores=torch.tensor([[0.0, 1.25], [-0.5, 0.0]]),
        token_rewards=torch.tensor([[-0.25, 1.25], [-1.0, 0.0]]),
        advantages_0=torch.tensor([[1.0, 1.0], [-2.0, 99.0]]),
        advantages=torch.tensor([[1.5, 1.5], [-1.5, 99.0]]),
        returns=torch.tensor([[1.0, 2.0], [3.0, 99.0]]),
        values=torch.tensor([[1.0, 1.0], [3.0, -99.0]]),
        response_mask=torch.tensor([[1, 1], [1, 0]]),
    )
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


def test_without_a_critic_or_tokens_nothing_is_made_up():
    mask, zeros = torch.tensor([[0, 0]]), torch.zeros(1, 2)
    groups = {"score_0", "score", "rewards"}
    names = learning_metrics(torch.ones(1), zeros, zeros, zeros, zeros, zeros, zeros, mask).keys()
    assert {name.split("/")[1] for name in names} == groups
    names = learning_metrics(torch.ones(1), zeros, zeros, zeros, zeros, None, None, torch.ones(1, 2)).keys()
    assert {name.split("/")[1] for name in names} == groups | {"advantages_0", "advantages"}


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


def test_without_captured_states_there_are_no_rank_metrics(make_calculator):
    assert rank_scalars(RankMetrics.none(2), torch.tensor([True, False])) == {}
    assert dataset_scalars(RankMetrics.none(2).mean_states, make_calculator(), 2) == {}


def test_the_rank_of_two_mean_states_is_one_once_centred(make_calculator):
    states = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])
    scalars = dataset_scalars(states, make_calculator(), 1)
    # One prefix of two rows: neither velocity nor acceleration.
    assert scalars == {
        "cal/layer_1/global/Effective Rank": pytest.approx(1.0, abs=1e-12),
        "cal/layer_1/cumulative/Effective Rank diff": 0.0,
        "cal/layer_1/cumulative/Effective Rank diff 2": 0.0,
    }


def test_logprob_agreement():
    assert logprob_agreement(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.25])) == {
        "rollout/logprob_abs_diff": 0.375,
        "rollout/logprob_abs_diff_max": 0.5,
    }


def test_groups_whose_responses_score_alike_teach_nothing():
    # Responses of a group need not be neighbours.
    scores = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    group_ids = torch.tensor([40, 7, 40, 7, 9, 7])
    correct = torch.tensor([True, False, True, False, True, True])
    with pytest.raises(RuntimeError):
        group_metrics(scores[:5], correct[:5], group_ids[:5])  # groups are of one size
    group_ids[5] = 9
    assert group_metrics(scores, correct, group_ids) == {
        "score/mean": pytest.approx(4 / 6),
        "train/pass@1": pytest.approx(4 / 6),
        "train/groups_without_variance": 1.0,
    }
    scores[3] = 1.0
    assert group_metrics(scores, correct, group_ids)["train/groups_without_variance"] == pytest.approx(2 / 3)
