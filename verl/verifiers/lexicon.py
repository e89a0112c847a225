"""Lexicon of answers: units, words that multiply or modify a number, number bases, and symbols such as percent.

math-verify ignores all of these, so it would consider 5 m, 5 km, 5 million and "not 5" equal.
"""

import re
import tomllib
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

TEXT = (
    r"\\(?:text(?:bf|rm|it|normal|sf|tt)?|mbox|hbox|math(?:rm|bf|it|sf|normal)|operatorname|boldsymbol|bm|underline|emph)"
    r"\*?\s{0,3}"
)
"""Pattern of a LaTeX command with a text argument, up to the opening brace."""

WORDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Contents of ``lexicon.toml``."""

# Units

UNITS = {name: unit for unit, names in WORDS["units"].items() for name in [unit, *names.split()]}
"""Maps each name of a unit to its canonical name."""

SHORT_UNITS = {"s", "m", "g", "l", "h", "t"}
"""One-letter units whose names usually denote variables."""

_OTHER_SHORT_UNITS = {"am", "pm", "st", "th", "yr", "gm", "cc", "sq", "rs"}
"""Additional two-letter names that math-verify drops as units and that are unlikely to be products of variables."""

_SYMBOLS = {
    prefix.strip("-") + symbol
    for symbols, prefixes in WORDS["symbols"].items()
    for symbol in symbols.split()
    for prefix in prefixes.split()
}
_POWERS: dict[str, int] = WORDS["powers"]
_PREFIXES = {"k": "1000", "m": "1/1000", "M": "1000000", "µ": "1/1000000", "n": "1/1000000000", "G": "1000000000"}
_PREFIXED = set(" ".join(WORDS["symbols"]).split())
_SIZES: dict[str, str] = WORDS["sizes"]
"""Maps each unit to its size in another unit."""


def is_unit(letters: str, short: bool) -> bool:
    """Return whether one or two letters after a number are a unit, or ``short`` if they are in ``SHORT_UNITS``."""
    if letters in SHORT_UNITS:
        return short
    return letters in UNITS or letters.lower() in _OTHER_SHORT_UNITS


# Words that multiply the number before them

FACTORS = {
    word: Fraction(value)
    for table in ("factors", "plural_factors")
    for value, words in WORDS[table].items()
    for word in words.split()
}
_PLURAL = "|".join(WORDS["plural_factors"].values())
_SINGULAR = "|".join(word for words in WORDS["factors"].values() for word in words.split() if word.isascii())
_FACTOR = rf"(?:(?P<factor>(?i:(?:{_PLURAL})(?=s)|{_SINGULAR}))(?i:s?)(?![A-Za-z])|(?P<sign>[万亿]))"
_LEADING_FACTOR = re.compile(rf"{_FACTOR}\s*")
_TEXT_K = re.compile(r"(?<=[0-9}])\s{0,9}\\text\s{0,3}\{\s{0,9}k\s{0,9}\}")
_TEXT_WITH_FACTOR = re.compile(
    rf"(?<=\S)\s{{0,9}}{TEXT}\{{[\s~-]{{0,9}}{_FACTOR}[\s~]{{0,9}}(?P<rest>[^{{}}]{{0,99}})\}}"
)
_BARE_FACTOR = re.compile(rf"(?<=[^\s{{])[\s~]{{0,9}}(?<![A-Za-z]){_FACTOR}(?P<rest>)")


def _factor_of(match: re.Match[str]) -> Fraction:
    return FACTORS[(match["factor"] or match["sign"]).lower()]


def with_factors(latex: str) -> str:
    """Convert words that multiply a number to factors: ``5\\text{ million}`` becomes ``5\\times 1000000``."""

    def times(match: re.Match[str]) -> str:
        value = _factor_of(match)
        factor = str(value) if value > 1 else f"{value.denominator}^{{-1}}"
        text = rf"\text{{ {match['rest']}}}" if match["rest"] else ""
        return rf" \times {factor} {text}"

    latex = _TEXT_K.sub(r" \\times 1000 ", latex)
    for _ in range(2):  # "hundred million"
        latex = _BARE_FACTOR.sub(times, _TEXT_WITH_FACTOR.sub(times, latex))
    return latex


# Words that modify a number


def _modifiers(*kinds: str) -> re.Pattern[str]:
    words = "|".join(word for kind in kinds for word in WORDS["modifiers"][kind])
    return re.compile(rf"(?<![A-Za-z\\])(?:{words})(?![A-Za-z])", re.IGNORECASE)


_CHANGES = _modifiers("anywhere", "bound")
_CHANGES_NEXT = _modifiers("after")
_DIGIT = re.compile("[0-9]")


def modifiers_in(text: str) -> list[str]:
    """Return the words in ``text`` that change the value of a number, such as "not" and "twice"."""
    last = max((match.end() for match in _DIGIT.finditer(text)), default=0)
    return [word.lower() for word in _CHANGES.findall(text) + _CHANGES_NEXT.findall(text, 0, last)]


# Numbers with units

MAX_NUMBER_CHARS = 64
"""Maximum length of a plain number. Longer digit strings are compared as text."""

_PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|[+-]?\.[0-9]+")


def plain_number(text: str) -> Decimal | None:
    """Return the value of a plain decimal number, which may contain thousands separators, or None for other text."""
    if len(text) > MAX_NUMBER_CHARS or not _PLAIN_NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))


class Quantity(NamedTuple):
    """A plain number and its unit."""

    value: Decimal
    unit: str
    """Canonical unit from ``UNITS`` with its power, ``%``, or any other words. Empty if there is no unit."""
    known: bool
    """Whether the unit is ``%`` or in ``UNITS``. Quantities with different known units are not equal."""


_QUANTITY = re.compile(
    r"(?:[A-Za-z]\s*=\s*)?([¥€£]?\s*[+-]?[¥€£]?[0-9.,]+)\s*"
    r"(%|\(([^()0-9]*)\)|([A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff .'-]*?)"
    r"(\s{0,2}\^?\s{0,2}\{?\s{0,2}[23]\s{0,2}\}?)?|)"
)
_POWER_WORD = re.compile(rf"({'|'.join(_POWERS)})\.?\s*")
_OPERATION = re.compile(r"(?:squared|cubed|factorial|times [a-z]|doubled|tripled|halved|divided)\b")


def read_quantity(text: str, short: bool = False) -> Quantity | None:
    """Parse normalised ``text`` as a number and unit: ``18 dollars``, ``9 (apples)``, ``20 cm^2``, ``3元``, ``25%``.

    Return None if there is no plain number, or if a variable may follow it (as in ``3x``, ``2 ab`` and, unless
    ``short`` is set, ``5 m``).
    """
    match = _QUANTITY.fullmatch(text) if len(text) <= 120 else None
    value = plain_number(re.sub(r"[¥€£\s]", "", match[1]).rstrip(",")) if match else None
    if match is None or value is None:
        return None
    if match[2] == "%":
        return Quantity(value, "%", True)
    unit = (match[3] or match[4] or "").strip().rstrip(".")
    if unit in {"M", "S", "G", "H", "T"} or _OPERATION.match(unit.lower()):
        return None  # 5M is 5 million.
    phrase = unit.lower()
    while factor := _LEADING_FACTOR.match(phrase):
        if (multiple := _factor_of(factor)) < 1:
            return None
        value, phrase = value * int(multiple), phrase[factor.end() :]
    if unit and not phrase:
        return Quantity(value, "", False)
    prefix = _POWER_WORD.match(phrase)
    name = phrase[prefix.end() :] if prefix else phrase
    power = str(_POWERS[prefix[1]]) if prefix else re.sub(r"\D", "", match[5] or "")
    if name in UNITS and (short or name not in SHORT_UNITS or power or match[3] is not None):
        return Quantity(value, UNITS[name] + power, True)
    is_word = not match[4] or not match[4][0].isascii() or len(match[4].split()[0]) >= 4
    return Quantity(value, phrase, False) if is_word and not power else None


# Units, angles and bases in LaTeX

_LONG_UNITS = "|".join(name for name in UNITS if len(name) > 1 and name.isascii())
_BARE_UNIT = re.compile(rf"(?<=[0-9}}\s])(?<![A-Za-z\\])({_LONG_UNITS})(?![A-Za-z{{])")
_MICRO = re.compile(rf"\\mu\s{{0,3}}(?:{TEXT}\{{)?|μ")
_SPACING = re.compile(r"\\[,;:! ]|\\cdot(?![A-Za-z])")
_UNIT_TEXT = re.compile(rf"{TEXT}\{{([^{{}}]{{0,99}})\}}\s{{0,3}}(?:\^\s{{0,3}}\{{?\s{{0,3}}(-?[1-9])\s{{0,3}}\}}?)?")
_UNIT_TOKEN = re.compile(r"(?P<word>[A-Za-zµΩÅ]+)\.?(?:\^?\{?(?P<power>-?[1-9])\}?)?|(?P<slash>/)|(?P<other>[^\s~.·])")
_PARTS = re.compile(r"[,;+]|\\text\s{0,3}\{\s{0,3}(?:and|or)\s{0,3}\}")
_ARC = re.compile(r"(?<=[0-9}])\s{0,3}\^?\{?((?:'|′|\\prime\s?){1,2})")
_WORD_OR_UNIT = re.compile(
    r"\\[A-Za-z]{1,20}|(?P<open>\()?\s?(?P<unit>(?:(?:square|cubic|sq)\.?\s)?[A-Za-zµ\u4e00-\u9fff]{1,12}"
    r"(?:\s?(?:/|per)\s?[A-Za-z]{1,12}(?:\^?[23])?)?)\s?(?(open)\))(?:(?:\s{0,2}\^\s?\{?|(?<=[A-Za-z]))(?P<power>[23])\}?(?![0-9]))?"
    r"(?:\s{0,3}and\s|,\s)?"
)
_MINUTES, _SECONDS = (rf"(?:\s?\^?\{{?(?:['’′]|\\prime(?![A-Za-z])\s?){{{n}}}\}}?" for n in (1, 2))
_DEGREES_WITH_MINUTES = re.compile(
    r"([0-9]{1,9})\s?(?:°|\^\s?\{?\s?\\circ\s?\}?)\s?([0-9]{1,2}(?:\.[0-9]{1,9})?)"
    rf"{_MINUTES})(?:\s?([0-9]{{1,2}}(?:\.[0-9]{{1,9}})?)(?:{_SECONDS})|\s?[\"”″]))?"
)
_PRIME_SIGN = re.compile(r"'|′|\\prime")
_MARKS = re.compile(
    r"(?P<degrees>°|\\circ(?![A-Za-z])|\\degree|(?<![A-Za-z])degrees?(?![A-Za-z]))|(?P<percent>%|percent)"
    r"|(?<![A-Za-z])(?:(?P<radians>rad(?:ian)?s?(?![A-Za-z]|\s?/|\sper\s))|(?P<cents>cents?)|(?P<dollars>dollars?|USD))(?![A-Za-z])"
    r"|(?P<dollar_sign>\\\$)|(?P<cent_sign>¢)"
)

_NUMERALS = WORDS["numerals"]["small"].split()[2:17]
_DROPPED_IN_BASE = re.compile(rf"{TEXT}|\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|[\s{{}}()~$,]")
_BASE = re.compile(
    rf"((?:[0-9]|(?<![A-Za-z\\])[A-F](?=[0-9A-F]))[0-9A-F]{{0,40}})(?:_(?:base)?|base-?)([0-9]{{1,2}}|{'|'.join(_NUMERALS)})(?![0-9A-Za-z])",
    re.I,
)
MAX_NUMERAL = 200
"""Maximum length of text that is parsed as a number with a base."""

_SUBSCRIPT = re.compile("[₀-₉]+")
_SUBSCRIPT_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")


def units_in(latex: str) -> set[tuple[tuple[str, int], ...]]:
    """Return the set of units in a list, after numbers or in ``\\text{}``. The set is empty if any unit is unknown."""
    units = set()
    latex = _SPACING.sub(" ", _MICRO.sub(lambda match: r"\text{µ" if match[0].endswith("{") else "µ", latex))
    latex = _BARE_UNIT.sub(r"\\text{\1}", latex) if "{" not in latex else latex
    for part in _PARTS.split(latex):
        powers: Counter[str] = Counter()
        sign = 1
        for content, power in _UNIT_TEXT.findall(part):
            factor = 1
            for match in _UNIT_TOKEN.finditer(content):
                word = match["word"]
                if match["other"]:
                    return set()
                if match["slash"] or word == "per":
                    sign = -1
                elif word in _POWERS:
                    factor = _POWERS[word]
                elif word.lower() not in FACTORS:
                    name = word if word in _SYMBOLS else UNITS.get(word.lower())
                    if name is None:
                        return set()
                    is_last = match.end() == len(content.rstrip())
                    powers[name] += sign * int(match["power"] or (is_last and power) or factor)
                    factor = 1
        if powers:
            units.add(tuple(sorted(powers.items())))
    return units


Unit = tuple[tuple[str, int], ...]
"""Pairs of canonical name and power, one per factor of a unit, as in ``(("h", -1), ("km", 1))``."""


def size_of(unit: Unit) -> tuple[Fraction, dict[str, int]]:
    """Return a unit's size in base units, and the powers of the base units."""
    size, base = Fraction(1), Counter[str]()
    for name, power in unit:
        prefixed = f"{_PREFIXES[name[0]]} {name[1:]}" if name[0] in _PREFIXES and name[1:] in _PREFIXED else ""
        factor, _, definition = _SIZES.get(name, prefixed).partition(" ")
        inner = [size_of(part) for part in units_in(rf"\text{{{definition}}}")] or [(Fraction(1), {name: 1})]
        size *= (Fraction(factor or 1) * inner[0][0]) ** power
        base.update({part: power * count for part, count in inner[0][1].items()})
    return size, {name: power for name, power in base.items() if power}


