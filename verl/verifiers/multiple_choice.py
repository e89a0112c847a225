"""Verifier for multiple-choice questions, which are answered with the letter or the text of an option."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from verl.verifiers.algebra import compare_latex
from verl.verifiers.answers import SENTENCE_END, TAIL_CHARS, boxed_with_context, quick_equal
from verl.verifiers.context import is_stated
from verl.verifiers.math import verify_math
from verl.verifiers.notation import same_words
from verl.verifiers.verdict import Info, Verdict, decide

MAX_LETTERS_CHARS = 200
"""Maximum length of text that is parsed as a list of letters."""

_MARKUP = re.compile(
    r"\\(?:text)?color\s?\{[A-Za-z]{1,20}\}|\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|rm|bf|boxed|fbox)(?![A-Za-z])"
    r"|\\(?:left|right)(?![A-Za-z])|\\[()\[\],;:! {}]|[*$_{}~]"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
_WIDE = str.maketrans("（）．：，、。ＡＢＣＤＥ", "().:,,.ABCDE") | dict.fromkeys(
    [*range(0x200B, 0x2010), 0x2060, 0xFEFF]
)
_LETTERS = re.compile(r"\(?[A-Z]\)?(?:(?:(?:[\s,;/&]|and\b|or\b|和|或)+|(?<=\)))\(?[A-Z]\)?)*")
_OR = re.compile("or|或")
_LOWER_LETTER = re.compile(r"\(?[a-z](?:\)?\Z|[).:](?=\s))")
_LABEL = re.compile(r"\(([A-Z])\)|(?<![A-Za-z0-9\\(])([A-Z])\s*[).:]")
_STATED = re.compile(
    r"(?:\bans|answer|option|choice)s?[ \t*]*(?:(?:will |must |should |would )?(?:is|are|was|be)\b"
    r"|['’]s\b|:|=)|答案[是为]?|故选",
    re.IGNORECASE,
)
_LEADING = re.compile(
    r"[\s:=]*(?:(?:the|correct|option|choice|letter|选项|选)[\s:]*){0,4}\(?([A-Z])(?=$|[\s).,:;!?\]])(?!\s*[+=*/^<>×])",
    re.IGNORECASE,
)
_CALLED_RIGHT = re.compile(
    r"(?<![A-Za-z0-9])\(?([A-Z])\)?(?:['’]s|\s+is|\s+must\s+be|\s+has\s+to\s+be|\s+seems(?:\s+to\s+be)?)\s+(?:the\s+|a\s+)?(?:correct|right|best|answer)\b"
    r"|(?<![A-Za-z])(?i:only)\s+\(?([A-Z])\)?\s+(?:is|works|holds|fits|matches|satisfies|remains)(?![A-Za-z])"
    r"|(?<![A-Za-z0-9])\(?([A-Z])\)?\s+it\s+is(?=[\s.!*]*\Z)"
)
_LAST_LETTER = re.compile(r"(?:^|(?<!%)[\s:=>(,.])(\(?)([A-Z])(\)?)$")
_SET_OFF = re.compile(r"[\[\"“‘'`]{1,2}([A-Z])[]\"”’'`]{1,2}")
"""Pattern of a letter enclosed in square brackets or quotation marks."""

_CORRECTED = re.compile(
    r"(?<![A-Za-z])(?i:(?<!is\s)no|wait|sorry|actually|correction|rather|i meant?|make that)(?![A-Za-z])"
    r"(?:(?!not|n['’]t)[^\n.]){0,30}?(?<![A-Za-z0-9])\(?([A-Z])\)?(?=[.!*]*\s*\Z)"
)
"""Pattern of a correction that follows an answer, as in "No, C"."""

_NAMED = re.compile(r"(?:\bans|answer|option|choice)[:.]?$", re.IGNORECASE)
_REJECTED = re.compile(r",?\s(?:and |but )?not\b.*")
_NOT_LETTER = re.compile(r"(?<!or),?\s(?:and |but )?not\s\(?[A-Z]\)?[\s.!*]*\Z")
_DENIED = re.compile(
    r"(?<![A-Za-z])(?:not|never|neither|nor|none|no (?:longer|way)|except|excluding|(?:anything|everything|all) but"
    r"|(?:any|each|every|all)(?: other| the)? (?:options?|choices?|answers?|letters?) but|(?:any|each|every) but"
    r"|hardly|barely|scarcely|unlikely|(?<!no )doubt|worst (?:option|choice|answer)"
    r"|wrong|incorrect|false|eliminat(?:es?|ed|ing)|rul(?:es?|ed|ing) out|exclud(?:es?|ed)|opposite|instead of|cannot"
    r"|(?:is|are|was|were|ca|could|do|does|did|wo|would)n['’]?t)(?![A-Za-z])",
    re.IGNORECASE,
)
_NONE_OF = re.compile(
    r"(?i:neither|none of)|(?<![a-z])(?i:any|all|each|every|some|most|no|other|two|three|list)(?: of)?(?: [a-z]+){0,4}:"
    r"[\sA-Z,()]*\Z"
)
_BEFORE_LETTER = re.compile(
    r"(?:\A|[^A-Za-z\s]|(?<![A-Za-z])(?:hence|so|thus|therefore|then|is|be|are|answers?|ans|options?|choices?|letter|choose"
    r"|chose|pick|select|with|namely|get|have|gives?|only|and|but|say|for|was|est|es|ist|match(?:es)?|(?:equal|correspond|lead|point)s?\sto|[a-z]{3,12}ly)"
    r"|(?<![A-Za-z])(?:its|(?:it|that|this|here|one)['’]s))\Z",
    re.IGNORECASE,
)
"""Pattern of text after which a letter denotes an option. Elsewhere, a letter may be part of a name (Vitamin D)."""

_CLAUSE_END = re.compile(r"[.!?;,](?=\s)")
_CONTRAST = re.compile(r"(?<![A-Za-z])but(?![A-Za-z])")
_HEDGED = re.compile(
    r"\A[A-Z]\)?,?\s(?:\(?or\s(?:[a-z]{1,12}\s)?\(?[A-Z](?![A-Za-z])|unless\b|(?:if|when|for)\b.{1,80}\b(?:otherwise|else)\b"
    r"|(?:otherwise|else)\b)"
)
"""Pattern of a letter with a condition, as in "C if n is even, else A"."""

_DENIED_BEFORE = re.compile(
    r"(?<![A-Za-z])(?:wrong|incorrect|false|worst|(?:any|none|all|each|every|some|other|not|neither|either|no|another|one|two|three|most|many|list|set)"
    r"(?:\sof)?(?:\s(?:the|these|those|other|my|your|possible|given|remaining|two|three|four|five)){0,2})\s{1,3}\Z",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"\s{0,3}(?:is\s{1,3})?(?:(?:not|isn['’]?t)(?![A-Za-z])|wrong|incorrect|false|impossible)(?:\s{1,3}[a-z]{1,12}){0,2}[.!\s]{0,3}",
    re.IGNORECASE,
)
_NAMES_OPTION = re.compile(
    r"\A\s{0,3}(?:(?:the\s)?(?:final\s|correct\s)?(?:answer|option|choice))[\s:]{1,3}(?:is[\s:]{1,3})?"
    r"|\A\s{0,3}(?=so|thus|hence|therefore|it|that)(?:(?:so|thus|hence|therefore),?\s)?(?:(?:its|(?:it|that)(?:['’]s|\sis))\s{1,3})?",
    re.I,
)
_IT_IS = re.compile(r"(?<![A-Za-z])(?:it|that|this)(?:['’]s|\sis)\s{1,3}(?=\(?[A-Z](?![A-Za-z]))", re.I)
_GOES_ON = re.compile(r"\s+(?!(?:because|since|as|which)\b)[A-Za-z]")

OR = "or"
"""Marker added to the letters of an answer that leaves several options open."""

WORDS = "AI"
"""Letters that are also English words. Without brackets, these letters denote options only at the end of a sentence."""


def verify_multiple_choice(
    solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False
) -> Verdict | None:
    """Verify a response. Return None if ``quick`` is set and algebra is required.

    ``ground_truth`` is a letter, several letters (``AD`` means that exactly these are correct), a labelled option, or
    the text of an option. Other ground truths are compared as mathematics. If ``extra_info`` contains ``options`` (see
    :func:`read_options`), the text of the correct option and equivalent expressions are also accepted.

    The answer is the last box, or else the last statement ("the answer is (B)") or a letter at the end.
    """
    options = read_options((extra_info or {}).get("options"))
    truth = letters_in(ground_truth, options) or _matching(ground_truth, options)
    if not truth:
        return verify_math(solution, ground_truth, extra_info, quick)
    content = boxed_with_context(solution)
    boxed = content is not None
    if content is None:
        answer, letters = _find_unboxed(solution, options)
    else:
        plain = _plain(content)
        named = _NAMES_OPTION.sub("", plain, 1)
        answer, letters = content, letters_in(content if named == plain else named, options)
    matching = _matching(answer or "", options)
    correct = "".join(sorted(truth))
    equal: bool | None = False
    if len(truth) > 1 and sorted(_plain(answer or "")) == sorted(truth):
        equal = True  # The order of letters does not matter: CA equals AC.
    elif letters and not (matching and len(letters) > 1):
        equal = letters == truth
    elif matching:
        # Several options may have the same text.
        equal = truth <= matching
    elif correct in options:
        equal = quick_equal(_unwrap(answer or ""), _unwrap(options[correct]))

    def algebra(answer: str) -> bool | None:
        # Algebra ignores units and reads 8 \\mathrm{i} as 8, so the answer may be equal to several options.
        others = [text for text in options.values() if not quick_equal(_unwrap(text), _unwrap(options[correct]))]
        return not any(compare_latex(answer, text) for text in others) and compare_latex(answer, options[correct])

    return decide(answer, boxed, equal, quick, algebra)


def read_options(options: Any) -> dict[str, str]:
    """Return the text of each option by letter, in order, or an empty mapping if there are no options.

    ``options`` is a mapping, a list of strings, or a single string with labels in order (``A) 5``, ``(A) 5``, ``A.
    5``). Labels are removed from a list if every string has one.
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
    """Return the options chosen in ``text``, or an empty set unless it consists of letters or labelled options.

    Examples are ``B``, ``(B)``, ``\\text{(B)}``, ``B. 42``, ``A, C``, and ``b`` unless it is the text of an option. If
    a label precedes the text of a different option, both options are returned.
    """
    plain = _plain(text)
    if lower := _LOWER_LETTER.match(plain) if not _matching(text, options) else None:
        plain = plain[: lower.end()].upper() + plain[lower.end() :]
    # "ACD" may stand for three options, but "BAD" is a word.
    ascends = all(a < b for a, b in pairwise(plain)) and plain.isascii() and plain.isalpha() and plain.isupper()
    if len(plain) <= MAX_LETTERS_CHARS and (ascends or _LETTERS.fullmatch(plain)):
        named = frozenset(re.findall("[A-Z]", plain))
        # "A or C" is neither A nor both of them.
        choice = frozenset({OR} if _OR.search(plain) else ())
        return named | choice if not options or named <= options.keys() else frozenset()
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
    """Return the options whose text equals ``text``, or an empty set if ``text`` is longer than ``TAIL_CHARS``."""
    if len(text) > TAIL_CHARS:
        return frozenset()
    unwrapped = _unwrap(text)
    return frozenset(
        letter
        for letter, option in options.items()
        if quick_equal(unwrapped, _unwrap(option)) or same_words(unwrapped, _unwrap(option))
    )


