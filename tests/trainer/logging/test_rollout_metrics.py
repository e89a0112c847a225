import pytest
import torch
from conftest import rank_metrics

from verl.protocol import RankMetrics, RolloutBatch
from verl.trainer.logging.rollout_metrics import (
    dataset_scalars,
    filtered_length_metrics,
    group_metrics,
    learning_metrics,
    length_metrics,
    logprob_agreement,
    rank_scalars,
    response_metrics,
    with_prefix,
)


def rollout() -> RolloutBatch:
    """Two responses: prompts of 1 and 3 tokens, responses of 2 and 4, the second cut at the limit."""
    response_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    prompt_mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    return RolloutBatch(
        input_ids=torch.ones(2, 7, dtype=torch.int64),
        attention_mask=torch.cat([prompt_mask, response_mask], dim=1),
        response_mask=response_mask,
        rollout_logprobs=torch.zeros(2, 4),
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor([False, True]),
        rank_metrics=RankMetrics.none(2),
        batch_size=[2],
    )


def test_lengths():
    assert length_metrics(rollout()) == {
        "prompt_length/mean": 2.0,
        "prompt_length/max": 3.0,
        "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 0.5,
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.5,
    }


def test_lengths_are_split_by_correctness():
    assert response_metrics(rollout(), torch.tensor([True, False])) == {
        "cal/num_correct": 1.0,
        "cal/num_incorrect": 1.0,
        "response_length/correct/mean": 2.0,
        "response_length/correct/max": 2.0,
        "response_length/correct/min": 2.0,
        "response_length/correct/clip_ratio": 0.0,
        "response_length/incorrect/mean": 4.0,
        "response_length/incorrect/max": 4.0,
        "response_length/incorrect/min": 4.0,
        "response_length/incorrect/clip_ratio": 1.0,
    }


def test_a_group_without_responses_has_no_length():
    metrics = response_metrics(rollout(), torch.tensor([False, False]))
    assert (metrics["cal/num_correct"], metrics["cal/num_incorrect"]) == (0.0, 2.0)
    assert metrics["response_length/incorrect/mean"] == 3.0
    assert not any(name.startswith("response_length/correct") for name in metrics)


def test_emptied_responses_have_no_length():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    assert filtered_length_metrics(mask, 4) == {
        "filtered_response_length/mean": pytest.approx(7 / 3),
        "filtered_response_length/max": 4.0,
        "filtered_response_length/min": 1.0,
        "filtered_response_length/clip_ratio": pytest.approx(1 / 3),
    }
    assert filtered_length_metrics(mask, 8)["filtered_response_length/clip_ratio"] == 0.0
    assert filtered_length_metrics(torch.zeros(2, 4, dtype=torch.int64), 4) == {}


def test_what_the_update_learns_from():
    mask = torch.tensor([[1, 1], [1, 0]])
    metrics = learning_metrics(
        scores_0=torch.tensor([1.0, -0.5]),
        token_scores=torch.tensor([[0.0, 1.25], [-0.5, 0.0]]),
        token_rewards=torch.tensor([[-0.25, 1.25], [-1.0, 0.0]]),
        advantages_0=torch.tensor([[1.0, 1.0], [-2.0, 99.0]]),
        advantages=torch.tensor([[1.5, 1.5], [-1.5, 99.0]]),
        returns=torch.tensor([[1.0, 2.0], [3.0, 99.0]]),
        values=torch.tensor([[1.0, 1.0], [3.0, -99.0]]),
        response_mask=mask,
    )
    assert metrics == pytest.approx(
        {
            "critic/score_0/mean": 0.25,
            "critic/score_0/max": 1.0,
            "critic/score_0/min": -0.5,
            "critic/score/mean": 0.375,
            "critic/score/max": 1.25,
            "critic/score/min": -0.5,
            "critic/rewards/mean": 0.0,
            "critic/rewards/max": 1.0,
            "critic/rewards/min": -1.0,
            "critic/advantages_0/mean": 0.0,
            "critic/advantages_0/max": 1.0,
            "critic/advantages_0/min": -2.0,
            "critic/advantages/mean": 0.5,
            "critic/advantages/max": 1.5,
            "critic/advantages/min": -1.5,
            "critic/returns/mean": 2.0,
            "critic/returns/max": 3.0,
            "critic/returns/min": 1.0,
            "critic/values/mean": 5 / 3,
            "critic/values/max": 3.0,
            "critic/values/min": 1.0,
            # variances: 2/9 of the errors 0, 1, 0 and 2/3 of the returns
            "critic/vf_explained_var": 1 - (2 / 9) / (2 / 3 + 1e-5),
        }
    )


