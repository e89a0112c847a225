"""Verifier for tool calls in text, as in ToolRL (arXiv 2504.13958) and veRL's data source ``rlla``.

A response contains thoughts, followed by tool calls, an answer, or both::

    <think>...</think>
    <tool_call>
    {"name": "search", "parameters": {"query": "..."}}
    </tool_call>
    <response>...</response>

A response scores 1 if its format is correct, plus -3 to 3 for its tool calls if the ground truth contains any.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from verl.verifiers.verdict import Info, Verdict

BEST = 3.0
"""Score of tool calls that are identical to the ground truth. The lowest score is the negative of this value."""
MAX_CALLS = 64
"""Maximum number of tool calls in a response. Responses with more calls get the lowest score for tool calls."""

_CALLS, _ANSWER = r"\n<tool_call>\n.*?\n</tool_call>", r"\n<response>.*?</response>"


def verify_rlla(solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False) -> Verdict | None:
    """Verify a response including its thoughts. ``extra_info`` and ``quick`` are unused.

    A response is correct if its format and tool calls match the ground truth. ``boxed`` is true if the format matches.
    ``extras`` contains ``format_reward`` and ``accuracy_reward``.
    """
    solution = solution.strip()
    expected = read_calls(ground_truth)
    form = has_form(solution, calls=bool(expected), answer="<response>" in ground_truth)
    calls = 0.0
    if expected:
        try:
            found = read_calls(solution)
            calls = calls_score(expected, found) if 0 < len(found) <= MAX_CALLS else -BEST
        except (ValueError, RecursionError):
            calls = -BEST
    right = form and (not expected or calls == BEST)
    reason = "exact" if right else "different" if form else "missing"
    rewards = {"format_reward": float(form), "accuracy_reward": calls}
    return Verdict(right, form, reason, solution.partition("</think>")[2].strip(), form + calls, rewards)


def has_form(text: str, calls: bool, answer: bool) -> bool:
    """Return whether ``text`` consists of thoughts, tool calls (if ``calls``) and a response (if ``answer``)."""
    tags = [*(("<tool_call>", "</tool_call>") if calls else ()), *(("<response>", "</response>") if answer else ())]
    pattern = rf"<think>.*?</think>{_CALLS if calls else ''}{_ANSWER if answer else ''}"
    return all(text.count(tag) == 1 for tag in tags) and re.fullmatch(pattern, text, re.DOTALL) is not None


def read_calls(text: str) -> list[dict[str, Any]]:
    """Parse the first ``<tool_call>``, which contains one JSON object per line. Return no calls if there is no tag.

    Raises ``ValueError`` if a line is not a call of the form ``{"name": ..., "parameters": {...}}``.
    """
    _, opened, rest = text.partition("<tool_call>")
    if not opened:
        return []
    calls = [json.loads(line) for line in rest.partition("</tool_call>")[0].strip().split("\n")]
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("parameters"), dict) and "name" in call):
            raise ValueError('a call is {"name": ..., "parameters": {...}}')
    return calls


def calls_score(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """Score tool calls from -3 to 3 by how many names, parameters and values match the expected calls.

    Each expected call is matched with the best remaining call of the same name.
    """
    if expected == found:
        return BEST
    score = overlap((str(call["name"]) for call in expected), (str(call["name"]) for call in found))
    highest, left = 1.0, list(found)
    for call in expected:
        parameters = call["parameters"]
        highest += 1 + len(parameters)
        same = [(pair_score(parameters, other["parameters"]), other) for other in left if other["name"] == call["name"]]
        best, chosen = max(same, key=lambda pair: pair[0], default=(0.0, None))
        if chosen is not None and best > 0:
            left.remove(chosen)
            score += best
    return 2 * BEST * score / highest - BEST


def pair_score(expected: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Return the overlap of two calls' parameters plus the number of equal values."""
    equal = [name for name, value in expected.items() if name in found and found[name] == value]
    return overlap(expected, found) + len(equal)


def overlap(first: Iterable[str], second: Iterable[str]) -> float:
    """Return the size of the intersection of two multisets divided by that of their union, or 1 if both are empty."""
    a, b = Counter(list(first)), Counter(list(second))
    union = (a | b).total()
    return (a & b).total() / union if union else 1.0


def read_truth(truth: Any) -> list[str]:
    """Check and return the ground truth, a complete response. Raises ``ValueError`` for blank text or invalid calls."""
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError("must be a response with <think>, and <tool_call>, <response> or both")
    read_calls(truth)
    return [truth]
