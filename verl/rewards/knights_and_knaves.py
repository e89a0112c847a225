"""Verifier of Knights and Knaves: every person is a knight or a knave, and the answer says which."""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from verl.rewards.answers import TAIL_CHARS, extract_boxed, extract_tagged
from verl.rewards.score import Verdict

KNIGHT, KNAVE = "knight", "knave"

_CONCLUSION = re.compile(r"conclusion[\s*]*:", re.IGNORECASE)
_TRUTH_LINE = re.compile(r"(?:\([0-9]+\)\s*)?([^\W\d_][^\n,;:]*?)\s+is\s+a\s+(knight|knave)\b", re.IGNORECASE)
_NOT = r"not|non|isn['’]t|cannot|can['’]t"
_BREAK = r"[\n;]|\.(?=\s|$)"
_BETWEEN_NAMES = re.compile(r"[\s,&*]*(?:and[\s*]+)?")


def verify_knights_and_knaves(
    solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict:
    """The verdict on a response, which is always immediate. ``extra_info`` and ``quick`` are not used.

    An answer is correct if it names the role of every person of the ground truth and gives nobody both roles. It is
    read from the last ``<answer>``, else from the last box, else from the text after the last "CONCLUSION:". Without
    any of these, the last statements of the response count, as many as there are people. ``boxed`` says whether the
    answer was in tags or a box.

    Raises ``ValueError`` if the ground truth names nobody.
    """
    truth = read_truth(ground_truth)
    marked = extract_tagged(solution, "answer") or extract_boxed(solution)
    conclusions = [] if marked else [found.end() for found in _CONCLUSION.finditer(solution)]
    if marked or conclusions:
        answer = marked or solution[conclusions[-1] :].strip()
        statements = read_statements(answer, truth)
    else:
        # A proof makes assumptions before it concludes, so only its end is the answer.
        answer = solution[-TAIL_CHARS:]
        statements = read_statements(answer, truth)[-len(truth) :]
    if not statements:
        return Verdict(False, bool(marked), "missing")
    correct = set(statements) == set(truth.items())
    return Verdict(correct, bool(marked), "exact" if correct else "different", answer)


def read_truth(ground_truth: Any) -> dict[str, str]:
    """Name in lower case -> ``knight`` or ``knave``.

    From a mapping ``{"Alice": "knight"}``, as JSON text too, or from sentences like ``(1) Alice is a knight``. Raises
    ``ValueError`` if it names nobody, or a person whose role is neither.
    """
    pairs: Iterable[tuple[Any, Any]] = []
    if isinstance(ground_truth, Mapping):
        # In a column of structs, every row has every name that some row has.
        pairs = [(name, role) for name, role in ground_truth.items() if role is not None]
    elif not isinstance(ground_truth, str):
        pass
    elif ground_truth.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            pairs = json.loads(ground_truth).items()
    else:
        pairs = [(name.removeprefix("and "), role) for name, role in _TRUTH_LINE.findall(ground_truth)]
    truth = {str(name).strip().lower(): str(role).strip().lower() for name, role in pairs}
    if not truth or not set(truth.values()) <= {KNIGHT, KNAVE}:
        raise ValueError(
            f"{ground_truth!r:.200} must say of each person whether they are a knight or a knave, for example "
            '{"Alice": "knight"} or (1) Alice is a knight'
        )
    return truth


def read_statements(text: str, people: Iterable[str]) -> list[tuple[str, str]]:
    """The statements of ``text`` about ``people`` (lower case), in order: (name, ``knight`` or ``knave``).

    A role belongs to the names before it in its sentence, so "Alice and Bob are knights" is two statements. So is
    "Alice is a knight or a knave", and the two contradict each other. "Not a knight" means a knave.
    """
    names = "|".join(re.escape(name) for name in sorted(people, key=len, reverse=True))
    token = re.compile(
        rf"(?<!\w)(?:(?P<name>{names})|(?P<not>{_NOT})|(?P<role>knight|knave)s?)(?!\w)|(?P<break>{_BREAK})",
        re.IGNORECASE,
    )
    statements: list[tuple[str, str]] = []
    subjects: dict[str, None] = {}
    subjects_end, negated = -1, False
    for found in token.finditer(text):
        kind = found.lastgroup
        if kind == "name":
            if not subjects or not _BETWEEN_NAMES.fullmatch(text, subjects_end, found.start()):
                subjects = {}
            subjects[found.group().lower()] = None
            subjects_end, negated = found.end(), False
        elif kind == "break":
            subjects, negated = {}, False
        elif kind == "not":
            negated = True
        else:
            is_knight = (found.group("role").lower() == KNIGHT) != negated
            statements += [(name, KNIGHT if is_knight else KNAVE) for name in subjects]
            subjects_end, negated = -1, False
    return statements
