"""Verifier for Knights and Knaves puzzles, whose answers state each person's role, knight or knave."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from verl.verifiers.answers import TAIL_CHARS, extract_boxed, extract_tagged
from verl.verifiers.lexicon import WORDS
from verl.verifiers.verdict import Verdict

KNIGHT, KNAVE = "knight", "knave"

MAX_PEOPLE = 64

MAX_NAME_CHARS = 80

MAX_ANSWER_CHARS = 16384
"""Number of characters that are read from the end of an answer."""

_CONCLUSION = re.compile(r"conclusion[\s*]*:", re.IGNORECASE)
_TRUTH_ROLE = re.compile(r"(?<!\s)\s++is\s++a\s++(knight|knave)\b", re.IGNORECASE)
_NAME_START = re.compile(r"[^\W\d_]")
_NOT_SIGN = r"≠|!=|<>|¬|\\(?:neq?|not|lnot)(?![A-Za-z])|(?<![\w-])[~!-](?=kn(?:ight|ave))"
_CROSS = "[❌❎✗✘🚫⛔👎]"
_NOT, _DENIED, _SUPPOSED, _EITHER, _QUOTED = (
    "|".join(WORDS["statements"][kind]) for kind in ("not", "denied", "supposed", "either", "quoted")
)
_RETRACTED = re.compile(
    r"(?:\A|[.!?;:\n])[^\S\n]*+(?:(?:but|so)\s)?(?:(?:all\s|none\s)of\s)?(?:this|that|these|those|it|not)"
    r"(?:\s(?:is|are|was|were)(?:\sall)?\s(?:false|wrong|incorrect|untrue|a\slie|not\s(?:true|so|right|correct)))?"
    r"(?<!this)(?<!that)(?<!these)(?<!those)(?<!it)(?=[^\S\n]*+(?:[.!\n]|\Z))",
    re.IGNORECASE,
)
"""A sentence that retracts the previous ones, such as "This is false." or "Not!"."""

_UNSETTLED = re.compile(rf"(?<![\w])(?:{'|'.join(WORDS['statements']['unsettled'])})(?!\w)", re.IGNORECASE)
_HEADING = re.compile(r"[\s*]*(?::|(?:[=(→]|[-–—]+>?\s|(?:is|are)\s)[\s*]*(?=[A-Z]))")
"""Text after a role that makes it the heading of a list of names."""

_BREAK = r"[\n;]|\.(?=\s|$)"
_PLAIN = frozenset(WORDS["statements"]["plain"].split())
_BETWEEN_NAMES = re.compile(r"[\s,&*]*+(?:(?:and|nor)[\s*]++)?", re.IGNORECASE)


def verify_knights_and_knaves(
    solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict:
    """Verify a response without algebra. ``extra_info`` and ``quick`` are unused.

    A correct answer states every person's role without contradictions. It is taken from the last ``<answer>``, else the
    last box, else the text after the last "CONCLUSION:". Otherwise, it consists of the last statements in the response,
    with as many statements as people. ``boxed`` is true if the answer is in tags or a box.

    Raises ``ValueError`` if the ground truth is malformed.
    """
    truth = read_truth(ground_truth)
    marked = extract_tagged(solution, "answer") or extract_boxed(solution)
    conclusions = [] if marked else [match.end() for match in _CONCLUSION.finditer(solution)]
    if marked or conclusions:
        answer = marked or solution[conclusions[-1] :].strip()
        end = answer[-MAX_ANSWER_CHARS:]
        statements = [] if _UNSETTLED.search(end) else read_statements(end, truth)
    else:
        # A proof makes assumptions before it reaches a conclusion, so only its end is read.
        answer = solution[-TAIL_CHARS:]
        unsettled = _UNSETTLED.search(answer, answer.lower().rfind("kn"))
        statements = [] if unsettled else read_statements(answer, truth)[-len(truth) :]
    if not statements:
        return Verdict(False, bool(marked), "missing")
    correct = set(statements) == set(truth.items())
    return Verdict(correct, bool(marked), "exact" if correct else "different", answer)


def read_truth(ground_truth: Any) -> dict[str, str]:
    """Return a mapping from names in lower case to roles, ``knight`` or ``knave``.

    A ground truth is a mapping such as ``{"Alice": "knight"}``, its JSON text, or sentences such as ``(1) Alice is a
    knight``. Raises ``ValueError`` if there are no names, if a role is missing or contradictory, or if an answer could
    not contain one of the names.
    """
    pairs: Iterable[tuple[Any, Any]] = []
    if isinstance(ground_truth, Mapping):
        # In a struct column, each row has the names from all rows.
        pairs = [(name, role) for name, role in ground_truth.items() if role is not None]
    elif not isinstance(ground_truth, str):
        pass
    elif ground_truth.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            pairs = json.loads(ground_truth).items()
    else:
        pairs = _sentences(ground_truth)
    roles = [(str(name).strip().lower(), str(role).strip().lower()) for name, role in pairs]
    truth = dict(roles)
    valid = truth and set(truth.values()) <= {KNIGHT, KNAVE} and set(truth.items()) == set(roles)
    if not valid or not _readable(truth):
        raise ValueError(
            f"{ground_truth!r:.200} must say of each person whether they are a knight or a knave, for example "
            '{"Alice": "knight"} or (1) Alice is a knight'
        )
    return truth


def _sentences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and role in each "NAME is a ROLE". Names start with a letter and contain no comma or colon."""
    end = 0
    for match in _TRUTH_ROLE.finditer(text):
        start = max(end, *(text.rfind(mark, end, match.start()) + 1 for mark in ",;:\n"))
        letter = _NAME_START.search(text, start, match.start())
        end = match.end()
        if letter:
            yield text[letter.start() : match.start()].removeprefix("and "), match.group(1)