def test_without_a_critic_or_tokens_nothing_is_made_up():
    mask, zeros = torch.tensor([[0, 0]]), torch.zeros(1, 2)
    groups = {"score_0", "score", "rewards"}
    names = learning_metrics(torch.ones(1), zeros, zeros, zeros, zeros, zeros, zeros, mask).keys()
    assert {name.split("/")[1] for name in names} == groups
    names = learning_metrics(torch.ones(1), zeros, zeros, zeros, zeros, None, None, torch.ones(1, 2)).keys()
    assert {name.split("/")[1] for name in names} == groups | {"advantages_0", "advantages"}


def test_rank_metrics_are_split_by_correctness_and_layer():
    measured = rank_metrics(
        {"Effective Rank": torch.tensor([1.0, 3.0])}, {"Effective Rank": torch.tensor([10.0, 30.0])}
    )
    scalars = rank_scalars(measured, torch.tensor([True, False]))
    assert scalars.pop("cal/overall/layer_1/nonfinite") == 0.0
    assert scalars.pop("cal/overall/layer_2/nonfinite") == 0.0
    assert scalars == {
        "cal/overall/layer_1/Effective Rank/mean": 2.0,
        "cal/overall/layer_1/Effective Rank/max": 3.0,
        "cal/overall/layer_1/Effective Rank/min": 1.0,
        "cal/correct/layer_1/Effective Rank/mean": 1.0,
        "cal/correct/layer_1/Effective Rank/max": 1.0,
        "cal/correct/layer_1/Effective Rank/min": 1.0,
        "cal/incorrect/layer_1/Effective Rank/mean": 3.0,
        "cal/incorrect/layer_1/Effective Rank/max": 3.0,
        "cal/incorrect/layer_1/Effective Rank/min": 3.0,
        "cal/overall/layer_2/Effective Rank/mean": 20.0,
        "cal/overall/layer_2/Effective Rank/max": 30.0,
        "cal/overall/layer_2/Effective Rank/min": 10.0,
        "cal/correct/layer_2/Effective Rank/mean": 10.0,
        "cal/correct/layer_2/Effective Rank/max": 10.0,
        "cal/correct/layer_2/Effective Rank/min": 10.0,
        "cal/incorrect/layer_2/Effective Rank/mean": 30.0,
        "cal/incorrect/layer_2/Effective Rank/max": 30.0,
        "cal/incorrect/layer_2/Effective Rank/min": 30.0,
    }


def means(scalars: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if name.endswith("/mean")}


def test_a_group_without_responses_has_no_mean():
    measured = rank_metrics({"Curvature": torch.tensor([1.0, 3.0])})
    scalars = rank_scalars(measured, torch.tensor([True, True]))
    assert means(scalars) == {"cal/overall/layer_1/Curvature/mean": 2.0, "cal/correct/layer_1/Curvature/mean": 2.0}
    assert not any("incorrect" in name for name in scalars)


def test_responses_without_finite_metrics_are_counted_and_left_out():
    nan = float("nan")
    measured = rank_metrics({"Curvature": torch.tensor([nan, 3.0])}, {"Curvature": torch.tensor([1.0, 2.0])})
    scalars = rank_scalars(measured, torch.tensor([True, False]))
    assert scalars["cal/overall/layer_1/nonfinite"] == 1.0
    assert scalars["cal/overall/layer_2/nonfinite"] == 0.0
    assert means(scalars) == {
        "cal/overall/layer_1/Curvature/mean": 3.0,
        "cal/incorrect/layer_1/Curvature/mean": 3.0,
        "cal/overall/layer_2/Curvature/mean": 1.5,
        "cal/correct/layer_2/Curvature/mean": 1.0,
        "cal/incorrect/layer_2/Curvature/mean": 2.0,
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


def test_logprob_agreement_counts_response_tokens_alone():
    engine, trainer = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -2.25, 0.0]])
    assert logprob_agreement(engine, trainer, torch.tensor([[1, 1, 0]])) == {
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


def test_prefix():
    assert with_prefix("val", {"pass@1": 0.5}) == {"val/pass@1": 0.5}
