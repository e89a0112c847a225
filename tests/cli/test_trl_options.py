"""TRL's names on the command line are answered with ours."""

import pytest

from tests.tables import refusals
from verl.cli.dialects import SCHEMA, trl_groups, trl_option
from verl.cli.eval_arguments import plain_arguments
from verl.cli.translate import translate
from verl.cli.values import FlagError
from verl.config.evaluation import EvaluationConfig


@pytest.mark.parametrize(("words", "line"), refusals("cli/refusals.txt", "trl"))
def test_names_of_trl_are_answered_with_ours(words: str, line: str, refused):
    with refused(line, error=FlagError):
        translate(words.split())


def test_names_that_are_ours_or_the_releases_stay(capsys: pytest.CaptureFixture[str]):
    assert translate(["seed=3"]) == ["seed=3"]
    assert "rollout.temperature=0.7" in translate(["--temperature", "0.7"])
    assert plain_arguments(["temperatures=0.7", "num_generations=8"], EvaluationConfig)[-1] == "num_generations=8"


def test_rows_name_options_that_exist():
    rows = [text for group in trl_groups() for text in group["rows"].values()]
    alone = [text for text in rows if "`" not in text and " " not in text]
    assert len(alone) > 40 and {*alone} <= SCHEMA
    assert trl_option("rollout.top_k; -1 for all") == ("rollout.top_k", "-1 for all")
