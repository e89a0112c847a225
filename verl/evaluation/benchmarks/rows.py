"""Converts benchmark rows with arbitrary field names to problems.

The same rules apply to all benchmarks and depend only on the field names and the format of the values.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.config.errors import ConfigError
from verl.data.prompt_record import PromptRecord
from verl.data.prompt_rows import read_extra_info
from verl.data.records import is_unicode, split_solution
from verl.verifiers.answers import TAIL_CHARS, extract_boxed
from verl.verifiers.ground_truths import check_tolerances
from verl.verifiers.multiple_choice import letters_in, read_options

Row = Mapping[str, Any]

OPEN = "open_answer"
CHOICE = "multiple_choice"

FIELD_NAMES: dict[str, tuple[str, ...]] = {
    "context": ("passage", "context", "body", "table"),
    "question": (
        *("question_concat", "question", "problem", "query", "content", "input", "body", "prompt", "instruction"),
    ),
    "options": ("options", "choices"),
    "answer": (
        *("choice_answer", "final_answer", "answer", "correct", "correct_answer", "correct answer", "correct_option"),
        *("label", "target", "gold", "golden", "gold_answer", "gt_answer", "ground_truth"),
        *("reference_answer", "expected_answer", "result"),
    ),
    "solution": ("solution", "rationale", "reference_solution"),
    "wrong_answers": tuple(f"incorrect answer {i}" for i in range(1, 10)),
    "tolerance": ("error", "tolerance"),
    "verifier": (),
}
"""Maps each field of a problem to possible field names in files, ignoring case. If a row has values under several
names, the first name in the tuple is used. ``context`` is prepended to the question. A field that is listed as both
``context`` and ``question``, such as ``body``, is used for only one of them. The answer and all ``wrong_answers``
become options, which are shuffled with the question as the seed. ``verifier`` is the data source that selects the
verifier. The data source is read only if a mapping specifies its field."""

PLAIN = ("context", "question", "answer")
"""Fields whose values must be strings, numbers, or lists of strings and numbers."""

CHOICE_NAMES = ("choice_answer", "correct_option")
"""Fields in which letters are interpreted as options, even if the question contains no options."""

_INLINE_LABEL = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|rm|bf)\s*\{\s*)[(（]\s*([A-Z])\s*[)）]\s*\}"
    r"|(?<![A-Za-z0-9\\^_{])[(（]\s*([A-Z])\s*[)）]"
    r"|(?<![A-Za-z0-9\\^_{])([A-Z])\s*[.．、:：)）]"
)
_BEFORE_OPTION = re.compile(r"(?:\\ |~|\s)*")
_AFTER_OPTION = re.compile(r"(?:\\q?quad|\\n|\\\\|[~\s(（])\Z")
_LABEL_ORDERS = ("ABCDEFGHIJ", "FGHJK")
"""Sequences of option letters. In the ACT, every other question uses the second sequence."""

_ANSWER_AT_END = re.compile(r"\banswers?\s*+[:：]\s*+(\S.*)\Z", re.IGNORECASE)
_SOLUTION_AT_END = re.compile(r"\bsolution\s*+[:：]\s*+\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, described by an entry in ``published.yaml`` or by defaults."""

    name: str
    hub: str = ""
    """Dataset on the Hugging Face hub, in the format of ``verl.config.data.hub_set``, or empty if the benchmark is not
    on the hub (see ``home``)."""
    home: str = ""
    """Alternative source of ``<name>/test.jsonl`` for benchmarks that are not on the hub."""
    fields: Mapping[str, str] | None = None
    """Maps the fields of a problem (``FIELD_NAMES``) to names in the file, or None to recognise all fields by name."""
    verifier: str = OPEN
    """Name of the verifier, a key of ``verl.rewards.registry.VERIFIERS``. Problems with options and a letter answer are
    scored by ``multiple_choice`` regardless of this field."""
    relative_tolerance: float = 0.0
    """Maximum relative error at which a decimal answer is correct, or 0 for the verifier's default."""
    licence: str = "unknown"
    """Published licence, as an SPDX identifier if one exists."""
    language: str = "en"
    """Language of the problems, ``en`` or ``zh``."""
    demonstrations: str | None = None
    """Key in ``verl.data.templates.DEMONSTRATIONS`` of the few-shot examples for base models, or None if the benchmark
    is usually evaluated without examples."""


