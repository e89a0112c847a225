import pytest
import torch

from verl.algorithms.overlong import overlong_penalty


def test_nothing_up_to_the_buffer_then_linear_to_the_full_penalty():
    lengths = torch.tensor([0, 50, 80, 81, 90, 100])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, factor=0.5)
    assert penalty.tolist() == [0.0, 0.0, 0.0, -0.025, -0.25, -0.5]
    assert penalty.dtype == torch.float64


def test_the_papers_form():
    # DAPO: L_max = 20480 with a cache of 4096 tokens.
    lengths = torch.tensor([16384, 18432, 20480])
    assert overlong_penalty(lengths, max_length=20480, buffer=4096, factor=1.0).tolist() == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("buffer", "factor", "message"), [(0, 1.0, "buffer=0"), (11, 1.0, "buffer=11"), (5, -1.0, "factor=-1.0")]
)
def test_out_of_bounds(buffer, factor, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([1]), 10, buffer, factor)
