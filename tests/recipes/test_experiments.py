"""Every experiment is composed and parsed, and the code that it names takes its options."""

import pytest
from conftest import ROOT, small_overrides

from verl.checkpoint.run_start import parse_run_config
from verl.config.load import compose_config
from verl.config.ppo import PPOConfig
from verl.trainer.ppo.estimation import check_own_code

EXPERIMENTS = sorted(file.stem for file in (ROOT / "configs/experiment").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_can_start(name, tiny_model, arithmetic_prompts, tmp_path):
    overrides = [f"experiment={name}", *small_overrides(tiny_model, arithmetic_prompts, tmp_path / "run")]
    overrides.append("data.max_response_length=64")  # more than the overlong buffer of dapo
    config = parse_run_config(PPOConfig, compose_config(PPOConfig, "ppo_trainer", overrides))
    check_own_code(config, total_steps=2)


def test_every_experiment_has_a_row():
    readme = (ROOT / "configs/README.md").read_text()
    for name in EXPERIMENTS:
        assert f"| `{name}` |" in readme, name
