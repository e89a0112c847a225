import subprocess
import sys

import pytest

from verl.config import ConfigError, PPOConfig, load_config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.shufle=1", "data.shufle: unknown key; did you mean data.shuffle?"),
        ("rolout.n=3", "rolout: unknown key; did you mean rollout?"),
        ("rollout.val_kwargs.zzz=1", "rollout.val_kwargs.zzz: unknown key; known there: n, temperature, top_p, top_k"),
        ("rollout=nothing", "Could not find 'rollout/nothing' Available options in 'rollout': vllm"),
    ],
)
def test_an_override_that_does_not_fit_is_explained(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, "ppo_trainer", [override])
    assert message in str(caught.value)


def test_the_command_line_says_it_in_one_line():
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "data.shufle=1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: data.shufle: unknown key; did you mean data.shuffle?\n"
    assert result.stdout == ""
