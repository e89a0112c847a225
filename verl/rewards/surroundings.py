"""What stands directly before and after an answer and makes another one of it: the minus of ``−5``, the root of ``√5``,
the words of "not 5" and "5 million", the sign of ``-\\boxed{5}``."""

import re

BEFORE_CHARS, AFTER_CHARS = 48, 32
"""Characters before and after an answer that are looked at."""

_GAP = r"(?:\\?[$£€]\s?|\*\*|\\text\s?\{|[\u200b-\u200d\u2060\ufeff])*"
_WORDS = (
    r"(?<![A-Za-z])(?i:not|never|nor|negative|minus|twice|thrice|double|triple"
    r"|(?:half|third|quarter|square|cube|root) of"
    r"|(?:is|are|was|were|ca|could|would)n['’]?t(?:\sbe)?)(?:\s(?:equal\sto|an?|the))?\s{1,3}"
)
_SIGNS = (
    r"[−√∛∜_≠≤≥±¬]\s{0,3}|(?<=\S)\s[<>]\s{0,3}|=\s{0,2}-\s{1,2}|(?:(?<=[\s=$({])|^)[‐‑‒–—﹣－⁻˗➖]"
    r"|\\(?:n?eq?|pm|mp|not|neg|sqrt|[dtc]?frac|l[nog]{1,2})\s?(?:\[[0-9]\])?\s?\{?|[\^}_]\{"
)
_TERM = r"(?:[0-9.,]{0,20}[0-9)}\]]|(?<![A-Za-z\\'])[A-Za-z])(?:[*/^×·÷+]|\s[*/×·÷+]\s|\s?\\(?:times|cdot|div)\s?)"
_LETTER = r"(?<![A-Za-z\\])[A-Za-z]"
_MINUS = r"(?:(?<=[\s=$({*])|^)-"

_BEFORE_NUMBER = re.compile(
    rf"(?:{_WORDS}|{_SIGNS}|{_TERM}|[0-9.,]{{0,20}}[0-9)]-|{_LETTER}(?!\$)|{_MINUS}(?=\\?[$£€*])){_GAP}\Z"
)
_BEFORE_BOX = re.compile(rf"(?:{_WORDS}|{_SIGNS}|{_MINUS}){_GAP}\Z")
_FILLED_IN = re.compile(r"[\s$]{0,5}(?:\\[,;: ]){0,3}(?:[+*×=<>-]|\\(?:times|cdot|leq?|geq?)(?![A-Za-z]))")
"""After a box inside a formula: 2 + \boxed{3} = 5."""

_AFTER = re.compile(
    r"(?:\*\*|\$)?(?:\s|~|\\[,;: ]){0,3}(?:\\text\s?\{\s?)?"
    r"(?i:(?:million|billion|trillion|thousand|hundred|dozen|lakh|crore"
    r"|squared|cubed|factorial|(?:is|was)\s(?:wrong|not|incorrect|false|impossible))(?![A-Za-z])|万|亿)"
    r"|(?:[kKMBbnxyz](?![A-Za-z0-9])|bn|mn|[π√²³½¼¾‰]|\^\s?\{?\s?[0-9A-Za-z]|\\(?:pi|sqrt|cdot|times)(?![A-Za-z]))"
    r"|\s?[-+*×·/^]\s?[nxyz](?![A-Za-z])"
)
_ONLY_MINUS = re.compile(rf"(?:=\s{{0,2}})?[-−‐‑‒–—﹣－⁻˗➖]\s{{0,3}}{_GAP}")


def in_place(text: str, start: int, end: int, answer: str, boxed: bool = False) -> str:
    """``answer``, which stands from ``start`` to ``end`` in ``text``, with what changes its meaning there."""
    rest = text[end : end + AFTER_CHARS]
    before = (_BEFORE_BOX if boxed else _BEFORE_NUMBER).search(text[max(0, start - BEFORE_CHARS) : start])
    after = _AFTER.match(rest)
    if (before is None and after is None) or (boxed and _FILLED_IN.match(rest)):
        return answer
    prefix = before.group() if before else ""
    whole = f"({answer})" if boxed and not (answer.isdigit() and not prefix[-1:].isdigit()) else answer
    sign = "-" if _ONLY_MINUS.fullmatch(prefix) else prefix
    return f"{sign}{whole}{after.group() if after else ''}".strip()
