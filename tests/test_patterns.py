"""Every regular expression of the project ends soon, whatever the text."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from regular_expressions import BOUNDED, Expression, check


@pytest.mark.slow
def test_every_pattern_ends_soon():
    # In a process that can be killed.
    script = ROOT / "tests" / "regular_expressions.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=ROOT)
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert [line for line in result.stdout.splitlines() if not line.endswith(" ok")] == [], result.stderr
    assert result.returncode == 0 and len(names) > 100
    assert {*BOUNDED, "verl.verifiers.notation._REWRITES[3]", "verl.data.templates._MARKERS"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"\(?[A-Z]\)?(?:(?:(?<=\))|[ ,])+\(?[A-Z]\)?)*", r"\s*\bx"])
def test_a_bad_pattern_is_found(pattern: str):
    assert check(Expression("bad", re.compile(pattern), anchored=False)) is not None
