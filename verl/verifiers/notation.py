"""Normalises the notation of answers, and splits answers into words and lists.

Every function runs in linear time.
"""

import re
import unicodedata

from verl.verifiers.lexicon import SHORT_UNITS, TEXT, WORDS


def _fraction(sign: str) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", sign).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


_TRANSLATION = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width signs
    | {chr(0x2460 + i): f"({i + 1})" for i in range(20)}  # circled numbers
    | {sign: f"^{digit}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {0x1D7CE + i: str(i % 10) for i in range(50)}  # bold and other digits
    | {sign: _fraction(sign) for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
    | WORDS["signs"]
)

WRAPPER = re.compile(TEXT + r"\{([^{}]*)\}")
_CIRCLED = re.compile(r"\\textcircled\s*\{\s*(\w)\s*\}")
_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in WORDS["notation"]["rewrites"]]
_LEADING = re.compile(r"\A[:\s]*+(?:,(?!\d)[:,\s]*+)?")
"""Pattern of leading punctuation in an answer. Commas before digits are excluded, since they may be decimal commas."""

_REPEATING = re.compile(r"(?<![\d.])(\d{0,15})\.(\d{0,15})\\(?:overline|bar|dot)\s?\{(\d{1,15})\}")
"""Pattern of a repeating decimal, such as 0.1\\overline{6}."""

_SIDE = r"(?:[^<>=\\]|\\(?!ge(?![A-Za-z]))){1,99}"
_DESCENDING = re.compile(rf"{_SIDE}(?:(?:>|\\ge(?![A-Za-z])){_SIDE}){{2,9}}")
_BETWEEN = re.compile(
    r"([a-z]) ?(>|\\ge(?![A-Za-z]))([^<>=,a-z]{1,40})(?:and|,) ?\1 ?(<|\\le(?![A-Za-z]))([^<>=,]{1,40})"
)
_RAISED = re.compile("([⁰¹²³⁴-⁹]{1,9})⁄([₀-₉]{1,9})")
"""Pattern of a fraction written with superscript and subscript digits."""

_SET_OF_REALS = re.compile(
    r"(?:\\mathbb\s*\{R\}|R|all real(?: number)?s?|\(-\\infty\s*,\s*\\infty\s*\)|全体实数|实数集R?)\.?", re.I
)
_NOTHING = re.compile(
    r"(?:no (?:real )?solutions?\s*+(?::\s*+)?(?:\\emptyset)?|(?:the )?(?:empty|null) set"
    r"|\\emptyset|\\\{\s*\\\}|none|无解|空集)",
    re.IGNORECASE,
)
_BUILDER = re.compile(r"\\?\{\s*+([A-Za-z])\s*+(?:\\in\s*+\S+?\s*+)?[|:]\s*+([^|]*?)\\?\}")


def unify(text: str) -> str:
    """Normalise the notation of ``text``: use LaTeX instead of Unicode symbols, and remove wrappers."""
    text = _RAISED.sub(lambda match: _fraction(match[0]), text)
    text = _CIRCLED.sub(r"(\1)", text.translate(_TRANSLATION))
    for _ in range(2):
        text = WRAPPER.sub(_unwrapped, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_as_fraction, text)
    text = text.strip().strip("*").rstrip(".,;: ")
    text = _LEADING.sub("", text, 1)
    if _SET_OF_REALS.fullmatch(text):
        return r"\mathbb{R}"
    if _NOTHING.fullmatch(text):
        return r"\emptyset"
    builder = _BUILDER.fullmatch(text)
    if builder:
        return builder.group(2)
    if between := _BETWEEN.fullmatch(text):
        name, above, low, below, high = between.groups()
        return f"{low}{above.replace('>', '<').replace('g', 'l')} {name}{below}{high}"
    if _DESCENDING.fullmatch(text):
        sides = re.split(r"(>|\\ge(?![A-Za-z]))", text)[::-1]
        return "".join({">": "<", r"\ge": r"\le "}.get(side, side) for side in sides)
    if text.startswith("{") and text.endswith("}") and "," in text:
        return rf"\{text[:-1]}\}}"
    return text


