"""Responses of engines on their way into the stores."""

import torch

from verl.batch import Batch
from verl.evaluation.generation import finite_metrics


def test_metrics_are_named_by_layer_and_finite():
    batch = Batch.of([[1], [1]], [[2], [3, 4]])
    one, two = torch.tensor([[1.5], [torch.nan]]), torch.tensor([[1.0, torch.inf], [2.0, 3.0]])
    columns = {"rank/Curvature": one.double(), "rank/Effective Rank": two.double(), "turn_rank/Curvature": two}
    assert finite_metrics(batch.fill(**columns)) == [
        {"Curvature": 1.5, "layer_1/Effective Rank": 1.0},
        {"layer_1/Effective Rank": 2.0, "layer_2/Effective Rank": 3.0},
    ]