def _find_unboxed(solution: str, options: Mapping[str, str]) -> tuple[str | None, frozenset[str]]:
    """Return the answer in a response without a box (None if absent) and the letters of the chosen options."""
    tail = solution[-TAIL_CHARS:].translate(_WIDE).rstrip()
    statements = [
        _first_sentence(tail[match.end() :])
        for match in _STATED.finditer(tail)
        if not _DENIED_BEFORE.search(tail[max(0, match.start() - 20) : match.start()])
        and is_stated(tail, match.end(), match.end(), choice=True)
    ]
    # Ignore statements that were cut off after "The answer is a".
    statements = [sentence for sentence in statements if sentence not in ("", "a", "i")]
    corrected = _CORRECTED.search(tail) if statements else None
    if corrected:
        return corrected[0], frozenset(corrected[1])
    for sentence in reversed(statements):
        letters = letters_in(sentence, options) or _matching(sentence, options) or _leading_letter(sentence)
        if letters:
            return sentence, letters
    called_right = _CALLED_RIGHT.findall(_plain(tail))
    if called_right:
        return "".join(called_right[-1]), frozenset("".join(called_right[-1]))
    line_start = tail.rfind("\n") + 1
    last_line = _NOT_LETTER.sub("", tail[line_start:])
    tail = tail[:line_start] + last_line
    if is_stated(tail, max(line_start, len(tail) - 1), len(tail), choice=True):
        stated = [m.end() for m in _IT_IS.finditer(last_line) if _is_affirmed(last_line, m)]
        letters = letters_in(last_line, {}) or _last_letter(last_line)
        letters = letters or (_leading_letter(last_line[stated[-1] :]) if stated else frozenset())
        if letters:
            return last_line, letters
    return (statements[-1] if statements else None), frozenset()


