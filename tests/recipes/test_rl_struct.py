"""The generated JSON task and its verifier (arXiv 2512.00319)."""

import json
from types import ModuleType

import pytest

from verl.recipes import intercode_task, rl_struct, search_r1, swe_rl
from verl.recipes.rl_struct import score

TRUTH = {"name": "Ada", "age": 31, "tags": ["red", "blue"], "city": "Rome"}
RIGHT = json.dumps(TRUTH)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (RIGHT, 1.0),
        (f"```json\n{RIGHT}\n```", 1.0),
        (json.dumps(dict(reversed(TRUTH.items()))), 1.0),
        (RIGHT.replace("31", "32"), 0.2 + 0.1 + 0.2 + 0.5 * 3 / 4),
        (RIGHT.replace("31", '"31"'), 0.2 + 0.1),  # a text is no number
        (RIGHT.replace("31", "31.0"), 0.2 + 0.1),
        (RIGHT.replace('"city"', '"town"'), 0.2 + 0.1),
        (f"Here it is: {RIGHT}", 0.2 + 0.2 + 0.5),  # valid and right, but not in the format
        (f"Here it is: {RIGHT} or {RIGHT}", 0.0),  # no object from the first brace to the last
        (RIGHT[:-1], 0.0),
        ("[1, 2]", 0.0),
        ('{"age": 1, "age": 31}', 0.0),
        ('{"age": NaN}', 0.0),
        ("[" * 9000, 0.0),
        ("", 0.0),
        (RIGHT + " " * 20000, 0.0),
    ],
)
def test_layers_are_rewarded_one_by_one(response, reward):
    found = score("json_task", response, TRUTH)
    assert found["score"] == pytest.approx(reward)
    assert found["acc"] is (reward == 1.0)


@pytest.mark.parametrize("task", [rl_struct, swe_rl, search_r1, intercode_task])
def test_tasks_are_seeded_and_distinct(task: ModuleType):
    made = task.rows(200, seed=3)
    assert made == task.rows(200, seed=3) != task.rows(200, seed=4)
    assert len({row["prompt"][0]["content"] for row in made}) == 200


def test_task_has_right_answers():
    made = rl_struct.rows(300, seed=3)
    assert sum("city" in row["reward_model"]["ground_truth"] for row in made) > 100
    for row in made:
        truth = row["reward_model"]["ground_truth"]
        assert score(row["data_source"], json.dumps(truth), truth)["score"] == pytest.approx(1.0)
        assert all(str(truth[name]) in row["prompt"][0]["content"] for name in ("name", "age"))
