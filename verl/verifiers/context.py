"""Analyses the context of an answer: signs and words that change its value or make it uncertain.

Context changes 5 in ``−5``, "5 million" and ``2\\boxed{5}``, and makes it uncertain in "perhaps 5" and "Is it 5?".
"""

import re

from verl.verifiers.lexicon import WORDS

BEFORE_CHARS, AFTER_CHARS = 48, 48
"""Number of characters before and after an answer that are searched for context."""

SENTENCE_CHARS = 400
"""Number of characters before and after an answer that are searched for expressions of uncertainty."""

_GAP = r"(?:\\?[$£€]\s?|\*\*|\\text\s?\{|[\u200b-\u200d\u2060\ufeff])*"
_WORDS = (
    r"(?<![A-Za-z])(?i:not|never|nor|negative|minus|twice|thrice|double|triple"
    r"|(?:half|third|quarter|square|cube|root) of"
    r"|(?:is|are|was|were|ca|could|would)n['’]?t(?:\sbe)?)(?:\s(?:equal\sto|an?|the))?\s{1,3}"
)
_SIGNS = (
    r"[−√∛∜_≠≤≥±¬]\s{0,3}|(?<=\S)\s[<>]\s{0,3}|(?<=[a-z])\s-\s{1,3}|=\s{0,2}-\s{1,2}|(?:(?<=[\s=$({])|^)[‐‑‒–—﹣－⁻˗➖]"
    r"|\\(?:n?eq?|pm|mp|not|neg|sqrt|[dtc]?frac|sin|cos|tan|exp|l[nog]{1,2}(?:_\{?[0-9a-z]{1,3}\}?)?|[hv]?phantom)\s?(?:\[[0-9]\])?\s?\{?|[\^}_]\{"
)
_TERM = r"(?:[0-9.,]{0,20}[0-9)}\]]|(?<![A-Za-z\\'])[A-Za-z])"
_OPERATOR = r"(?:[*/^×·÷+]|\s[*/×·÷+]\s|\s?\\(?:times|cdot|div)\s?)"
_LETTER = r"(?<![A-Za-z\\])[A-Za-z]"
_MINUS = r"(?:(?<=[\s=$({*])|^)-"

_BEFORE_NUMBER = re.compile(
    rf"(?:{_WORDS}|{_SIGNS}|{_TERM}{_OPERATOR}|[0-9.,]{{0,20}}[0-9)]-|{_LETTER}(?!\$)|{_MINUS}(?=\\?[$£€*])){_GAP}\Z"
)
_BEFORE_BOX = re.compile(
    rf"(?:{_WORDS}|{_SIGNS}|{_TERM}{_OPERATOR}|[0-9.,]{{0,20}}[0-9](?:\s?-\s?)?|{_LETTER}(?!\$)|{_MINUS}){_GAP}\Z"
)
_FILLED_IN = re.compile(
    r"[\s$]{0,5}(?:\\[,;: ]){0,3}(?:(?:[+*×/-]|\\(?:times|cdot))[^=<>\n$]{0,32})?(?:[=<>]|\\[lg]eq?(?![A-Za-z]))"
)
"""Pattern of text after a box that continues an equation, as in 2 + \\boxed{3} = 5."""

_AFTER = (
    r"(?:\*\*|\$)?(?:\s|~|\\[,;: ]){0,3}(?:\\text\s?\{\s?)?"
    r"(?i:(?:million|billion|trillion|thousand|hundred|dozen|lakh|crore"
    r"|squared|cubed|factorial|(?:(?:is|was)\s|,?\s?(?:but|which|and)\s(?:(?:that|this|it)\s)?(?:is|was)\s(?!not))(?:wrong|not|incorrect|false|impossible)"
    rf"|{'|'.join(WORDS['modifiers']['bound'])})(?![A-Za-z])|万|亿|\+(?=[\s$*]*(?:\n|\Z)))"
    r"|(?:[kKMBbnxyz](?![A-Za-z0-9])|bn|mn|[π√²³½¼¾‰]|\^\s?\{?\s?[0-9A-Za-z]|\\sqrt\s?(?:[0-9]|\{[^{}]{1,20}\})|\\(?:pi|sqrt|cdot|times)(?![A-Za-z]))"
    r"|\s?[-+*×·/^]\s?[nxyz](?![A-Za-z])|[\s$]{0,3}(?:\\text\s?\{\s?)?or[\s}$]{1,4}-?[0-9]"
)
_AFTER_NUMBER = re.compile(rf"{_AFTER}|\s{{1,3}}rad(?:ian)?s?(?![A-Za-z/])")
_AFTER_BOX = re.compile(
    rf"{_AFTER}|\\?%|\s?!(?=\s?(?:\$|\\[)\]]))|!|i(?![A-Za-z])|\s?(?:[-+*×·/^÷]|\\(?:times|cdot|div)(?![A-Za-z]))[\s$]{{0,3}}(?:[0-9(]|\\[df]?frac|\\sqrt|\\pi)[0-9^]*|:\s?[0-9]"
)
_ONLY_MINUS = re.compile(rf"(?:=\s{{0,2}})?[-−‐‑‒–—﹣－⁻˗➖]\s{{0,3}}{_GAP}|negative\s{{1,3}}", re.I)

