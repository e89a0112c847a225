"""The Python tool, as a model's call reaches it."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from verl.utils.user_code import load_code

pytestmark = pytest.mark.slow

PATH = "verl.rollout.python_tool:python"


@pytest.fixture(scope="module")
def python(sandbox):
    return load_code(PATH, "rollout.multi_turn.tools")


def test_model_is_told_of_the_argument(python):
    (argument,) = get_json_schema(python)["function"]["parameters"]["properties"].items()
    assert argument[0] == "code" and argument[1]["type"] == "string" and argument[1]["description"]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(2**10)", "1024"),
        ("x = 1", "(nothing was printed)"),
        (
            "print('so far')\n1/0",
            'so far\nTraceback (most recent call last):\n  File "/main.py", line 2, in <module>\n    1/0\n    ~^~\n'
            "ZeroDivisionError: division by zero",
        ),
        ("def f(n):\n  f(n + 1)\nf(0)", "  [Previous line repeated 996 more times]"),
        ("print('a' * 5000 + 'b' * 5000)", "\n... 2000 characters left out ...\nbbbb"),
        (
            "print('x', flush=True)\nwhile True: print(end='y' * 9999)",
            "OSError: stopped, as it printed more than 16 MiB",
        ),
        ("import sys; sys.exit('no')", "no"),
        ("x = ", "SyntaxError: invalid syntax"),
        ("# \ud800", "(nothing was printed)"),
    ],
)
def test_results(python, code: str, result: str):
    assert result in python(code)
    assert len(python(code)) <= 8100


def test_missing_sandbox_is_refused():
    load = f"from verl.utils.user_code import load_code; load_code({PATH!r}, 'rollout.multi_turn.tools')"
    done = subprocess.run(
        [sys.executable, "-c", load],
        cwd=Path(__file__).parents[2],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1].startswith(
        f"verl.config.errors.ConfigError: rollout.multi_turn.tools={PATH!r}: importing it raised ConfigError: "
        "bubblewrap is missing: apt-get install bubblewrap"
    )
