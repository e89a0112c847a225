import pytest
import torch
from tensordict import TensorDict

from verl.protocol import RolloutBatch
from verl.trainer.rollout_metrics import (
    dataset_scalars,
    group_metrics,
    length_metrics,
    logprob_agreement,
    rank_scalars,
    with_prefix,
)


def rollout(
    rank_metrics: dict[str, torch.Tensor] | None = None, mean_states: torch.Tensor | None = None
) -> RolloutBatch:
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
        rank_metrics=TensorDict(rank_metrics or {}, batch_size=[2]),
        mean_states=torch.zeros(2, 0, 3) if mean_states is None else mean_states,
        batch_size=[2],
    )


def test_lengths():
    assert length_metrics(rollout()) == {
        "prompt_length/mean": 2.0,
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.5,
    }


def test_rank_metrics_are_split_by_correctness_and_layer():
    batch = rollout({"Effective Rank": torch.tensor([[1.0, 10.0], [3.0, 30.0]])})
    assert rank_scalars(batch, torch.tensor([True, False])) == {
        "cal/overall/layer_1/nonfinite": 0.0,
        "cal/overall/layer_2/nonfinite": 0.0,
        "cal/overall/layer_1/Effective Rank/mean": 2.0,
        "cal/correct/layer_1/Effective Rank/mean": 1.0,
        "cal/incorrect/layer_1/Effective Rank/mean": 3.0,
        "cal/overall/layer_2/Effective Rank/mean": 20.0,
        "cal/correct/layer_2/Effective Rank/mean": 10.0,
        "cal/incorrect/layer_2/Effective Rank/mean": 30.0,
    }


def test_a_group_without_responses_has_no_mean():
    batch = rollout({"Curvature": torch.tensor([[1.0], [3.0]])})
    names = rank_scalars(batch, torch.tensor([True, True])).keys()
    means = {"cal/overall/layer_1/Curvature/mean", "cal/correct/layer_1/Curvature/mean"}
    assert names == means | {"cal/overall/layer_1/nonfinite"}


def test_responses_without_finite_metrics_are_counted_and_left_out():
    nan = float("nan")
    batch = rollout({"Curvature": torch.tensor([[nan, 1.0], [3.0, 2.0]])})
    assert rank_scalars(batch, torch.tensor([True, False])) == {
        "cal/overall/layer_1/nonfinite": 1.0,
        "cal/overall/layer_1/Curvature/mean": 3.0,
        "cal/incorrect/layer_1/Curvature/mean": 3.0,
        "cal/overall/layer_2/nonfinite": 0.0,
        "cal/overall/layer_2/Curvature/mean": 1.5,
        "cal/correct/layer_2/Curvature/mean": 1.0,
        "cal/incorrect/layer_2/Curvature/mean": 2.0,
    }


def test_without_captured_states_there_are_no_rank_metrics(make_calculator):
    assert rank_scalars(rollout(), torch.tensor([True, False])) == {}
    assert dataset_scalars(rollout(), make_calculator(), 2) == {}


def test_the_rank_of_two_mean_states_is_one_once_centred(make_calculator):
    states = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])
    scalars = dataset_scalars(rollout(mean_states=states), make_calculator(), 1)
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
