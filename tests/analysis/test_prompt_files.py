"""Files of prompts in veRL's layout."""

from pathlib import Path

import pytest
from conftest import ROOT

from verl.analysis.prompt_files import read_prompt_file
from verl.config import ConfigError
from verl.data.records import RL_SCHEMA, rl_record, write_parquet

RECORD = rl_record(data_source="arithmetic", question="What is 2 + 3?", ground_truth="5", split="test", index=0)


def test_the_embedded_prompts():
    name, problems = read_prompt_file(str(ROOT / "data" / "arithmetic" / "test.parquet"), 3, {})
    assert (name, len(problems), [problem.index for problem in problems]) == ("test", 3, [0, 1, 2])
    assert (problems[0].question, problems[0].answer) == ("What is 9511 - 1506?", "8005")
    assert problems[0].data_source == "arithmetic"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}, "a single user turn"),
        ({"data_source": "nobodys"}, "row 1: "),
    ],
)
def test_invalid_prompts_are_named(change: dict[str, object], message: str, tmp_path: Path):
    path = tmp_path / "prompts.parquet"
    write_parquet(path, [RECORD, RECORD | change], RL_SCHEMA)
    with pytest.raises(ConfigError) as caught:
        read_prompt_file(str(path), -1, {})
    assert f"{path}, row 1: " in str(caught.value) and message in str(caught.value)
    assert read_prompt_file(str(path), 1, {})[1][0].question == "What is 2 + 3?"