@dataclass(frozen=True)
class Problem:
    """One problem of a benchmark."""

    index: int
    """0-based index in the benchmark, not counting blank lines."""
    question: str
    """Text of the question, including its options if it has any."""
    answer: str
    """Correct answer, usually one or more letters if the question has options."""
    data_source: str
    """Key of the verifier in ``verl.rewards.registry.VERIFIERS``."""
    extra_info: Mapping[str, Any]
    """Additional data. Environments read the row's ``extra_info``, and verifiers read ``options`` (a mapping from
    letters to texts), ``tolerance`` and ``relative_tolerance``."""
    solution: str | None
    """Worked solution, or None if the benchmark has none."""
    place: str = field(default="", compare=False)
    """File and line of the problem, for error messages."""
    answer_field: str = field(default="answer", compare=False)
    """Name of the field with the answer, for error messages."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Chat to use as the prompt. If empty, the prompt consists of the question."""
    state: str = ""
    """Initial state of the problem's environment, as in :class:`PromptRecord`."""

    def record(self, number: int, input_ids: Sequence[int] = (), opens_thought: bool = False) -> PromptRecord:
        """Return the problem as a prompt record for environments, with ``number`` as its ``uid``."""
        messages = [dict(message) for message in self.messages] or [{"role": "user", "content": self.question}]
        facts = (self.data_source, self.answer, self.extra_info)
        return PromptRecord(number, list(input_ids), *facts, messages, opens_thought, state=self.state)


def recognise_fields(
    rows: Sequence[Row], mapping: Mapping[str, str] | None, benchmark: str, where: str, scored: bool = True
) -> dict[str, list[str]]:
    """Map each field of a problem to the matching names in the rows, by precedence. ``mapping`` overrides the names.

    Raises ``ConfigError`` if ``mapping`` names an unknown field, or no field matches the question or the answer. The
    message begins with ``where``, the source of the rows, and lists the available fields.
    """
    names_in_rows = list(dict.fromkeys(name for row in rows for name in row))
    for ours, theirs in (mapping or {}).items():
        if ours not in FIELD_NAMES:
            raise ConfigError(f"{where}: maps {ours!r}, which is not one of {', '.join(FIELD_NAMES)}")
        if theirs not in names_in_rows:
            raise ConfigError(f"{where}: has no field {theirs!r}; its fields are {', '.join(names_in_rows)}")
    taken = set((mapping or {}).values())
    by_lower = {name.lower(): name for name in reversed(names_in_rows) if name not in taken}
    fields = {ours: [by_lower[name] for name in names if name in by_lower] for ours, names in FIELD_NAMES.items()}
    fields |= {ours: [theirs] for ours, theirs in (mapping or {}).items()}
    if set(fields["question"]) - set(fields["context"]):
        fields["question"] = [name for name in fields["question"] if name not in fields["context"]]
    else:
        fields["context"] = []
    # Without an answer field, the answer is extracted from the end of the solution.
    no_answer = scored and not fields["answer"] and not fields["solution"]
    missing = ["question"] * (not fields["question"]) + ["answer"] * no_answer
    if missing:
        raise ConfigError(
            f"{where}: cannot tell which field holds the {' and the '.join(missing)}; its fields are "
            f"{', '.join(names_in_rows)}; map them: +data.fields.{benchmark}.{missing[0]}=<field>"
        )
    return fields


def read_problem(
    row: Row, index: int, fields: Mapping[str, Sequence[str]], benchmark: Benchmark, scored: bool = True
) -> Problem:
    """Convert ``row`` to a problem, using the ``fields`` returned by :func:`recognise_fields`.

    Raises ``ValueError`` if the question or the answer is missing, or a field has an invalid value.
    """
    values = {ours: _first_value(row, names, nan_is_gap=ours in PLAIN) for ours, names in fields.items()}
    for ours in PLAIN:
        _require_plain(values[ours], ours, row, fields[ours])
    question, solution = _text(values["question"]), _text(values["solution"]) or None
    wrong = [_text(row.get(name)) for name in fields["wrong_answers"] if row.get(name)]
    if wrong and values["answer"] is not None and not values["options"]:
        order = random.Random(question).sample(range(len(wrong) + 1), len(wrong) + 1)
        values["options"] = [[_text(values["answer"]), *wrong][place] for place in order]
        values["answer"] = order.index(0)
    answer = _answer_text(values["answer"], values["options"])
    if not question:
        raise ValueError(f"has no question in {' or '.join(fields['question'])}; fill it in or remove the row")
    if not answer and solution:
        answer = extract_boxed(solution) or ""
    else:
        answer, whole = split_solution(answer)
        solution = whole or solution
    if not answer and (found := _ANSWER_AT_END.search(question, max(0, len(question) - TAIL_CHARS))):
        # Some questions end with their answer, as in "... Answer: A".
        question, answer = question[: found.start()].rstrip(), found.group(1).strip()
    if not answer and scored:
        names = " or ".join(fields["answer"] or fields["solution"])
        raise ValueError(f"has no answer in {names}; fill it in or remove the row")
    options = read_options(values["options"])
    if isinstance(values["options"], list) and len(values["options"]) > len(options):
        raise ValueError(f"has {len(values['options'])} options; at most {len(options)} have a letter")
    if options:
        question = "\n".join([question, *(f"({letter}) {text}" for letter, text in options.items())])
    else:
        options = inline_options(question)
    context = _text(values["context"])
    for ours, text in (("question", f"{context}{question}"), ("answer", answer)):
        if not is_unicode(text):
            raise ValueError(f"its {ours} holds half of a surrogate pair, which is no character; correct it")
    letters = letters_in(answer, {})
    named = any(row.get(name) for name in CHOICE_NAMES) or benchmark.verifier == CHOICE
    if values["options"] and named and letters and not letters <= options.keys() and answer not in options.values():
        raise ValueError(f"its answer {answer:.80} is not among its options {', '.join(options)}")
    by_letter = bool(letters) and (named or letters <= options.keys())
    info: dict[str, Any] = dict(read_extra_info(row.get("extra_info")))
    info |= {"options": options} if by_letter and letters <= options.keys() else {}
    if values["tolerance"]:
        info["tolerance"] = _text(values["tolerance"])
        check_tolerances(info)
    if benchmark.relative_tolerance:
        info["relative_tolerance"] = benchmark.relative_tolerance
    return Problem(
        index=index,
        question=question if context in question else f"{context} {question}",
        answer=answer,
        data_source=_text(values["verifier"]) or (CHOICE if by_letter else benchmark.verifier),
        extra_info=info,
        solution=solution,
    )


