import pytest
import torch

from verl.algorithms.advantages.groups import check_shapes, group_responses, on_response_tokens, response_scores


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_statistics_of_interleaved_groups():
    groups = group_responses(torch.tensor([7, -3, 7, -3, -3]))
    values = torch.tensor([1.0, 0.5, 4.0, 2.0, 0.5])
    assert groups.counts.tolist() == [3, 2]
    assert groups.sums(values).tolist() == [3.0, 5.0]
    assert groups.baselines(values).tolist() == [1.0, 2.5]
    assert groups.centred(values).tolist() == [-1.5, -0.5, 1.5, 1.0, -0.5]
    assert groups.centred(values).dtype == torch.float64


def test_a_group_of_one_keeps_its_values():
    groups = group_responses(torch.tensor([4, 9, 4]))
    values = torch.tensor([1.0, 7.0, 4.0])
    assert groups.baselines(values).tolist() == [2.5, 0.0]
    assert groups.centred(values).tolist() == [-1.5, 7.0, 1.5]
    assert groups.deviations(values).tolist() == [4.5**0.5, 1.0]


def test_scores_count_response_tokens_alone():
    rewards = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 8.0, 16.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    scores = response_scores(rewards, mask)
    assert scores.tolist() == [3.0, 20.0, 0.0]
    assert scores.dtype == torch.float64


def test_values_are_repeated_on_response_tokens():
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    expected = [[2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.0, -1.0]]
    assert on_response_tokens(f64(2.0, 5.0, -1.0), mask).tolist() == expected


def test_shapes_are_named_in_the_order_given():
    a, b, c = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2)
    check_shapes({"a": a, "b": b}, {"c": c})
    check_shapes({"a": a}, {})
    with pytest.raises(ValueError) as error:
        check_shapes({"a": a, "b": torch.zeros(3, 2)}, {"c": c})
    assert str(error.value) == "a (2, 3), b (3, 2), c (2,): expected [B, R], [B, R] and [B]"
    with pytest.raises(ValueError) as error:
        check_shapes({"a": a}, {"c": torch.zeros(3)})
    assert str(error.value) == "a (2, 3), c (3,): expected [B, R] and [B]"
    with pytest.raises(ValueError, match=r"a \(2,\), b \(2,\): expected \[B, R\] and \[B, R\]"):
        check_shapes({"a": c, "b": c}, {})
