import pytest
import torch

from verl.algorithms.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("lengths", "longest", "buffer", "factor", "expected"),
    [
        # Nothing up to the buffer, then linear to the full penalty, and no further.
        ([0, 50, 80, 81, 90, 100, 110], 100, 20, 0.5, [0.0, 0.0, 0.0, -0.025, -0.25, -0.5, -0.5]),
        # DAPO: L_max = 20480 with a cache of 4096 tokens.
        ([16384, 18432, 20480], 20480, 4096, 1.0, [0.0, -0.5, -1.0]),
    ],
)
def test_literal_penalties(lengths, longest, buffer, factor, expected):
    penalty = overlong_penalty(torch.tensor(lengths), longest, buffer, factor)
    assert penalty.tolist() == expected and penalty.dtype == torch.float64