def _is_affirmed(line: str, it_is: re.Match[str]) -> bool:
    before = line[: it_is.start()]
    denied = re.search(r"(?i)\b(?:if|unless|whether)\b", before) or _DENIED.search(before)
    return not denied and is_stated(line, it_is.end(), it_is.end(), choice=True)


def _first_sentence(text: str) -> str:
    """Return the first sentence, or its part before "not". The full stop of a label (``B. 42``) does not end it."""
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
    # In "not A but C", the negation ends at "but".
    if denials and not _CONTRAST.search(clause[-1], denials[-1]) or _NONE_OF.search(",".join(clause[-3:])):
        return frozenset()
    if not (opened and closing) and not _BEFORE_LETTER.search(before):
        return frozenset()
    is_sure = letter not in WORDS or opened or closing or line.rstrip("*$ ").endswith(".") or _NAMED.search(before)
    return frozenset(letter) if is_sure else frozenset()


def _letter(label: re.Match[str]) -> str:
    return label.group(1) or label.group(2)


def _plain(text: str) -> str:
    """Remove markup from ``text``, but keep brackets around letters."""
    return _SET_OFF.sub(r"(\1)", _MARKUP.sub("", text.translate(_WIDE))).strip().rstrip(".! \t")


def _unwrap(text: str) -> str:
    """Remove dollar signs, emphasis, and a ``\\text{}`` that encloses all of ``text``."""
    bare = text.strip(" \t\n$*")
    wrapped = _WRAPPED.fullmatch(bare)
    return wrapped.group(1).strip() if wrapped else bare
