"""Weighted sums of reward functions, such as ``accuracy.py:score+0.2*style.py:short``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from verl.config.judge import JUDGE
from verl.verifiers.verdict import Verdict

CORRECT_KEYS = ("correctness", "acc")
"""Result keys that state whether a response is correct, by precedence. The first key is from the paper's release."""

INAPPLICABLE = Verdict(False, False, "inapplicable")
"""Verdict of a function that returned None because it does not apply to the response."""


def add_verdicts(parts: Sequence[tuple[float, str]], verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a weighted sum of ``parts``: a weight and an import path each (empty for a partial sum).

    A function that does not apply adds nothing and leaves the weights unchanged. The extra values are the functions'
    scores, keyed by name, and the functions' extra values. The first applicable verifier or function with ``acc``
    decides whether the response is correct. Otherwise, the response is correct if the first applicable function's score
    is above 0. A judge decides only if no other function applies. If none applies, the result is ``INAPPLICABLE``.
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
    """Return whether the verdict is from a verifier, or from a custom function that returned a key such as ``acc``."""
    return verdict.stated or verdict.reason != "custom"


def summand_names(parts: Sequence[tuple[float, str]]) -> list[str]:
    """Return the name of each function, prefixed with its module if the name is reserved or not unique.

    The name ``judge`` is reserved for the judge. Names that are still not unique are numbered.
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
