"""DRIVE's choice of the hardest prompts."""

import json
from dataclasses import replace

from verl.data.prompt_rows import PromptRecord
from verl.data.samplers import StepOutcome
from verl.data.selectors import Candidates
from verl.recipes.drive import HardFocus
from verl.utils.json_state import from_json, to_json

RECORDS = [replace(PromptRecord(0, [3], "arithmetic", "7", {}, [], False), uid=uid) for uid in range(5)]


def test_prompts_that_fail_most_are_kept():
    focus = HardFocus()
    assert focus.select(Candidates(1, 10, RECORDS, 2)) == [0, 1]
    focus.update(StepOutcome(1, [0, 1, 2, 4], [0.0] * 4, [0.5, 0.25, 0.75, 0.0], {}, RECORDS))
    # The fourth was never sampled, and counts as the mean, 0.375. A prompt is known by its uid, wherever it stands.
    assert focus.select(Candidates(2, 10, RECORDS, 3)) == [4, 1, 3]
    assert focus.select(Candidates(2, 10, RECORDS[::-1], 3)) == [0, 3, 1]
    focus.update(StepOutcome(2, [4, 3], [0.0] * 2, [1.0, 0.25], {}, RECORDS))
    again = HardFocus()
    again.load_state_dict(from_json(json.loads(json.dumps(to_json(focus.state_dict())))))
    assert again.select(Candidates(3, 10, RECORDS, 5)) == focus.select(Candidates(3, 10, RECORDS, 5)) == [1, 3, 0, 2, 4]
