"""The commands of docs/extending.md name options that there are, and files that the page has."""

import re
import shlex

import pytest
from conftest import ROOT

from tests.extending.examples import BLOCK
from verl.config import PPOConfig, load_config

PAGE = (ROOT / "docs/extending.md").read_text()
COMMANDS = re.findall(r"^bash train\.sh ((?:.*\\\n)*.+)$", PAGE, re.MULTILINE)
FILES = {f"my/{block['name']}" for block in BLOCK.finditer(PAGE)}


def test_every_example_has_a_command():
    named = {file for command in COMMANDS for file in re.findall(r"my/\w+\.py", command)}
    assert named == FILES and len(FILES) > 5


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_is_one(command: str):
    overrides = shlex.split(command.replace("\\\n", " "))
    assert load_config(PPOConfig, "ppo_trainer", overrides) != load_config(PPOConfig, "ppo_trainer", [])