def _readable(truth: Mapping[str, str]) -> bool:
    """Whether the statements of a correct answer would be parsed correctly; no person may be called "knight"."""
    if len(truth) > MAX_PEOPLE or not all(1 <= len(name) <= MAX_NAME_CHARS for name in truth):
        return False
    return read_statements("\n".join(f"{name} is a {role}" for name, role in truth.items()), truth) == [*truth.items()]


def read_statements(text: str, people: Iterable[str]) -> list[tuple[str, str]]:
    """Return the statements (name, ``knight`` or ``knave``) in ``text`` about ``people`` (lower case), in order.

    A role applies to the names before it in its sentence, so "Alice and Bob are knights" yields two statements. "Alice
    is a knight or a knave" yields two contradictory statements. "Not a knight" means a knave. Suppositions, questions,
    retracted statements, and statements with words that may change their meaning ("hardly a knight") are ignored.
    """
    names = "|".join(re.escape(name) for name in sorted(people, key=len, reverse=True))
    token = re.compile(
        rf"(?<!\w)(?:(?P<name>{names})|(?P<either>{_EITHER})|(?P<denied>{_DENIED})|(?P<not>{_NOT})|(?P<supposed>{_SUPPOSED})"
        rf"|(?P<quoted>{_QUOTED})|(?P<too>so\s{{1,9}}(?:is|are))|(?P<role>knight|knave)s?)(?!\w)|(?P<sign>{_NOT_SIGN})|(?P<cross>{_CROSS})|(?P<break>{_BREAK})"
        r"|(?P<asked>\?)|(?P<stop>[!)\]])|(?P<word>\w+)",
        re.IGNORECASE,
    )
    retracted = max((match.end() for match in _RETRACTED.finditer(text)), default=0)
    sentences: list[list[re.Match[str]]] = [[]]
    for match in token.finditer(f"{text}\n", retracted):
        sentences[-1].append(match)
        if match.lastgroup == "break":
            sentences.append([])
    return [statement for sentence in sentences for statement in _read_sentence(sentence)]


def _read_sentence(tokens: Iterable["re.Match[str]"]) -> list[tuple[str, str]]:
    """Return the statements of one sentence, read from left to right."""
    statements: list[tuple[str, str]] = []
    subjects: dict[str, None] = {}
    num_last = 0  # Number of statements with the last role; a denial retracts them.
    negated = denied = ignored = either = quoted = False
    clear = True
    name_end = negation_end = 0
    heading: str | None = None  # The role of a list, as in Knights: Alice, Bob.
    for match in tokens:
        kind, word, text = match.lastgroup, match[0].lower(), match.string
        # A "not" at the end of a bracket or sentence negates the statement before it.
        ends = kind in ("stop", "break")
        ends_in_not = ends and negation_end > 0 and not text[negation_end : match.start()].strip()
        # "Alice is a knight or Bob is a knave" yields no statement.
        if kind in ("denied", "asked", "cross") or ends_in_not or (kind == "name" and either):
            if num_last:
                del statements[-num_last:]
                num_last = 0
            elif subjects:
                clear = False
            else:
                denied = not denied
        if kind == "name":
            if not subjects:
                # A negation before the first name negates the whole sentence, as in "it is not so that".
                denied = denied != negated
            if num_last or not subjects or not _BETWEEN_NAMES.fullmatch(text, name_end, match.start()):
                subjects = {}
            subjects[word] = None
            ignored = ignored or either
            if heading and not (negated or denied or ignored):
                statements.append((word, heading))
                num_last, negated, clear, name_end = num_last + 1, False, True, match.end()
                continue
            negated, clear, num_last, name_end = False, True, 0, match.end()
        elif kind == "role" and _HEADING.match(text, match.end()) and (heading or not subjects):
            heading = None if negated or denied or quoted else match["role"].lower()
            num_last = 0
        elif kind == "too" and num_last:
            heading = statements[-1][1]
        elif kind == "role":
            counts = clear and not ignored and not quoted
            role = KNIGHT if (match["role"].lower() == KNIGHT) != (negated != denied) else KNAVE
            statements += [(name, role) for name in subjects if counts]
            num_last = len(subjects) if counts else 0
            ignored = ignored or (denied and num_last > 0)  # The scope of a denial is unclear.
            negated = quoted = either = False
        elif kind in ("not", "sign"):
            negated, negation_end = not negated, match.end()
        elif kind == "either":
            either = num_last > 0
        elif kind == "quoted":
            quoted = bool(subjects)
        elif kind == "supposed":
            ignored = True
        elif kind == "word" and word not in _PLAIN:
            clear = False
    return statements