def inline_options(question: str) -> dict[str, str]:
    """Return the options at the end of a question, such as ``A. 1 B. 2`` or ``(A) 1 (B) 2``, keyed by letter."""
    labels = list(_INLINE_LABEL.finditer(question))
    for order in _LABEL_ORDERS:
        # Search backwards from the end, because the question itself can mention a point A.
        chains: dict[str, list[re.Match[str]]] = {}
        for label in reversed(labels):
            if (place := order.find(label[label.lastindex or 0])) < 0:
                continue
            # Continue with the nearest following label of the next letter.
            chain = chains[order[place]] = [label, *chains.get(order[place + 1 : place + 2], [])]
            if place == 0 and len(chain) >= 2:
                ends = [later.start() for later in chain[1:]] + [len(question)]
                texts = [_option_text(question[a.end() : b]) for a, b in zip(chain, ends, strict=True)]
                return dict(zip(order, texts, strict=False))
    return {}


def _option_text(text: str) -> str:
    """Return the text of an option without remnants of neighbouring labels or text after a blank line."""
    text = _strip_option(text.strip().partition("\n\n")[0])
    # Often a single formula contains all options, so its dollar signs are unbalanced within one option.
    return _strip_option(text.strip("$ ")) if text.count("$") % 2 else text


def _strip_option(text: str) -> str:
    """Strip whitespace and TeX spacing from both ends of ``text``, and opening brackets from its end."""
    end = len(text)
    while match := _AFTER_OPTION.search(text, max(0, end - len(r"\qquad")), end):
        end = match.start()
    before = _BEFORE_OPTION.match(text, 0, end)
    return text[before.end() if before else 0 : end]


def _first_value(row: Row, names: Sequence[str], nan_is_gap: bool) -> Any:
    """Return the first non-empty value, or None. If ``nan_is_gap`` is True, NaN values count as missing."""
    values = [row.get(name) for name in names]
    if nan_is_gap:
        values = [None if isinstance(value, float) and math.isnan(value) else value for value in values]
    return next((value for value in values if value not in (None, "", [], {}) and value is not False), None)


def _require_plain(value: Any, ours: str, row: Row, names: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is text, a finite number or a flat list of these; chats are rejected."""
    for entry in value if isinstance(value, list) else [value]:
        nested = isinstance(entry, Mapping | list)
        infinite = isinstance(entry, float) and not math.isfinite(entry)
        if nested or infinite or (isinstance(value, list) and entry is None):
            theirs = next(name for name in names if row.get(name) is value)
            kind = "a finite number" if infinite else "text"
            raise ValueError(f"its {ours}, {theirs}, is not {kind}; write it out in a field of its own")


def _text(value: Any) -> str:
    """Convert ``value`` to text, reducing lists to their first entry and whole floats to integers."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        value = value[0] if value else ""
    return str(value).strip()


def _answer_text(value: Any, options: Any) -> str:
    """Convert the answer to text: option indices become letters, and several answers are joined by commas."""
    several = value if isinstance(value, list) else [value]
    if isinstance(options, list):
        # Tables with missing values store indices as floats.
        several = [int(entry) if isinstance(entry, float) and entry.is_integer() else entry for entry in several]
        texts = [_text(option) for option in options]
        indices = [entry for entry in several if type(entry) is int]
        wrong = [entry for entry in indices if not 0 <= entry < len(options) and str(entry) not in texts]
        if wrong:
            raise ValueError(f"its answer {wrong[0]} is not among its {len(options)} options; indices count from 0")
        if several and len(indices) == len(several) and max(indices) < len(options) and min(indices) >= 0:
            return "".join(chr(65 + entry) for entry in indices)
    answer = ", ".join(text for text in map(_text, several) if text)
    return "" if not answer.strip("$ ") else _SOLUTION_AT_END.sub("", answer).rstrip()
