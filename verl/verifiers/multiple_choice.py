"""Verifier of multiple-choice questions: the answer is the letter of an option, or its text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.verifiers.algebra import compare_latex
from verl.verifiers.answers import SENTENCE_END, TAIL_CHARS, boxed_in_place, quick_equal
from verl.verifiers.context import is_stated
from verl.verifiers.math import verify_math
from verl.verifiers.verdict import Verdict, decide

MAX_LETTERS_CHARS = 200
"""Longer text is not a list of letters."""

_MARKUP = re.compile(
    r"\\(?:text)?color\s?\{[A-Za-z]{1,20}\}|\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|rm|bf|boxed|fbox)(?![A-Za-z])"
    r"|\\(?:left|right)(?![A-Za-z])|\\[()\[\],;:! {}]|[*$_{}~]"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
_WIDE = str.maketrans("（）．：，、。ＡＢＣＤＥ", "().:,,.ABCDE")
_LETTERS = re.compile(r"\(?[A-Z]\)?(?:(?:(?:[\s,;/&]|and\b|or\b|和|或)+|(?<=\)))\(?[A-Z]\)?)*")
_OR = re.compile("or|或")
_LOWER_LETTER = re.compile(r"\(?[a-z]\)?")
_LABEL = re.compile(r"\(([A-Z])\)|(?<![A-Za-z0-9\\(])([A-Z])\s*[).:]")
_STATED = re.compile(
    r"(?:\bans|answer|option|choice)s?[ \t*]*(?:(?:will |must |should )?(?:is|are|be)\b|:|=)|答案[是为]?|故选",
    re.IGNORECASE,
)
_LEADING = re.compile(
    r"[\s:=]*(?:(?:the|correct|option|choice|letter|选项|选)[\s:]*){0,4}\(?([A-Z])(?=$|[\s).,:;!?\]])(?!\s*[+=*/^<>×])",
    re.IGNORECASE,
)
_CALLED_RIGHT = re.compile(r"(?<![A-Za-z0-9])\(?([A-Z])\)?\s+is\s+(?:the\s+|a\s+)?(?:correct|right|best|answer)\b")
_LAST_LETTER = re.compile(r"(?:^|(?<!%)[\s:=>(,.])(\(?)([A-Z])(\)?)$")
_SET_OFF = re.compile(r"[\[\"“‘'`]{1,2}([A-Z])[]\"”’'`]{1,2}")
"""A letter in brackets or quotation marks of any kind."""

_CORRECTED = re.compile(
    r"(?<![A-Za-z])(?i:(?<!is\s)no|wait|sorry|actually|correction|rather|i meant?|make that)(?![A-Za-z])"
    r"(?:(?!not|n['’]t)[^\n.]){0,30}?(?<![A-Za-z0-9])\(?([A-Z])\)?(?=[.!*]*\s*\Z)"
)
"""After an answer: No, C."""

_NAMED = re.compile(r"(?:\bans|answer|option|choice)[:.]?$", re.IGNORECASE)
_REJECTED = re.compile(r",?\s(?:and |but )?not\b.*")
_DENIED = re.compile(
    r"(?<![A-Za-z])(?:not|never|neither|nor|none|no (?:longer|way)|except|excluding|(?:anything|everything|all) but"
    r"|(?:any|each|every|all)(?: other)? (?:options?|choices?|answers?|letters?) but|(?:any|each|every) but"
    r"|wrong|incorrect|false|eliminat(?:es?|ed|ing)|rul(?:es?|ed|ing) out|exclud(?:es?|ed)|opposite|instead of|cannot"
    r"|(?:is|are|was|were|ca|could|do|does|did|wo|would)n['’]?t)(?![A-Za-z])",
    re.IGNORECASE,
)
_BEFORE_LETTER = re.compile(
    r"(?:\A|[^A-Za-z\s]|(?<![A-Za-z])(?:hence|so|thus|therefore|then|is|be|are|answers?|ans|options?|choices?|letter|choose"
    r"|chose|pick|select|with|namely|get|have|gives?|only|and|but|say|[a-z]{3,12}ly))\Z",
    re.IGNORECASE,
)
"""Before a letter that names an option; after any other word it is part of a name, as in Vitamin D."""

_CLAUSE_END = re.compile(r"[.!?;,](?=\s)")
_CONTRAST = re.compile(r"(?<![A-Za-z])but(?![A-Za-z])")
_HEDGED = re.compile(
    r"\A[A-Z]\)?,?\s(?:\(?or\s(?:[a-z]{1,12}\s)?\(?[A-Z](?![A-Za-z])|unless\b|(?:if|when|for)\b.{1,80}\b(?:otherwise|else)\b"
    r"|(?:otherwise|else)\b)"
)
"""A letter that holds under a condition: C if n is even, else A."""

_DENIED_BEFORE = re.compile(r"(?<![A-Za-z])(?:wrong|incorrect|false|worst)\s{1,3}\Z", re.IGNORECASE)
_DENIED_AFTER = re.compile(
    r"\s{0,3}(?:is\s{1,3})?(?:(?:not|isn['’]?t)(?![A-Za-z])|wrong|incorrect|false|impossible)(?:\s{1,3}[a-z]{1,12}){0,2}[.!\s]{0,3}",
    re.IGNORECASE,
)
_NAMES_OPTION = re.compile(
    r"\A\s{0,3}(?:(?:the\s)?(?:final\s|correct\s)?(?:answer|option|choice))[\s:]{1,3}(?:is[\s:]{1,3})?", re.I
)
_GOES_ON = re.compile(r"\s+(?!(?:because|since|as|which)\b)[A-Za-z]")

OR = "or"
"""Stands among the letters of an answer that leaves a choice."""

WORDS = "AI"
"""Letters that are English words: without brackets they count only if no sentence continues after them."""


def verify_multiple_choice(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """Verify a response; with ``quick``, return None if it needs algebra.

    ``ground_truth`` is a letter, several letters (``AD``: exactly these are correct), a labelled option or the text of
    one; anything else is compared as mathematics. ``extra_info`` may hold ``options`` in the form that ``read_options``
    takes; then the text of the correct option, or an expression equal to it, is correct too.

    The answer is read from the last box, else from the last statement ("the answer is (B)"), else it is a single letter
    at the end. Two letters are wrong if the ground truth is one.
    """
    options = read_options((extra_info or {}).get("options"))
    truth = letters_in(ground_truth, options) or _matching(ground_truth, options)
    if not truth:
        return verify_math(solution, ground_truth, extra_info, quick)
    content = boxed_in_place(solution)
    boxed = content is not None
    if content is None:
        answer, letters = _find_unboxed(solution, options)
    else:
        plain = _plain(content)
        named = _NAMES_OPTION.sub("", plain, 1)
        answer, letters = content, letters_in(content if named == plain else named, options)
    matching = _matching(answer or "", options)
    right = "".join(sorted(truth))
    equal: bool | None = False
    if len(truth) > 1 and sorted(_plain(answer or "")) == sorted(truth):
        equal = True  # CA for AC
    elif letters and not (matching and len(letters) > 1):
        equal = letters == truth
    elif matching:
        # Two options with the same text are both correct.
        equal = truth <= matching
    elif right in options:
        equal = quick_equal(_unwrap(answer or ""), _unwrap(options[right]))

    def algebra(answer: str) -> bool | None:
        # Algebra ignores units and takes 8 \\mathrm{i} for 8: it cannot tell options that differ only in that.
        others = [text for text in options.values() if not quick_equal(_unwrap(text), _unwrap(options[right]))]
        return not any(compare_latex(answer, text) for text in others) and compare_latex(answer, options[right])

    return decide(answer, boxed, equal, quick, algebra)


def read_options(options: Any) -> dict[str, str]:
    """Letter -> text of each option, in order; empty if there are none.

    ``options`` is such a mapping; or a list of texts, whose labels (``A) 5``, ``(A) 5``, ``A. 5``) are removed if all
    have one; or one text with the labels in order.
    """
    if isinstance(options, Mapping):
        return {str(letter): str(text) for letter, text in options.items() if text is not None}
    if isinstance(options, str):
        return _inline_options(options)
    if not isinstance(options, Sequence):
        return {}
    texts = [str(text) for text in options[:26]]
    labels = [_LABEL.match(text.strip()) for text in texts]
    if all(label and _letter(label) == chr(65 + i) for i, label in enumerate(labels)):
        texts = [text.strip()[label.end() :] for text, label in zip(texts, labels, strict=True) if label]
    return {chr(65 + i): text.strip() for i, text in enumerate(texts)}


def _inline_options(text: str) -> dict[str, str]:
    labels: list[re.Match[str]] = []
    for label in _LABEL.finditer(text.translate(_WIDE)):
        if _letter(label) == chr(65 + len(labels)):
            labels.append(label)
    ends = [label.start() for label in labels[1:]] + [len(text)] * bool(labels)
    return {_letter(a): text[a.end() : end].strip(" \t\n,;") for a, end in zip(labels, ends, strict=True)}


def letters_in(text: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the options that ``text`` names, if it consists only of letters or labelled options; otherwise empty.

    ``B``, ``(B)``, ``\\text{(B)}``, ``B. 42``, ``A, C``, and ``b`` unless that is an option's text. A label before the
    text of another option names both.
    """
    plain = _plain(text)
    if _LOWER_LETTER.fullmatch(plain) and not _matching(text, options):
        plain = plain.upper()
    # "ACD" may be three options, "BAD" is a word.
    if len(plain) <= MAX_LETTERS_CHARS and (_LETTERS.fullmatch(plain) or _ascends(plain)):
        named = frozenset(re.findall("[A-Z]", plain))
        # A or C are neither A nor both.
        offered = frozenset({OR} if _OR.search(plain) else ())
        return named | offered if not options or named <= options.keys() else frozenset()
    label = _LABEL.match(plain)
    if label is None or (options and _letter(label) not in options):
        return frozenset()
    rest = plain[label.end() :]
    matching = _matching(rest, {letter: _plain(option) for letter, option in options.items()})
    if _letter(label) in matching:
        return frozenset(_letter(label))
    if options and _DENIED_AFTER.fullmatch(rest):
        return frozenset()
    return frozenset([_letter(label), *matching, *map(_letter, _LABEL.finditer(rest))])


