"""SWE-RL (arXiv 2502.18449): edits to source files, rewarded by the similarity of their diff to the reference diff.

A response contains a thought in a ``<think>`` tag and edits in a ``<solution>`` tag. The edits are blocks like this:

    ```python
    ### path
    <<<<<<< SEARCH
    lines of the file
    =======
    new lines
    >>>>>>> REPLACE
    ```

As in the authors' code, the response's unified diff of each file is compared to the reference diff by the ratio of
``difflib.SequenceMatcher``. The ratio is 0 if only one of the diffs exists. The reward is the mean ratio over the files
in either diff, or -1 if the format is wrong, a search text is not found, or a block changes nothing. The ground truth
is ``{"before": {path: text}, "after": {path: text}}``.

``python -m verl.recipes.swe_rl FOLDER`` writes a small task.
"""

import difflib
import random
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from verl.recipes.common import task_row, write_task

DATA_SOURCE = "edit_task"
OPERATORS = {"sum": "+", "difference": "-", "product": "*", "ratio": "/"}


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Score a response for ``reward_score.custom_functions``; it is correct if its diff equals the reference diff."""
    before, after = ground_truth["before"], ground_truth["after"]
    try:
        edited = apply_edits(before, blocks_of(solution_str))
    except ValueError:
        return {"score": -1.0, "acc": False}
    reference, made = diffs(before, after), diffs(before, edited)
    reward = fmean(similarity(made.get(path, ""), reference.get(path, "")) for path in {**reference, **made})
    return {"score": reward, "acc": reward == 1.0}


def blocks_of(response: str) -> list[tuple[str, str, str]]:
    """Return the path, search text and replacement of each block. Raises ``ValueError`` if the format is invalid."""
    tags = ("<think>", "</think>", "<solution>", "</solution>")
    if any(response.count(tag) != 1 for tag in tags):
        raise ValueError("a tag is missing or duplicate")
    thought = response.partition("<think>")[2].partition("</think>")[0]
    lines = response.partition("<solution>")[2].partition("</solution>")[0].strip().split("\n")
    blocks = []
    for i, line in enumerate(lines[:-1]):
        if line.startswith("### ") and lines[i + 1] == "<<<<<<< SEARCH" and i and lines[i - 1].startswith("```"):
            middle = lines.index("=======", i + 2)
            end = lines.index(">>>>>>> REPLACE", middle + 1)
            if lines[end + 1 : end + 2] == ["```"]:
                blocks.append((line[4:], "\n".join(lines[i + 2 : middle]), "\n".join(lines[middle + 1 : end])))
    if not thought.strip() or not blocks:
        raise ValueError("no thought, or no block")
    return blocks


def apply_edits(files: Mapping[str, str], blocks: list[tuple[str, str, str]]) -> dict[str, str]:
    """Return the edited files. Raises ``ValueError`` if a search text is not found or equals its replacement."""
    edited: dict[str, str] = {}
    for path, search, replacement in blocks:
        # The leading line break prevents matches in the middle of a line.
        text = "\n" + edited.get(path, files.get(path, ""))
        if search == replacement or "\n" + search not in text:
            raise ValueError(f"{path}: nothing to replace")
        edited[path] = text.replace("\n" + search, "\n" + replacement)[1:]
    return edited


def diffs(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the unified diff of each changed file by path, with 3 lines of context and no header."""
    changed = {}
    for path, text in after.items():
        lines = difflib.unified_diff(before.get(path, "").splitlines(), text.splitlines(), lineterm="")
        changed[path] = "\n".join(list(lines)[2:])
    return {path: diff for path, diff in changed.items() if diff}


def similarity(one: str, other: str) -> float:
    """Return the similarity ratio of two texts, from 0 to 1, or 0 if either text is empty."""
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio() if one and other else 0.0


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Generate ``count`` distinct tasks about functions with a wrong operator; at most a few thousand are possible."""
    generator = random.Random(seed)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        (right, sign), (wrong, other) = generator.sample(sorted(OPERATORS.items()), 2)
        a, b = generator.sample("abcdefghijkmnpqrstuvwxyz", 2)
        before, after = (f"def {right}({a}, {b}):\n    return {a} {s} {b}\n" for s in (other, sign))
        question = f"### tools.py\n{before}\n{right} returns the {wrong}. Fix it."
        truth = {"before": {"tools.py": before}, "after": {"tools.py": after}}
        made[question] = task_row(DATA_SOURCE, question, truth)
    return list(made.values())


if __name__ == "__main__":
    write_task("Write a task of SWE-RL", rows)
