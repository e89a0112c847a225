"""Verifier for Knights and Knaves puzzles, whose answers state each person's role, knight or knave."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from verl.verifiers.answers import TAIL_CHARS, extract_boxed, extract_tagged
from verl.verifiers.lexicon import WORDS
from verl.verifiers.verdict import Info, Verdict

KNIGHT, KNAVE = "knight", "knave"
_OPPOSITE = {KNIGHT: KNAVE, KNAVE: KNIGHT}

MAX_PEOPLE = 64

MAX_NAME_CHARS = 80

MAX_ANSWER_CHARS = 16384
"""Maximum number of characters that are parsed at the end of an answer."""

_CONCLUSION = re.compile(r"conclusion[\s*]*:", re.IGNORECASE)
_TRUTH_ROLE = re.compile(r"(?<!\s)\s++is\s++a\s++(knight|knave)\b", re.IGNORECASE)
_NAME_START = re.compile(r"[^\W\d_]")
_STATEMENTS = WORDS["statements"]
_RETRACTED = re.compile("|".join(_STATEMENTS["retracted"]), re.IGNORECASE)
_UNSETTLED = re.compile(rf"(?<![\w])(?:{'|'.join(_STATEMENTS['unsettled'])})(?!\w)", re.IGNORECASE)
_HEADING = re.compile(r"[\s*]*(?::|(?:[=(→]|[-–—]+>?\s|(?:is|are)\s)[\s*]*(?=[A-Z]))")
"""Pattern of text that turns the preceding role into the heading of a list of names."""

_PLAIN = frozenset(_STATEMENTS["plain"].split())
_AFTER_ROLE = "|".join(_PLAIN | set(_STATEMENTS["after"].split()))
_DENIES = re.compile(
    r"[\"”'’»)*.,]{0,3}(?::|\s(?:is|are|was|must be|would be|has to be)(?P<not>\snot)?(?:\san?)?|)\s{1,3}", re.I
)
"""Pattern of text between a statement and the word that negates it."""

_CLAUSE_END = r"(?=(?:\seither)?[\s*]{0,3}(?:[,.;:!\n)]|\Z|(?:and|but|while|whereas|so)(?![A-Za-z])))"
_WORDS, _SIGNS = (
    "|".join(f"(?P<{kind}>{'|'.join(patterns)})" for kind, patterns in _STATEMENTS[table].items()).replace(
        "END", _CLAUSE_END
    )
    for table in ("words", "signs")
)
# "Alice is a knight killer" does not say that she is a knight.
_GOES_ON = rf"(?:{re.sub('[?]P<[a-z]+>', '?:', _WORDS)}|{_AFTER_ROLE})(?!\w)"
_KILLER = rf"kn(?:ight|ave)s?(?:['’]s\s|[\s-])\s{{0,9}}(?!{_GOES_ON}|[a-z]{{1,20}}ing(?!\w))[a-z]\w*"
_TOKEN = re.compile(rf"(?<!\w)(?:(?P<killer>{_KILLER})|(?:{_WORDS})(?!\w))|{_SIGNS}", re.IGNORECASE)
_NOT_NAME = re.compile(r"[\s,]{1,3}(?:but\s|and\s)?not\s{1,3}", re.IGNORECASE)
_BETWEEN_NAMES = re.compile(r"[\s,&*]*+(?:(?:and|nor)[\s*]++)?", re.IGNORECASE)


def verify_knights_and_knaves(
    solution: str, ground_truth: Any, extra_info: Info = None, quick: bool = False
) -> Verdict:
    """Verify a response without algebra. ``extra_info`` and ``quick`` are unused.

    A correct answer states every person's role without contradictions. The answer is read from the last ``<answer>``,
    the last box, or the text after the last "CONCLUSION:". If none of these exists, the response's last statements are
    used, one per person. ``boxed`` is true if the answer is in tags or a box.

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
        statements = [] if unsettled else [*dict.fromkeys(read_statements(answer, truth)[::-1])][: len(truth)]
    if not statements:
        return Verdict(False, bool(marked), "missing")
    correct = set(statements) == set(truth.items())
    return Verdict(correct, bool(marked), "exact" if correct else "different", answer)