def _unwrapped(match: re.Match[str]) -> str:
    content, before = match.group(1).strip(" ~\t\n"), match.string[max(0, match.start() - 9) : match.start()]
    # The brackets preserve the difference between the length 5\\text{ m} and the product 5m.
    if content.lower() in SHORT_UNITS and before.rstrip(" ~\\,$")[-1:].isdigit():
        return f" ({content}) "
    return f" {content} "


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    digits = int(f"0{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}")
    return rf"\frac{{{digits}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def squeeze(text: str) -> str:
    """Remove redundant braces and spaces from normalised text before a textual comparison.

    Spaces between numbers are kept, except as thousands separators, because ``1 1/2`` is not ``11/2``.
    """
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"(?<=\d) (?=\d{3}(?![\d/.]))|(?<!\d) | (?!\d)|\\(?=[{}])", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


_WORDS = re.compile(r"[A-Za-z\u4e00-\u9fff0-9 .,:'’!?()&/-]+")
_JOINERS = re.compile(r"\b(?:and|or)\b|[和或与及且]")
_WORD = re.compile(r"[A-Za-z]{3,}|[\u4e00-\u9fff]|\b[ap]\.?m\b", re.IGNORECASE)
_PUNCTUATION = re.compile(
    # Keep full stops, commas and slashes between digits, and a minus before a digit or at the start.
    r"(?<=\d),(?=\d{3}(?!\d))|(?<!\d)[.,/]|[.,/](?!\d)|(?<=[a-z\u4e00-\u9fff])-|(?<!^)-(?!\d)"
    r"|[^0-9a-z:.,/\u4e00-\u9fff-]+"
)


def words_in(text: str) -> str | None:
    """Return normalised ``text`` in lower case without punctuation, or None if it does not consist of words."""
    if not _WORDS.fullmatch(text) or not _WORD.search(_JOINERS.sub("", text)):
        return None
    lowered = re.sub(r"(?<=\d)\s*/\s*(?=\d)", "/", text.lower())
    return _PUNCTUATION.sub("", re.sub(r"(?<=\d)\s+(?=\d)", ",", lowered))


def same_words(a: str, b: str) -> bool:
    """Return whether two normalised texts consist of the same words, ignoring case."""
    return words_in(a) is not None and words_in(a) == words_in(b)


_SPLIT = re.compile(r"(?P<open>\\?[({\[])|(?P<close>\\?[)}\]])|(?P<mark>[,;]|\b(?:and|or)\b|[和或与及且])")
"""Pattern of the brackets and separators of a list, including the words in ``_JOINERS``."""


def split_answers(text: str, thousands: bool = True) -> tuple[list[str], bool]:
    """Split normalised ``text`` into answers. Also return whether their order matters because of a semicolon.

    If ``text`` is a set, its braces are removed. If ``thousands`` is set, a comma between a digit and a group of three
    digits is not a separator.
    """
    inner = text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text
    parts, depth, start, ordered = [], 0, 0, False
    for match in _SPLIT.finditer(inner):
        if match.lastgroup == "open":
            depth += 1
        elif match.lastgroup == "close":
            depth -= 1
        elif depth == 0 and not (thousands and match.group() == "," and _is_thousands(inner, match.start())):
            ordered = ordered or match.group() == ";"
            parts.append(inner[start : match.start()])
            start = match.end()
    parts.append(inner[start:])
    return [part.strip() for part in parts if part.strip()], ordered


def _is_thousands(text: str, comma: int) -> bool:
    before, after = text[max(0, comma - 3) : comma], text[comma + 1 : comma + 5]
    return before[-1:].isdigit() and bool(re.fullmatch(r"\d{3}(?!\d).?", after))
