"""Example commands that veRL publishes, and their options in ``verl_examples.jsonl``.

They are those of commit b178a3cd56f58b2d502255daba591e92833930a7, or of its recipes.
"""

import pytest

from tests.cli.verl_command import EXAMPLES, composed, leaves
from tests.tables import cases

OURS = dict(cases("cli/verl_same.txt"))
"""veRL's option -> ours, which has the value that a command names."""


def read(text: str) -> bool | float | str:
    """A value as a person reads it; vLLM takes SGLang's place."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return "vllm" if text == "sglang" else text


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_published_command_gives_the_values_it_names(name: str):
    options = EXAMPLES[name]
    found = leaves(composed(*(f"{key}={value}" for key, value in options.items())))
    named = {theirs: ours for theirs, ours in OURS.items() if options.get(theirs, "null") != "null"}
    assert len(named) >= 17
    for theirs, ours in named.items():
        assert found[ours] == read(options[theirs]), (theirs, ours)
    assert found["data.train_files"] == [
        part.strip("' ") for part in options["data.train_files"].strip("[]").split(",")
    ]
    assert found["reward_manager.add_adv"] is False
