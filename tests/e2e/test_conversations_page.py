"""The whole example of docs/conversations.md: a class, its data, training and evaluation."""

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT

from tests.e2e.runs import in_shell

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

QUICK = {
    "train.sh": "trainer.total_training_steps=1 rollout.n=2 trainer.n_gpus_per_node=1 trainer.val_before_train=false",
    "eval.sh": "n_sampling=2 trainer.n_gpus_per_node=1 model.steps=[-1]",
}


@pytest.mark.slow
def test_example_of_an_environment_trains_and_is_evaluated(tmp_path: Path):
    found = [(kind, text) for kind, text in BLOCK.findall((ROOT / "docs" / "conversations.md").read_text())]
    files = {"guess.py": ("python", "class GuessTheNumber"), "guess.jsonl": ("json", '"number": 62')}
    for name, (kind, part) in files.items():
        ((_, text),) = [block for block in found if block[0] == kind and part in block[1]]
        (tmp_path / name).write_text(text)
    (tmp_path / "data").symlink_to(ROOT / "data")
    ((_, commands),) = [block for block in found if block[0] == "bash" and "guess.jsonl" in block[1]]
    for line in commands.replace("\\\n", "").splitlines():
        _, script, *options = shlex.split(line)
        in_shell(script, *options, *QUICK[script].split(), cwd=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "runs/guess/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["turns/mean"] >= 1
    (results,) = (tmp_path / "outputs").rglob("results.csv")
    assert pd.read_csv(results)["environment/turns"].between(1, 4).all()
