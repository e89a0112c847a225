"""Every experiment composes, says where it comes from, and is listed."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

from verl.config import PPOConfig, load_config
from verl.workers.policy_loss import check_policy_loss

EXPERIMENTS = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
OURS = ("grpo", "ppo", "verl_grpo", "verl_ppo", "released_code", "released_code_later")


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_composes_with_every_preset(path: Path):
    for preset in ("embedded", "paper", "paper_4096"):
        config = load_config(PPOConfig, "ppo_trainer", [f"preset={preset}", f"experiment={path.stem}"])
        assert config.trainer.experiment_name == path.stem
        check_policy_loss(config)
    if path.stem not in OURS:
        comment = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
        assert re.search(r"arXiv \d{4}\.\d{5}", comment), "name the source in the first comment"
    assert f"| `{path.stem}` |" in (ROOT / "configs" / "README.md").read_text()
