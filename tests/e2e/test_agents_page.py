"""The agent of docs/agents.md trains; so does one that starts another conversation within its session."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from tests.e2e.runs import in_shell

TWO_CONVERSATIONS = """

async def with_another(record, base_url, api_key):
    reward = await agent(record, base_url, api_key)
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    other = [{"role": "user", "content": "3+4="}]
    await client.chat.completions.create(model="policy", messages=other, temperature=0.1, max_tokens=9)
    return reward
"""


@pytest.mark.slow
def test_agents_of_the_page_train(tmp_path: Path):
    page = (ROOT / "docs" / "agents.md").read_text()
    ((code),) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my.py").write_text(code.replace("max_tokens=400", "max_tokens=9") + TWO_CONVERSATIONS)
    options = (
        "rollout.multi_turn.enable=true rollout.multi_turn.agent.path=my.py:with_another rollout.n=2 "
        "rollout.multi_turn.reward=only trainer.default_local_dir=run trainer.n_gpus_per_node=1 "
        f"model.path={ROOT}/data/tiny_model trainer.total_training_steps=2 trainer.val_before_train=false "
        "trainer.test_freq=-1 trainer.samples.freq=1 data.train_batch_size=4 actor.ppo_mini_batch_size=2 "
        "data.max_response_length=64"
    )
    assert "agents set temperature; the run's own options apply" in in_shell("train.sh", *options.split(), cwd=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert step["agent/histories/mean"] == 2 and step["turns/min"] == 3
        assert step["agent/further_histories/other"] == 8 and step["environment/failures"] == 0
        assert step["timing_s/old_log_prob"] > 0 and step["actor/grad_norm"] >= 0
    samples = pq.read_table(min((tmp_path / "run/samples").glob("train*.parquet")))
    (further,) = json.loads(samples["further_rows"][0].as_py())
    assert [part["by"] for part in further["conversation"]] == ["policy", "environment", "policy"]
    assert "3+4=" in samples["prompt"][0].as_py() and samples["opened_by"][0].as_py() == "other"
