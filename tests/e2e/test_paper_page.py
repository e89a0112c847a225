"""docs/paper.md: its commands are what its table says."""

import subprocess
from functools import cache

import pytest
from conftest import ROOT

from verl.cli.translate import translate
from verl.config import PPOConfig, load_config

pytestmark = pytest.mark.slow

SHELL = """
bash() { shift; printf '%s\\0' "$@"; printf '\\n\\0'; }
hf() { :; }
"""
"""Commands of the page, which then print their arguments instead of running."""


@cache
def commands() -> list[list[str]]:
    """The arguments of every `bash train.sh` of the page, as a shell reads them."""
    page = (ROOT / "docs" / "paper.md").read_text()
    code = "".join(block.partition("```")[0] for block in page.split("```bash\n")[1:])
    printed = subprocess.run(["bash", "-euc", SHELL + code], capture_output=True, text=True, check=True).stdout
    lines = printed.split("\n\0")[:-1]
    return [line.split("\0")[:-1] for line in lines]


def config_of(arguments: list[str]) -> PPOConfig:
    return load_config(PPOConfig, "ppo_trainer", translate(arguments))


MATHSTRAL, MISTRAL = "mistralai/Mathstral-7B-v0.1", "mistralai/Mistral-7B-v0.3"
LLAMA, SMALL_LLAMA = "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
QWEN, SMALL_QWEN = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-1.5B"

# Model, data, longest response, updates, responses per prompt and estimator of each pair: with shaping, and without.
PAIRS = [
    (MATHSTRAL, "abel_level3to5", 1536, 160, 4, "grpo"),
    (MISTRAL, "abel_gsm8k_level1", 1536, 160, 1, "gae"),
    (MISTRAL, "abel_gsm8k_level1", 1536, 160, 4, "grpo"),
    (LLAMA, "abel_level1to4", 1280, 160, 4, "grpo"),
    (LLAMA, "abel_level1to4", 4096, 160, 4, "grpo"),
    (SMALL_LLAMA, "abel_gsm8k_level1", 1024, 320, 4, "grpo"),
    (SMALL_LLAMA, "abel_gsm8k_level1", 1536, 320, 1, "gae"),
    (SMALL_QWEN, "abel_level3to5", 1024, 320, 4, "grpo"),
    (SMALL_QWEN, "abel_level3to5", 1536, 320, 1, "gae"),
    (QWEN, "qwen_level3to5", 1536, 160, 4, "grpo"),
]


def test_commands_are_the_papers_runs():
    found = []
    for arguments in commands()[:-1]:
        config = config_of(arguments)
        data, manager = config.data, config.reward_manager
        folder = data.train_files[0].removeprefix("data/simplerl/simplelr_").removesuffix("/train.parquet")
        steps = config.trainer.total_training_steps
        run = (config.model.path, folder, data.max_response_length, steps, config.rollout.n)
        found.append((*run, config.algorithm.adv_estimator, manager.add_adv))
        assert (data.template, data.filters, config.rollout.stop) == ("raw", True, ["Question:"])
        assert config.calculator.diff_stride == (128 if data.max_response_length == 4096 else 40)
        assert manager.aux_reward_global_weight == (
            0.5 if found[-1][0] == SMALL_QWEN and found[-1][5:] == ("gae", True) else 1
        )
    assert found == [(*pair, shaped) for pair in PAIRS for shaped in (True, False)]


def test_releases_command_is_the_first_run():
    *_, released = commands()
    ours, theirs = config_of(commands()[0]), config_of(released)
    assert theirs.trainer.total_training_steps == ours.trainer.total_training_steps == 160
    assert (theirs.data.template, theirs.data.filters) == ("raw", True)
    assert theirs.actor == ours.actor and theirs.algorithm == ours.algorithm and theirs.calculator == ours.calculator
    assert theirs.model.path == MATHSTRAL and theirs.rollout.n == 4
