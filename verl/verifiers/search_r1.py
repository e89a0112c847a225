"""Verifier for short answers in ``<answer>`` tags, compared as in SQuAD, Search-R1 and veRL."""

import re
import string
from collections.abc import Mapping
from typing import Any

from verl.verifiers.ground_truths import any_of_words
from verl.verifiers.verdict import Info, Verdict, decide

MAX_TAGS, MAX_CHARS = 10, 2000
"""Maximum number of tags and answer length. Responses that exceed either are wrong (veRL divides their score by 4)."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def verify_search_r1(solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False) -> Verdict | None:
    """Verify the content of the last ``<answer>`` without algebra. ``extra_info`` and ``quick`` are unused.

    The answer is correct if it equals the ground truth, ignoring case, punctuation, articles and extra spaces.
    ``boxed`` is true if there is an answer in tags.
    """
    *closed, _ = solution.split("</answer>")
    answers = [content for _, opened, content in (part.partition("<answer>") for part in closed) if opened]
    answer = (answers[-1].strip() or None) if answers else None
    few = max(len(closed), solution.count("<answer>")) <= MAX_TAGS
    equal = few and answer is not None and len(answer) <= MAX_CHARS and squad(answer) == squad(ground_truth)
    return decide(answer, answer is not None, equal)


def squad(answer: str) -> str:
    """Normalise an answer as in the evaluation of SQuAD (arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def read_truth(truth: Any) -> list[str]:
    """Return the accepted answers in a string, list or ``{"target": ...}``. Raises ``ValueError`` for other values."""
    return any_of_words(truth["target"] if isinstance(truth, Mapping) and "target" in truth else truth)
