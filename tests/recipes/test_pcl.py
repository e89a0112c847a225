"""PCL's value function and choice, against numbers by hand."""

import json
from dataclasses import replace

import pytest
import torch

from verl.data.prompt_rows import PromptRecord
from verl.data.samplers import StepOutcome
from verl.data.selectors import Candidates
from verl.recipes.pcl import PromptCurriculum
from verl.utils.json_state import from_json, to_json

RECORD = PromptRecord(0, [3], "arithmetic", "7", {}, [], False)


def test_v_takes_a_step_on_the_squared_error():
    curriculum = PromptCurriculum(lr=2.0, num_features=8)
    assert curriculum.value(RECORD) == 0.5
    # d/dw (V - 1)^2 = 2 (V - 1) V (1 - V) = -1/4 for the token and for the constant, so both weights rise by 1/2.
    curriculum.update(StepOutcome(1, [0], [1.0], [1.0], {}, [RECORD]))
    assert curriculum.weights.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0.5]
    assert curriculum.value(RECORD) == pytest.approx(0.7310585786)  # sigmoid(1)
    again = PromptCurriculum(num_features=8)
    again.load_state_dict(from_json(json.loads(json.dumps(to_json(curriculum.state_dict())))))
    assert torch.equal(again.weights, curriculum.weights)


def test_the_prompts_nearest_to_a_half_are_chosen():
    curriculum = PromptCurriculum(num_features=8)
    curriculum.weights[:4] = torch.tensor([4.0, -1.0, 0.5, -3.0])
    records = [replace(RECORD, uid=uid, input_ids=[uid]) for uid in range(4)]
    assert curriculum.select(Candidates(1, 10, records, 2)) == [2, 1]
