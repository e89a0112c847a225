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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.shufle=1", "data.shufle: unknown key; did you mean data.shuffle?"),
        ("ref=5", "ref=5: names a group of options; set one of ref.param_offload"),
        ("ref=[1,2]", "ref=[1,2]: names a group of options; set one of ref.param_offload"),
    ],
)
def test_the_command_line_says_it_in_one_line(override: str, message: str):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", override]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == f"error: {message}\n"
    assert result.stdout == ""