_SENTENCE_END = re.compile(r"[\n。？！]|[.?!](?=\s|$)")


def _any_of(kind: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(WORDS['unsure'][kind])})(?![A-Za-z])", re.IGNORECASE)


_UNSURE, _CHOICE, _TAKEN_BACK, _GIVEN_UP = (_any_of(kind) for kind in ("before", "choice", "after", "given_up"))
_ASKS = re.compile(
    r"[\s*]*(?:is|are|was|were|do|does|did|can|could|will|would|should|what|which|how)(?![A-Za-z])", re.I
)
_LISTED_BEFORE = re.compile(
    r"[0-9][ \t$]{0,3}(?:,?[ \t$]{0,3}(?:or|and|\.\.\.|…|\\l?dots))?[ \t$]{1,3}\Z"
    r"|(?:(?:[0-9]{1,9}|\.\.\.|…|\\l?dots)[ \t$]{0,3},[ \t$]{0,3}){2}\Z"
)
_WORDS_ONLY = re.compile("[^0-9]*")
_NUMBER_OF = re.compile(r"(?<![A-Za-z])(?:page|step|question|problem|chapter|exercise|figure|line)\s{1,3}#?\Z", re.I)
_NO_NUMBER = re.compile(r"(?:st|nd|rd|th)(?![A-Za-z]|\s[a-z]{3})|[\s$]{0,5}=\s{0,5}\Z|:[0-9]")
"""Pattern of text after a number that makes it a date (the 18th, not the 18th show) or continues its equation."""

_FORMULA = re.compile(
    r"(?<![0-9.])((?:[0-9.,A-Za-z]{1,20}\s?[-+*/×÷]\s?\$?){1,9}[0-9.,]{0,20}[0-9]|0?\.[0-9]{1,9})\sor\s\$?\Z"
)
"""Pattern of a formula and "or" before its value, as in "$30 + $160 or $190", "0.6 or 60%" and "5A/5 or 20"."""


def with_context(text: str, start: int, end: int, answer: str, boxed: bool = False) -> str:
    """Return ``answer``, located at ``text[start:end]``, with surrounding signs and words that change its value."""
    rest = text[end : end + AFTER_CHARS]
    before = (_BEFORE_BOX if boxed else _BEFORE_NUMBER).search(text[max(0, start - BEFORE_CHARS) : start])
    after = (_AFTER_BOX if boxed else _AFTER_NUMBER).match(rest)
    if (before is None and after is None) or (boxed and _FILLED_IN.match(rest)):
        return answer
    prefix = before.group() if before else ""
    suffix = after.group() if after else ""
    stands_alone = not boxed or (answer.replace(".", "").isdigit() and not prefix[-1:].isalnum())
    whole = answer if stands_alone else f"({answer})"
    sign = "-" if _ONLY_MINUS.fullmatch(prefix) else prefix
    return f"{sign}{whole}{suffix}".strip()


def is_stated(text: str, start: int, end: int, choice: bool = False) -> bool:
    """Return whether the answer at ``text[start:end]`` is stated rather than asked, assumed, guessed or retracted.

    If ``choice`` is set, the answer is a letter, and statements that leave several options open are also rejected.
    """
    before = text[max(0, start - SENTENCE_CHARS) : start]
    before = before[max((match.end() for match in _SENTENCE_END.finditer(before)), default=0) :]
    rest = text[end : end + SENTENCE_CHARS]
    stop = _SENTENCE_END.search(rest)
    after = rest[: stop.start()] if stop else rest
    if start == end:  # The answer follows "the answer is".
        before += _WORDS_ONLY.match(after).group()  # type: ignore[union-attr]
    return not (
        (stop and stop.group() in "?？" and (choice or start == end or _ASKS.match(before)))
        or _UNSURE.search(before)
        or (choice and _CHOICE.search(before))
        or _TAKEN_BACK.search(after)
        or _GIVEN_UP.search(before + rest)
    )


def is_one_number(text: str, start: int, end: int) -> bool:
    """Return whether the number at ``text[start:end]`` is an amount.

    The function returns False for numbers in a list, ordinals, page numbers, and parts of an equation.
    """
    before = text[max(0, start - BEFORE_CHARS) : start]
    return not (_LISTED_BEFORE.search(before) or _NUMBER_OF.search(before) or _NO_NUMBER.match(text[end : end + 9]))


def formula_before(text: str, start: int, end: int) -> str | None:
    """Return the formula before the number at ``text[start:end]`` that should equal the number, or None if absent."""
    match = _FORMULA.search(text[max(0, start - BEFORE_CHARS) : start])
    formula = match[1].replace("$", "") if match else None
    return f"100*{formula}" if formula and text[end : end + 1] == "%" else formula
