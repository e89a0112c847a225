"""A researcher's own functions and classes, found by import path."""

from pathlib import Path

import pytest

from verl.config.checks import require_known
from verl.config.errors import ConfigError
from verl.utils.user_code import load_own


def test_a_module_and_a_file(tmp_path: Path):
    assert load_own("math:gcd", "actor.policy_loss")(12, 18) == 6
    file = tmp_path / "mine.py"
    file.write_text("class A:\n    @staticmethod\n    def double(x): return 2 * x\n\ndef get(): return A\n")
    assert load_own(f"{file}:A.double", "f")(4) == 8
    # Parts of one file share what it holds.
    assert load_own(f"{file}:get", "f")() is load_own(f"{file}:A", "f")
    file.write_text("def get(): return 3\n")
    assert load_own(f"{file}:get", "f")() == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math:nothing", "f='math:nothing': math has no function or class 'nothing'"),
        ("math:pi", "f='math:pi': math has no function or class 'pi'"),
        ("no_such_module:f", "f='no_such_module:f': importing it raised ModuleNotFoundError: No module named"),
        ("gone.py:f", "f='gone.py:f': no such file; name a .py file or a module"),
    ],
)
def test_what_is_not_there(path: str, message: str):
    with pytest.raises(ConfigError) as raised:
        load_own(path, "f")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("value", ["grpo", "my_pkg.losses:rover", "folder/mine.py:Loss.of"])
def test_names_and_paths_are_accepted(value: str):
    require_known("f", value, ["grpo", "rloo"])


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (
            "gpro",
            "must be one of grpo, rloo, or your own as module:attribute or file.py:attribute; did you mean 'grpo'?",
        ),
        (":f", "an import path is module:attribute or file.py:attribute"),
        ("mine.py:", "an import path is module:attribute or file.py:attribute"),
    ],
)
def test_others_are_refused(value: str, fix: str):
    with pytest.raises(ConfigError) as raised:
        require_known("f", value, ["grpo", "rloo"])
    assert str(raised.value) == f"f={value!r}: {fix}"