def read_truth(ground_truth: Any) -> dict[str, str]:
    """Return a mapping from names in lower case to roles, ``knight`` or ``knave``.

    A ground truth is a mapping such as ``{"Alice": "knight"}``, its JSON text, or sentences such as ``(1) Alice is a
    knight``. Raises ``ValueError`` if there are no names, if a role is missing or contradictory, or if one of the names
    could not be recognised in an answer.
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
    """Yield the name and role in each "NAME is a ROLE". A name starts with a letter and has no comma or colon."""
    end = 0
    for match in _TRUTH_ROLE.finditer(text):
        start = max(end, *(text.rfind(mark, end, match.start()) + 1 for mark in ",;:\n"))
        letter = _NAME_START.search(text, start, match.start())
        end = match.end()
        if letter:
            yield text[letter.start() : match.start()].removeprefix("and "), match.group(1)


def _readable(truth: Mapping[str, str]) -> bool:
    """Return whether a correct answer to the puzzle would be parsed correctly. Nobody may be called "knight"."""
    if len(truth) > MAX_PEOPLE or not all(1 <= len(name) <= MAX_NAME_CHARS for name in truth):
        return False
    return read_statements("\n".join(f"{name} is a {role}" for name, role in truth.items()), truth) == [*truth.items()]


def read_statements(text: str, people: Iterable[str]) -> list[tuple[str, str]]:
    """Return the statements about ``people`` (lower case) in ``text``, in order, as pairs (name, role).

    A role applies to the names before it in its sentence, so "Alice and Bob are knights" yields two statements. "The
    others" are the people without an earlier statement. "Alice is a knight or a knave" yields two contradictory
    statements. "Not a knight" means a knave. Ignore suppositions, questions, retracted statements, and statements whose
    meaning other words may change ("hardly a knight", "a knight killer").
    """
    order = {name: index for index, name in enumerate(people)}
    names = "|".join(re.escape(name) for name in sorted(order, key=len, reverse=True))
    # Replace each name with a numbered marker, so that the token patterns do not depend on the names.
    text = re.sub(
        rf"(?<!\w)(?:{names})(?!\w)",
        lambda match: f"N\0{order.get(match[0].lower(), 0)}\0",
        text.replace("\0", " "),
        flags=re.IGNORECASE,
    )
    retracted = max((match.end() for match in _RETRACTED.finditer(text)), default=0)
    reader = _Reader([*order], text)
    for match in _TOKEN.finditer(f"{text}\n", retracted):
        reader.read(match)
    return reader.statements


class _Reader:
    """Parser that reads tokens from left to right and collects statements."""

    def __init__(self, people: list[str], text: str) -> None:
        self.people = people
        self.mentioned = {name for index, name in enumerate(people) if f"N\0{index}\0" in text}
        self.statements: list[tuple[str, str]] = []
        self.role = ""  # The last role, for "Bob is one" and "Bob is not".
        self.start_sentence()

    def start_sentence(self) -> None:
        self.subjects: dict[str, None] = {}
        self.excluded: list[str] = []
        self.pending: list[tuple[str, str]] = []  # Statements without a role, as in "Bob too".
        self.num_last = 0  # Number of statements with the last role; a denial retracts them.
        self.negated = self.denied = self.ignored = self.either = self.quoted = self.only = self.excludes = False
        self.clear = True
        self.is_group = self.follows = self.neither = False
        self.name_end = self.negation_end = self.role_end = 0
        self.heading: str | None = None  # The role of a list, as in Knights: Alice, Bob.

    def read(self, match: re.Match[str]) -> None:
        """Read the next token."""
        kind, word, text = match.lastgroup, match[0].lower(), match.string
        if kind in ("name", "others", "everyone", "break") and self.pending:
            self.statements += self.pending
            self.pending = []
        self.read_denial(match)
        if kind == "name":
            self.read_name(match)
        elif kind in ("others", "everyone"):
            self.read_group(match)
        elif kind == "except" and self.is_group and not (word == "but" and self.num_last == 1):
            self.excludes = not text[max(self.name_end, self.role_end) : match.start()].strip(" ,(*")
        elif kind == "role":
            self.read_role(match)
        elif kind == "too" and self.statements:
            self.heading, self.follows, self.num_last = self.statements[-1][1], True, 0
        elif kind in ("verb", "same"):
            self.read_ellipsis(match)
        elif kind in ("not", "sign"):
            self.negated, self.negation_end, self.neither = not self.negated, match.end(), word == "neither"
        elif kind == "either":
            self.either = self.num_last > 0
        elif kind == "quoted":
            self.quoted = bool(self.subjects)
        elif kind == "supposed":
            self.ignored = True
        elif kind == "only":
            self.only = not self.subjects or text[match.end() :].lstrip()[:2].lower() == "kn"
        elif kind == "break":
            if self.only and self.heading and self.num_last:
                self.add_opposites(dict(self.statements[-self.num_last :]), self.heading)
            self.start_sentence()
        elif kind == "killer" or (kind == "word" and word not in _PLAIN):
            self.clear = False

    def read_denial(self, match: re.Match[str]) -> None:
        """Retract or invert the latest statements if the token denies them, or mark the next ones as denied."""
        kind, text = match.lastgroup, match.string
        # A "not" at the end of a bracket or sentence negates the statement before it.
        ends = kind in ("stop", "break")
        ends_in_not = ends and self.negation_end > 0 and not text[self.negation_end : match.start()].strip()
        denies = kind == "denied" and self.num_last == 1 and _DENIES.fullmatch(text, self.role_end, match.start())
        if denies:
            # "Alice is a knight" is false, so she is a knave.
            name, role = self.statements.pop()
            self.statements.append((name, role if denies["not"] else _OPPOSITE[role]))
            self.num_last = 0
        # "Alice is a knight or Bob is a knave" yields no statement.
        elif (
            kind in ("denied", "asked", "cross")
            or ends_in_not
            or (kind in ("name", "others", "everyone") and self.either)
        ):
            if self.num_last:
                del self.statements[-self.num_last :]
                self.num_last = 0
            elif self.subjects:
                self.clear = False
            else:
                self.denied = not self.denied

    def read_name(self, match: re.Match[str]) -> None:
        name, between = self.people[int(match[0][2:-1])], match.string[self.name_end : match.start()]
        joined = bool(_BETWEEN_NAMES.fullmatch(between))
        if self.excludes and (joined or not self.excluded):
            # In "all but Zoe are knights" and "all are knights but Zoe", she is a knave.
            self.excluded.append(name)
            self.subjects.pop(name, None)
            if (name, self.role) in self.statements[-self.num_last :] and self.num_last:
                self.statements.remove((name, self.role))
                self.statements.append((name, _OPPOSITE[self.role]))
                self.subjects = {name: None}
            self.name_end = match.end()
            return
        self.excludes = self.is_group = False
        if not self.subjects or self.neither:
            # A negation before the first name negates the whole sentence, as in "it is not so that".
            self.denied = self.denied != self.negated
        if self.num_last or not self.subjects or not joined:
            self.heading = None if self.follows and self.num_last and "and" not in between else self.heading
            self.subjects = {}
        self.subjects[name], self.neither = None, False
        # In "Ann is a knight, but not Bob", he is a knave.
        rejected = self.num_last and _NOT_NAME.fullmatch(match.string, self.role_end, match.start())
        self.start_subject(match.end())
        self.pending = [(name, _OPPOSITE[self.role])] if rejected else []

    def read_group(self, match: re.Match[str]) -> None:
        """Read "the others" or "everyone". Earlier names without a role ("Ann and Bob both") remain the subject."""
        word, others = match[0].lower(), match.lastgroup == "others"
        if self.subjects and not self.num_last and not others:
            return
        named = {name for name, _ in self.statements} | self.subjects.keys() or self.mentioned if others else set()
        group = [name for name in self.people if name not in named]
        joined = _BETWEEN_NAMES.fullmatch(match.string, self.name_end, match.start()) and not self.num_last
        self.ignored = self.ignored or (self.negated and not others)
        self.denied = self.denied != (self.negated != word.startswith("no"))
        self.subjects = (self.subjects if joined else {}) | dict.fromkeys(group)
        if word.startswith("both") and len(group) != 2:
            self.subjects = {}
        self.is_group = True
        self.start_subject(match.end())

    def start_subject(self, end: int) -> None:
        self.ignored = self.ignored or self.either
        if self.heading and not (self.negated or self.denied or self.ignored):
            self.statements += [(name, self.heading) for name in self.subjects]
            self.num_last += len(self.subjects)
        else:
            self.num_last = 0
        self.negated, self.clear, self.name_end = False, True, end

    def read_role(self, match: re.Match[str]) -> None:
        word = match["role"].lower().removesuffix("s")
        word = word if word in (KNIGHT, KNAVE) else self.role
        self.pending, self.role_end = [], match.end()
        if _HEADING.match(match.string, match.end()) and (self.heading or not self.subjects):
            self.heading = None if self.negated or self.denied or self.quoted else word
            self.num_last, self.follows, self.role = 0, False, word
            return
        counts = self.clear and not self.ignored and not self.quoted and bool(word)
        role = word if self.negated == self.denied else _OPPOSITE[word]
        if counts and self.only and self.subjects:
            self.add_opposites(self.subjects, role)
        self.statements += [(name, _OPPOSITE[role]) for name in self.excluded if counts and not self.num_last]
        self.statements += [(name, role) for name in self.subjects if counts]
        self.num_last = len(self.subjects) if counts else 0
        self.ignored = self.ignored or (self.denied and self.num_last > 0)  # The scope of a denial is unclear.
        self.role, self.excluded = word, []
        self.negated = self.quoted = self.either = self.only = self.excludes = False

    def read_ellipsis(self, match: re.Match[str]) -> None:
        """Read a statement that refers to the previous role, such as "Bob is", "Bob is not" or "Bob too"."""
        if match.lastgroup == "verb" and "n" in match[0].lower():
            self.negated, self.negation_end = not self.negated, match.end()
        if self.num_last or not self.role or not self.clear or self.ignored or self.quoted:
            return
        role = self.role if self.negated == self.denied else _OPPOSITE[self.role]
        if match.lastgroup == "same" and self.statements:
            role = self.statements[-1][1]
        self.pending = [(name, role) for name in self.subjects]

    def add_opposites(self, names: Iterable[str], role: str) -> None:
        """Add statements, implied by "only", that everyone except ``names`` has the opposite of ``role``."""
        self.statements += [(name, _OPPOSITE[role]) for name in self.people if name not in names]
