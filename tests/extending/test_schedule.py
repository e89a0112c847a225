"""A schedule of one's own: what it is asked, what it may return, and what is wrong."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import changed

from tests.extending.examples import example
from verl.config import ConfigError
from verl.data.prompt_rows import PromptRecord
from verl.data.schedule import SamplingRequest
from verl.rollout.schedule import SamplingSchedule

RECORDS = [PromptRecord(uid, [1], "arithmetic", "7", {}, [], False) for uid in range(2)]

OWN = """
import numpy as np

def by_prompt(request):
    return {"temperature": [[0.5], [2.0]], "top_k": 3}

def nothing(request):
    return None

class Counting:
    def __init__(self, start=0):
        self.calls = start
    def __call__(self, request):
        self.calls += 1
        return {"temperature": float(self.calls)}
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]

def greedy(request):
    return {"temperature": 0}

def shape(request):
    return {"temperature": [1.0, 2.0, 3.0]}

def name(request):
    return {"beams": 3}

def range(request):
    return {"top_p": 2.0}

def ragged(request):
    return {"temperatures": [[1.0, 2.0], [1.0]]}

def missing(request):
    return {"top_k": float("nan")}

def long(request):
    return {"temperatures": np.ones(13)}

def infinite(request):
    return {"temperatures": [1.0, float("inf")]}

def raises(request):
    return {}[request.step]
"""


def schedule_of(config, path, name, **kwargs):
    rollout = replace(config.rollout, schedule=f"{path}:{name}", schedule_kwargs=kwargs)
    return SamplingSchedule(rollout)


def request_of(config, step=1):
    return SamplingRequest(step, 10, RECORDS, 2, config.rollout.train_kwargs, 12)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_settings_broadcast_over_prompts_responses_and_positions(small_config, own, tmp_path):
    found = schedule_of(small_config, own, "by_prompt").settings(request_of(small_config))
    assert [(each.temperature, each.top_k, each.top_p) for each in found.overrides] == [(0.5, 3, 1.0)] * 2 + [
        (2.0, 3, 1.0)
    ] * 2
    assert type(found.overrides[0].top_k) is int and found.temperatures is None
    assert schedule_of(small_config, own, "nothing").settings(request_of(small_config)) is None
    file = example(tmp_path, "schedule.py")
    found = schedule_of(small_config, file, "cooling", hot=1.5, tokens=4).settings(request_of(small_config, step=10))
    assert found.overrides is None and found.temperatures.dtype == np.float32
    np.testing.assert_allclose(found.temperatures, [1.5, 1.375, 1.25, 1.125, 1.0])


def test_a_class_has_state(small_config, own):
    schedule = schedule_of(small_config, own, "Counting", start=1)
    assert schedule.settings(request_of(small_config)).overrides[0].temperature == 2.0
    assert schedule.own.note == ""
    again = schedule_of(small_config, own, "Counting")
    again.own.load_state(schedule.own.state())
    assert again.settings(request_of(small_config)).overrides[0].temperature == 3.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("greedy", "temperature=0: training needs sampling; return one above 0"),
        ("shape", r"temperature is \[1.0, 2.0, 3.0\]; it must be a number, or an array that broadcasts to \(2, 2\)"),
        ("name", "returned {'beams': 3}; it must map some of temperature, top_p, top_k, min_p, temperatures"),
        ("range", r"top_p=2.0: must be in \(0, 1\]"),
        ("ragged", "temperatures is .*; it must be a number, or an array that broadcasts to"),
        ("missing", "top_k=nan: must be whole"),
        ("long", r"temperatures is \[13\]; give 1 to max_response_length numbers"),
        ("infinite", "temperatures must be from 0.01 to 1000"),
        ("raises", r"raised KeyError: 1 \(.*own.py, line 46\)"),
    ],
)
def test_what_is_wrong_is_told(small_config, own, name, message):
    with pytest.raises(ConfigError, match=f"^rollout.schedule='.*own.py:{name}': {message}"):
        schedule_of(small_config, own, name).settings(request_of(small_config))


def test_unknown_keywords_and_unseeded_engines_are_refused(small_config, own):
    with pytest.raises(ConfigError, match="got an unexpected keyword argument 'a'; it is called with"):
        schedule_of(small_config, own, "by_prompt", a=1)
    with pytest.raises(ConfigError, match="^rollout.schedule='a:b': the project's own sampler draws; set rollout.seed"):
        changed(small_config, rollout={"schedule": "a:b", "seeded": False})