def _matching(text: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the options whose text is ``text``; no option is longer than ``TAIL_CHARS``."""
    if len(text) > TAIL_CHARS:
        return frozenset()
    unwrapped = _unwrap(text)
    return frozenset(letter for letter, option in options.items() if quick_equal(unwrapped, _unwrap(option)))


def _find_unboxed(solution: str, options: Mapping[str, str]) -> tuple[str | None, frozenset[str]]:
    """Return the answer of a response without a box, or None, and the options that it names by letter."""
    tail = solution[-TAIL_CHARS:].translate(_WIDE).rstrip()
    stated = [
        _first_sentence(tail[match.end() :])
        for match in _STATED.finditer(tail)
        if not _DENIED_BEFORE.search(tail[max(0, match.start() - 20) : match.start()])
        and is_stated(tail, match.end(), match.end(), choice=True)
    ]
    # "The answer is a" at the end of a line was cut off.
    stated = [sentence for sentence in stated if sentence not in ("", "a", "i")]
    corrected = _CORRECTED.search(tail) if stated else None
    if corrected:
        return corrected[0], frozenset(corrected[1])
    for sentence in reversed(stated):
        letters = letters_in(sentence, options) or _matching(sentence, options) or _leading_letter(sentence)
        if letters:
            return sentence, letters
    called_right = _CALLED_RIGHT.findall(_plain(tail))
    if called_right:
        return called_right[-1], frozenset(called_right[-1])
    line_start = tail.rfind("\n") + 1
    last_line = tail[line_start:]
    if not is_stated(tail, max(line_start, len(tail) - 1), len(tail), choice=True):
        return (stated[-1] if stated else None), frozenset()
    letters = letters_in(last_line, {}) or _last_letter(last_line)
    if letters:
        return last_line, letters
    return (stated[-1] if stated else None), frozenset()


def _first_sentence(text: str) -> str:
    """Return the first sentence, up to a "not"; the full stop of a label (``B. 42``) does not end it."""
    line = _REJECTED.sub("", text.lstrip(" \t\n:=*").partition("\n")[0][:MAX_LETTERS_CHARS])
    label = _LABEL.match(line)
    start = label.end() if label else 0
    return line[:start] + SENTENCE_END.split(line[start:], maxsplit=1)[0]


def _leading_letter(sentence: str) -> frozenset[str]:
    plain = _plain(sentence)
    match = _LEADING.match(plain)
    if match is None or not match.group(1).isupper() or _HEDGED.match(plain, match.start(1)):
        return frozenset()
    letter, bracketed = match.group(1), plain[match.end() : match.end() + 1] == ")"
    is_word = letter in WORDS and not bracketed and _GOES_ON.match(plain, match.end())
    return frozenset() if is_word else frozenset(letter)


def _last_letter(line: str) -> frozenset[str]:
    plain = _plain(line)
    match = _LAST_LETTER.search(plain, max(0, len(plain) - 20))
    if match is None:
        return frozenset()
    opened, letter, closing = match.groups()
    before = plain[: match.start(2)].rstrip(" (")[-20:]
    clause = _CLAUSE_END.split(plain[: match.start(2)][-MAX_LETTERS_CHARS:])
    denials = [denial.end() for denial in _DENIED.finditer(clause[-1])]
    # "Not A but C" denies what comes before its "but".
    if (
        denials
        and not _CONTRAST.search(clause[-1], denials[-1])
        or re.search("(?i)neither|none of", ",".join(clause[-3:]))
    ):
        return frozenset()
    if not (opened and closing) and not _BEFORE_LETTER.search(before):
        return frozenset()
    is_sure = letter not in WORDS or opened or closing or line.rstrip("*$ ").endswith(".") or _NAMED.search(before)
    return frozenset(letter) if is_sure else frozenset()


def _ascends(text: str) -> bool:
    in_order = all(a < b for a, b in zip(text, text[1:], strict=False))
    return in_order and text.isascii() and text.isalpha() and text.isupper()


def _letter(label: re.Match[str]) -> str:
    return label.group(1) or label.group(2)


def _plain(text: str) -> str:
    """``text`` without markup; letters and their brackets remain."""
    return _SET_OFF.sub(r"(\1)", _MARKUP.sub("", text.translate(_WIDE))).strip().rstrip(". \t")


def _unwrap(text: str) -> str:
    """``text`` without dollar signs, emphasis, or a ``\\text{}`` around all of it."""
    bare = text.strip(" \t\n$*")
    wrapped = _WRAPPED.fullmatch(bare)
    return wrapped.group(1).strip() if wrapped else bare