def in_base_units(text: str) -> tuple[str, dict[str, int], list[Unit]] | None:
    """Convert normalised ``text`` to an expression in base units, or return None if it has no units.

    ``2 h 30 min`` becomes ``(2) \\times 3600 + (30) \\times 60``. Also return the base units' powers and all units.
    """
    terms: list[str] = []
    units: list[Unit] = []
    last, base, end = Fraction(0), {"": 0}, 0
    for match in filter(lambda match: match["unit"], _WORD_OR_UNIT.finditer(text)):
        unit = units_in(rf"\text{{{match['unit']}}}^{match['power'] or 1}")
        value = text[end : match.start()].strip()
        size, kind = size_of(*unit) if len(unit) == 1 and value else (Fraction(0), {})
        # 2 m, 3 m is a list.
        if not size or (terms and (size >= last or kind != base)):
            return None
        terms.append(rf"({value}) \times \frac{{{size.numerator}}}{{{size.denominator}}}")
        last, base, end, units = size, kind, match.end(), [*units, *unit]
    return (" + ".join(terms), base, units) if terms and not text[end:].strip() else None


def with_degrees(latex: str) -> str:
    """Replace degrees, minutes and seconds of arc with a fraction of degrees."""

    def degrees(match: re.Match[str]) -> str:
        value = sum(Fraction(part or 0) / 60**power for power, part in enumerate(match.groups()))
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}^\circ"

    return _DEGREES_WITH_MINUTES.sub(degrees, latex)


