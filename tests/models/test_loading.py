"""Weights on their way out of a model, in one process."""

import torch
from torch import nn
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from verl.models.loading import as_in_files


def test_parts_of_one_tensor_in_the_files_go_out_together():
    model = nn.Module()
    model.config = None
    model._weight_conversions = [
        WeightRenaming("^old.", "new."),
        WeightConverter(["qkv.weight"], ["q.weight", "k.weight", "v.weight"], operations=[Chunk(dim=0)]),
    ]
    weights = {name: torch.randn(2, 2) for name in ("new.q.weight", "new.k.weight", "new.norm.weight", "new.v.weight")}
    given: list[str] = []

    def counted():
        for pair in weights.items():
            given.append(pair[0])
            yield pair

    found = []
    for name, value in as_in_files(model, [*weights, "new.unknown"], counted()):
        found.append((name, value, len(given)))
    assert [(name, after) for name, _, after in found] == [("old.norm.weight", 3), ("old.qkv.weight", 4)]
    assert torch.equal(found[0][1], weights["new.norm.weight"])
    parts = [weights[f"new.{part}.weight"] for part in "qkv"]
    assert torch.equal(found[1][1], torch.cat(parts))
