"""Weighted sums of reward functions, such as ``accuracy.py:score+0.2*style.py:short``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from verl.config.judge import JUDGE
from verl.verifiers.verdict import Verdict

CORRECT_KEYS = ("correctness", "acc")
"""Keys that mark a response as correct, in order of precedence; the first is from the paper's release."""

INAPPLICABLE = Verdict(False, False, "inapplicable")
"""Verdict of a function that returned None, because it does not apply to the response."""


def add_verdicts(parts: Sequence[tuple[float, str]], verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a sum, whose parts have these weights and import paths, empty for the rest of a sum.

    A function that does not apply adds nothing; other weights stay as they are. The result has the score of each
    function under its name, and their extra values. The response is correct if the first verifier, or function with
    ``acc``, says so or, without one, if the first that applies gives a score above 0. A judge decides only alone. If
    none applies, the result is ``INAPPLICABLE``.
    """
    score, scores, extras, deciding, rank = 0.0, dict[str, float](), dict[str, Any](), INAPPLICABLE, -1
    for (weight, path), name, verdict in zip(parts, summand_names(parts), verdicts, strict=True):
        if verdict.reason == INAPPLICABLE.reason:
            continue
        assert verdict.score is not None
        score += weight * verdict.score
        scores |= {name: verdict.score} if name else {}
        if (own_rank := 0 if path == JUDGE else 1 + _states(verdict)) > rank:
            deciding, rank = verdict, own_rank
        extras = {**verdict.extras} | extras
    if deciding is INAPPLICABLE:
        return INAPPLICABLE
    # Scores first, since few and short values are kept of a response.
    return replace(deciding, score=score, extras=scores | {k: v for k, v in extras.items() if k not in scores})


def _states(verdict: Verdict) -> bool:
    """Return whether a verifier, or a function by a key of its own, says if the response is correct."""
    return verdict.stated or verdict.reason != "custom"


def summand_names(parts: Sequence[tuple[float, str]]) -> list[str]:
    """Return a name for each function: its own or, if that is a key of results or not the only one, with its module's.

    The name ``judge`` is kept for the judge. Names that are still equal are numbered.
    """
    paths = [path for _, path in parts]
    own = [path.rpartition(":")[2] for path in paths]
    reserved = ("score", "judge", *CORRECT_KEYS)
    modules = [PurePath(path.rpartition(":")[0].removesuffix(".py")).name for path in paths]
    names = [
        f"{module}.{name}" if path != JUDGE and (name in reserved or own.count(name) > 1) else name
        for path, name, module in zip(paths, own, modules, strict=True)
    ]
    return [f"{name}_{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]