def marks_in(latex: str) -> set[str]:
    """Return the symbols in ``latex`` for degrees, minutes and seconds of arc, radians, percent, dollars and cents."""
    marks = {(match.lastgroup or "").replace("_sign", "s") for match in _MARKS.finditer(latex)}
    return marks | {["minutes", "seconds"][len(_PRIME_SIGN.findall(primes)) - 1] for primes in _ARC.findall(latex)}


def numerals_in(latex: str) -> list[tuple[str, int]]:
    """Return the digits and base of numbers such as ``1010_2``, ``1010_{\\text{two}}`` and ``1010\\text{ base }2``."""
    latex = _SUBSCRIPT.sub(lambda match: f"_{match[0].translate(_SUBSCRIPT_DIGITS)}", latex)
    pairs = [(digits, name.lower()) for digits, name in _BASE.findall(_DROPPED_IN_BASE.sub("", latex))]
    bases = [(digits, int(name) if name.isdigit() else _NUMERALS.index(name) + 2) for digits, name in pairs]
    # 3E_2 is a product, but 3E_{16} is a number.
    return [(digits, base) for digits, base in bases if base > 1 and (digits.isdigit() or base > 10)]


def numeral_of(latex: str) -> tuple[str, int] | None:
    """Return the digits and base of ``latex`` if it is a number with a base, or None otherwise."""
    text = _DROPPED_IN_BASE.sub("", latex.lstrip("$ ")) if len(latex) <= MAX_NUMERAL else ""
    sign = "-" * text.startswith("-")
    numerals = numerals_in(latex) if _BASE.fullmatch(text.removeprefix(sign)) else []
    return (sign + numerals[0][0], numerals[0][1]) if numerals else None
