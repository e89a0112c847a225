"""RECAP's weights of data sources, against numbers by hand."""

import json
import math
from dataclasses import replace

import pytest
import torch

from verl.algorithms.advantages.grpo import grpo_advantages
from verl.recipes.recap import EPS, Reweighted
from verl.utils.json_state import from_json, to_json

from .step_inputs import advantage_inputs


def inputs_of(math_correct: list[int], code_correct: list[int]):
    """Two groups, of the sources math and code."""
    size = len(math_correct)
    inputs = advantage_inputs(math_correct + code_correct, groups=[0] * size + [1] * size)
    sources = ["math"] * size + ["code"] * size
    records = [replace(record, data_source=s) for record, s in zip(inputs.records, sources, strict=True)]
    return replace(inputs, records=records)


def test_weights_follow_convergence_and_instability():
    estimator = Reweighted(window=2, temperature=0.5)
    # Losses of math: 1, 0.5, then 0.5, 0; of code always 0.5.
    steps = [([0, 0], [1, 0]), ([1, 0], [1, 0]), ([1, 0], [0, 1]), ([1, 1], [1, 0])]
    for math_correct, code_correct in steps[:3]:
        inputs = inputs_of(math_correct, code_correct)
        plain = grpo_advantages(inputs.token_rewards, inputs.response_mask, inputs.group_ids, norm_by_std=True)
        assert torch.equal(estimator(inputs), plain) and set(estimator.weights().values()) == {1.0}
    # To the bit after a resume.
    again = Reweighted(window=2, temperature=0.5)
    again.load_state_dict(from_json(json.loads(json.dumps(to_json(estimator.state_dict())))))
    inputs = inputs_of(*steps[3])
    found = estimator(inputs)
    assert torch.equal(again(inputs), found)
    # c and i of math: 0.25 of 0.75, and a deviation of 0.25; of code: 1 and none.
    of_math = (0.25 + EPS) / (0.75 + EPS) + 0.25 / (1 + 2 * EPS)
    powers = {"math": math.exp(of_math / 0.5), "code": math.exp(1 / 0.5)}
    expected = {source: 2 * power / sum(powers.values()) for source, power in powers.items()}
    assert estimator.weights() == pytest.approx(expected) and expected["math"] < 1 < expected["code"]
    plain = grpo_advantages(inputs.token_rewards, inputs.response_mask, inputs.group_ids, norm_by_std=True)
    weights = torch.tensor([expected["math"]] * 2 + [expected["code"]] * 2, dtype=torch.float64)
    torch.testing.assert_close(found, plain * weights[:, None])


def test_a_source_that_comes_later_weighs_1_until_its_windows_are_full():
    estimator = Reweighted(window=1)
    estimator.losses = {"math": [0.5, 0.5], "new": [0.25]}
    assert estimator.weights() == {"math": 1.0, "new": 1.0}
    estimator.losses["new"] = [0.0, 0.0]  # solved: no loss, and no error
    assert estimator.weights() == pytest.approx({"math": 1.0, "new": 1.0})
    estimator.losses["new"] = [0.0, 1.0]  # 1000 times as large: all the weight, and no overflow
    estimator.temperature = 0.1
    assert estimator.weights() == {"math": 0.0, "new": 2.0}
    with pytest.raises(ValueError, match="window=0"):
        Reweighted(window=0)
