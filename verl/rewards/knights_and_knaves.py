"""Verifier of Knights and Knaves: every person is a knight or a knave, and the answer says which."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from verl.rewards.answers import TAIL_CHARS, extract_boxed, extract_tagged
from verl.rewards.score import Verdict

KNIGHT, KNAVE = "knight", "knave"

MAX_PEOPLE = 64

MAX_NAME_CHARS = 80

MAX_ANSWER_CHARS = 16384
"""Of a longer answer, the end is read."""

_CONCLUSION = re.compile(r"conclusion[\s*]*:", re.IGNORECASE)
_TRUTH_ROLE = re.compile(r"(?<!\s)\s++is\s++a\s++(knight|knave)\b", re.IGNORECASE)
_NAME_START = re.compile(r"[^\W\d_]")
_NOT = (
    r"(?:is|are|was|were|ca|could|wo|would|do|does|did|must|should|has|have|had|ai)n['’]?t|cannot|not|non|never|nor"
    r"|neither|none|no(?!\s*[,.:;])"
)
_NOT_SIGN = r"≠|!=|<>|¬|\\(?:neq?|not|lnot)(?![A-Za-z])|(?<![\w-])[~!-](?=kn(?:ight|ave))"
_CROSS = "[❌❎✗✘🚫⛔👎]"
_DENIED = (
    r"false|falsehood|untrue|wrong(?:ly)?|incorrect(?:ly)?|impossible|contradict\w*|absurd|den(?:y|ies|ied)|doubt\w*"
    r"|refuted?|lie|nobody|mistak\w+|myth|opposite|in\s+no\s+way"
)
_SUPPOSED = r"if|unless|whether|suppos\w+|assum\w+|imagine"
_EITHER = r"or|xor|iff|if\s+and\s+only\s+if"
_QUOTED = r"says?|said|claim(?:s|ed)?|state[sd]?|assert(?:s|ed)?|tells?|told"
_RETRACTED = re.compile(
    r"(?:\A|[.!?;:\n])[^\S\n]*+(?:(?:but|so)\s)?(?:(?:all\s|none\s)of\s)?(?:this|that|these|those|it|not)"
    r"(?:\s(?:is|are|was|were)(?:\sall)?\s(?:false|wrong|incorrect|untrue|a\slie|not\s(?:true|so|right|correct)))?"
    r"(?<!this)(?<!that)(?<!these)(?<!those)(?<!it)(?=[^\S\n]*+(?:[.!\n]|\Z))",
    re.IGNORECASE,
)
"""A sentence that takes back what was said before it: "This is false.", "Not!"."""

_BREAK = r"[\n;]|\.(?=\s|$)"
_PLAIN = frozenset(
    "is are was be been being am s must should has have to will the a an both all each also too therefore thus hence so"
    " then as indeed in fact definitely certainly truly clearly obviously necessarily actually really only just found"
    " determined concluded identified known shown proven proved confirmed revealed established deduced that it he she"
    " they who role type identity equals turns out text textbf textit mathrm mathbf mathit quad qquad rightarrow"
    " longrightarrow implies boxed and or".split()
)
"""Words between a name and its role that leave the meaning as it is; with any other, nothing is said."""

_BETWEEN_NAMES = re.compile(r"[\s,&*]*+(?:(?:and|nor)[\s*]++)?", re.IGNORECASE)


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
        statements = read_statements(answer[-MAX_ANSWER_CHARS:], truth)
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
    ``ValueError`` if it names nobody, a person whose role is neither or both, or one whom an answer cannot name.
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
        pairs = _sentences(ground_truth)
    listed = [(str(name).strip().lower(), str(role).strip().lower()) for name, role in pairs]
    truth = dict(listed)
    if (
        not truth
        or not set(truth.values()) <= {KNIGHT, KNAVE}
        or set(truth.items()) != set(listed)
        or not _readable(truth)
    ):
        raise ValueError(
            f"{ground_truth!r:.200} must say of each person whether they are a knight or a knave, for example "
            '{"Alice": "knight"} or (1) Alice is a knight'
        )
    return truth


def _sentences(text: str) -> Iterator[tuple[str, str]]:
    """Name and role of each "NAME is a ROLE"; a name begins with a letter, and no comma, colon or line is in it."""
    end = 0
    for found in _TRUTH_ROLE.finditer(text):
        start = max(end, *(text.rfind(mark, end, found.start()) + 1 for mark in ",;:\n"))
        letter = _NAME_START.search(text, start, found.start())
        end = found.end()
        if letter:
            yield text[letter.start() : found.start()].removeprefix("and "), found.group(1)


def _readable(truth: Mapping[str, str]) -> bool:
    """Whether an answer can name these people: none is called "knight", or by nothing at all."""
    if len(truth) > MAX_PEOPLE or not all(1 <= len(name) <= MAX_NAME_CHARS for name in truth):
        return False
    return read_statements("\n".join(f"{name} is a {role}" for name, role in truth.items()), truth) == [*truth.items()]


def read_statements(text: str, people: Iterable[str]) -> list[tuple[str, str]]:
    """The statements of ``text`` about ``people`` (lower case), in order: (name, ``knight`` or ``knave``).

    A role belongs to the names before it in its sentence, so "Alice and Bob are knights" is two statements. So is
    "Alice is a knight or a knave", and the two contradict each other. "Not a knight" means a knave. What is supposed,
    asked, denied afterwards, or said with words that may change its meaning ("hardly a knight") is no statement.
    """
    names = "|".join(re.escape(name) for name in sorted(people, key=len, reverse=True))
    token = re.compile(
        rf"(?<!\w)(?:(?P<name>{names})|(?P<either>{_EITHER})|(?P<denied>{_DENIED})|(?P<not>{_NOT})|(?P<supposed>{_SUPPOSED})"
        rf"|(?P<quoted>{_QUOTED})|(?P<role>knight|knave)s?)(?!\w)|(?P<sign>{_NOT_SIGN})|(?P<cross>{_CROSS})|(?P<break>{_BREAK})"
        r"|(?P<asked>\?)|(?P<stop>[!)\]])|(?P<word>\w+)",
        re.IGNORECASE,
    )
    reader = _Reader()
    retracted = max((found.end() for found in _RETRACTED.finditer(text)), default=0)
    for found in token.finditer(text, retracted):
        kind = found.lastgroup
        if kind == "name":
            reader.name(found.group().lower(), bool(_BETWEEN_NAMES.fullmatch(text, reader.end, found.start())))
            reader.end = found.end()
        elif kind == "role":
            reader.role(found.group("role").lower())
        elif kind in ("not", "sign"):
            reader.negated = not reader.negated
            reader.negation_end = found.end()
        elif kind == "stop" or kind == "break":
            if reader.negation_end and not text[reader.negation_end : found.start()].strip():
                reader.deny()
            if kind == "break":
                reader.start_sentence()
        elif kind == "either":
            reader.either = reader.num_said > 0
        elif kind == "quoted":
            reader.quoted = bool(reader.subjects)
        elif kind == "supposed":
            reader.ignored = True
        elif kind in ("denied", "asked", "cross"):
            reader.deny()
        elif found.group().lower() not in _PLAIN:
            reader.clear = False
    return reader.statements


class _Reader:
    """What is known at one place of a text that is read from left to right."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, str]] = []
        self.end = 0
        """Where the last name ends."""
        self.start_sentence()

    def start_sentence(self) -> None:
        self.subjects: dict[str, None] = {}
        self.num_said = 0
        """Statements in a row that the last role made; a denial after it takes them back."""
        self.negated = self.denied = self.ignored = False
        self.negation_end = 0
        """Where the last "not" ends; at the end of a sentence or bracket, it denies what was said before."""
        self.either = False
        """Whether an "or" follows a statement: "Alice is a knight or Bob is a knave" says nothing of either."""
        self.quoted = False
        """Whether the next statement is somebody's."""
        self.clear = True

    def name(self, name: str, next_to_last: bool) -> None:
        if not self.subjects:
            # What comes before the first name denies the whole: it is not so that, neither of.
            self.denied = self.denied != self.negated
        if self.either:
            self.deny()
            self.ignored = True
        if not self.subjects or not next_to_last or self.num_said:
            self.subjects = {}
        self.subjects[name] = None
        self.negated, self.clear, self.num_said = False, True, 0

    def role(self, role: str) -> None:
        said = []
        if self.clear and not self.ignored and not self.quoted:
            is_knight = (role == KNIGHT) != (self.negated != self.denied)
            said = [(name, KNIGHT if is_knight else KNAVE) for name in self.subjects]
        self.statements += said
        self.num_said = len(said)
        self.negated = self.quoted = self.either = False
        if self.denied and said:
            self.ignored = True  # how far a denial reaches is not clear

    def deny(self) -> None:
        if self.num_said:
            del self.statements[-self.num_said :]
            self.num_said = 0
        elif self.subjects:
            self.clear = False
        else:
            self.denied = not self.denied
