"""Agents whose sessions outlive a step: several histories, resumed to the bit, and an agent that depends on chance."""

from pathlib import Path

import pytest

from tests.e2e.runs import Run, assert_resumes, records
from tests.e2e.test_kills import CARRIED_OVER
from tests.kit import ROOT, small_overrides, user_code

AGENTS = """
import json, random, urllib.request

def ask(base_url, *messages):
    body = json.dumps({"messages": messages, "max_tokens": 24}).encode()
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body)) as reply:
        return json.load(reply)["choices"][0]["message"]

def review(record, base_url, what):
    first = record.messages[0]
    reply = ask(base_url, first)
    verdict = ask(base_url, {"role": "user", "content": what}, reply)
    ask(base_url, first, reply, {"role": "user", "content": what})
    return len(verdict["content"]) / 100

def agent(record, base_url, api_key):
    return review(record, base_url, "1+1=")

def by_chance(record, base_url, api_key):
    return review(record, base_url, f"{random.randrange(10**6)}=")
"""


def overrides(folder: Path, agent: str) -> list[str]:
    return [
        *small_overrides(ROOT / "data/tiny_tool_model", ROOT / "data/arithmetic_tools/test.parquet", folder / "run"),
        *("experiment=arithmetic_tools", "rollout.multi_turn.tools=[]", "data.val_sample_size=8"),
        f"rollout.multi_turn.agent.path={user_code(folder, AGENTS)}:{agent}",
        *("data.max_response_length=96", "rollout.max_num_seqs=4", "calculator.compare_versions=true"),
        *("trainer.total_training_steps=5", "trainer.except_save=[2]", "trainer.save_hf_model=false"),
        *("trainer.val_before_train=false", "trainer.test_freq=4", "actor.optim.lr=1e-4", *CARRIED_OVER),
    ]


@pytest.mark.slow
@pytest.mark.nightly
def test_sessions_of_several_histories_resume_to_the_bit(tmp_path: Path):
    options = overrides(tmp_path, "agent")
    Run.complete(options, tmp_path / "whole.log")
    whole = records(tmp_path / "run")
    assert whole[0]["async/carried_over_tokens"] > 0 < whole[1]["async/carried_over_tokens"]
    assert max(record["async/lag/max"] for record in whole) >= 1
    for record in whole:
        assert record["environment/replay_differences"] == record["environment/failures"] == 0
        assert record["agent/histories/mean"] == 2 and record["turns/min"] == 3
        # Under the same weights the engine's rank metrics are the trainer's.
        assert record.get("async/lag_0/layer_1/Effective Rank/abs_change", 0.0) < 1e-3
    assert_resumes(options, tmp_path / "run", 5, 2, tmp_path / "resumed.log")


@pytest.mark.slow
@pytest.mark.nightly
def test_agents_that_depend_on_chance_are_counted(tmp_path: Path):
    Run.complete(overrides(tmp_path, "by_chance"), tmp_path / "log")
    whole = records(tmp_path / "run")
    assert sum(record["environment/replay_differences"] for record in whole) > 0
    assert all(record["environment/failures"] == 0 and record["turns/min"] == 3 for record in whole)
    assert (tmp_path / "log").read_text().count("was played again and differed: a re") == 1
