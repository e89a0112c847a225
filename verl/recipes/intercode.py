"""Shell environment from InterCode (arXiv 2306.14898): the policy runs commands, reads their output, and submits.

Commands run in the sandbox, in a folder prepared by the command ``extra_info["setup"]``. The ground truth is a command
that solves the task. The reward for ``submit`` follows the authors' code, but without rounding:

    0.01 + 0.33 (1 - erf(|D|)) + 0.33 c + 0.33 s

where D is the set of file changes made by only one solution, c is the fraction of equal contents among the files that
both solutions add (1 if there are none), and s is the cosine similarity of the TF-IDF vectors of their last outputs.

We assume that the state is the list of all commands so far, which are rerun at each turn. A turn's command is its last
fenced block or, if there is none, its whole text. Conversations without ``submit`` earn no reward.
:mod:`verl.recipes.intercode_task` writes a small task.
"""

import json
import math
import re
from collections import Counter
from operator import mul
from typing import Any

from verl.utils.sandbox import require_sandbox, run_python

SECONDS = 5.0
PROGRAM = r"""
import hashlib, json, os, pathlib, subprocess, sys

def shell(command, folder):
    script = "trap 'pwd > /tmp/folder' EXIT\n" + command
    run = subprocess.run(["bash", "-c", script], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
    return run.stdout.decode(errors="replace"), pathlib.Path("/tmp/folder").read_text().strip()

def files():
    paths = (path for path in pathlib.Path("/tmp/work").rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

os.makedirs("/tmp/work")
setup, *commands = json.load(sys.stdin)
shell(setup, "/tmp/work")
before, folder, printed = files(), "/tmp/work", ""
for command in commands:
    printed, folder = shell(command, folder)
json.dump([printed, before, files()], sys.stdout)
"""


class Shell:
    """Shell environment for ``rollout.multi_turn.environment``, to be used with ``reward=only``."""

    def __init__(self) -> None:
        require_sandbox()

    def start(self, record: Any) -> dict[str, Any]:
        return {"setup": str(record.extra_info.get("setup", "")), "gold": str(record.ground_truth), "commands": []}

    def step(self, state: dict[str, Any], turn: Any) -> tuple[dict[str, Any], list[dict[str, str]], bool, float]:
        command = command_in(turn.text)
        if command == "submit":
            mine, gold = (run(state["setup"], commands) for commands in (state["commands"], [state["gold"]]))
            return state, [], True, reward(mine, gold) if mine and gold else 0.0
        state = state | {"commands": [*state["commands"], command]}
        outcome = run(state["setup"], state["commands"])
        output = "The commands took too long, or printed too much." if outcome is None else outcome[0] or "(nothing)"
        return state, [{"role": "user", "content": output}], False, 0.0


def command_in(text: str) -> str:
    """Return the last fenced block of a turn, or its whole text if it has no fenced block."""
    parts = text.split("```")
    return (parts[-2].partition("\n")[2] if len(parts) > 2 else text).strip()


Outcome = tuple[str, dict[str, str], dict[str, str]]
"""Output of the last command, and file hashes by path before the first command and after the last command."""


def run(setup: str, commands: list[str]) -> Outcome | None:
    """Run commands in the sandbox and return their outcome, or None if they do not finish."""
    ending, stdout, _ = run_python(PROGRAM, json.dumps([setup, *commands]), seconds=SECONDS)
    return tuple(json.loads(stdout)) if ending == "ok" else None


def reward(mine: Outcome, gold: Outcome) -> float:
    """Return the reward, from 0.01 to 1, for the outcome ``mine`` given the reference outcome ``gold``."""
    changed, expected = (changes(before, after) for _, before, after in (mine, gold))
    added = [path for path, kind in changed & expected if kind == "added"]
    same = sum(mine[2][path] == gold[2][path] for path in added) / len(added) if added else 1.0
    return 0.01 + 0.33 * (1 - math.erf(len(changed ^ expected)) + same + similarity(mine[0], gold[0]))


def changes(before: dict[str, str], after: dict[str, str]) -> set[tuple[str, str]]:
    """Return the set of changed paths with the kind of change: ``added``, ``deleted`` or ``modified``."""
    kinds = {path: "deleted" if path not in after else "modified" for path in before if before[path] != after.get(path)}
    return set((kinds | dict.fromkeys(after.keys() - before.keys(), "added")).items())


def similarity(one: str, other: str) -> float:
    """Compute the cosine similarity of TF-IDF vectors as in scikit-learn: smooth idf and words of 2+ characters."""
    counts = [Counter(re.findall(r"\b\w\w+\b", text.lower())) for text in (one, other)]
    if not any(counts):
        return float(one == other)
    rare = {word: 1 + math.log(3 / (1 + sum(word in c for c in counts))) for word in counts[0] | counts[1]}
    a, b = ([c[word] * weight for word, weight in rare.items()] for c in counts)
    return sum(map(mul, a, b)) / (math.hypot(*a) * math.hypot(*b)) if all(counts) else 0.0
