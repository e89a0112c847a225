"""Programs that take turns, in real processes."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT
from turns import Player

PROGRAM = """
import sys, time
from turns import wait_for_turn
for step in range(3):
    wait_for_turn()
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2])
print("out of steps", file=sys.stderr)
sys.exit(3)
"""


def player(tmp_path: Path, name: str, program: str = PROGRAM, timeout_s: float = 60) -> Player:
    command = [sys.executable, "-c", program, str(tmp_path / "done"), name]
    return Player(command, tmp_path / name, {"PYTHONPATH": str(ROOT / "benchmarks")}, timeout_s)


def test_only_who_has_the_turn_works(tmp_path: Path):
    players = {name: player(tmp_path, name) for name in "ab"}
    assert not (tmp_path / "done").exists()
    for name in "abba":
        assert players[name].step() > 0
    assert (tmp_path / "done").read_text() == "abba"
    with pytest.raises(RuntimeError, match=r"ended: out of steps\n"):
        players["a"].step()
    for one in players.values():
        one.end()
        assert one.process.returncode is not None


def test_a_step_has_a_limit(tmp_path: Path):
    slow = player(tmp_path, "slow", PROGRAM.replace("with open", "time.sleep(60)\n    with open"))
    slow.timeout_s = 0.2
    with pytest.raises(TimeoutError, match=r"took more than 0\.2 s"):
        slow.step()
    slow.end()
