"""The lexicon of answers: units, words that multiply a number or change it, bases, and what else algebra would drop.

math-verify takes all of these for presentation, so that 5 m, 5 km, 5 million and "not 5" are the same to it.
"""

import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from verl.rewards.answers import plain_number

TEXT = r"\\(?:text(?:bf|rm|it|normal|sf)?|mbox|hbox|math(?:rm|bf|it|sf|normal)|operatorname|boldsymbol|bm)\*?\s{0,3}"
"""A LaTeX command that sets its argument as text, up to the opening brace."""

# Units

UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimeters millimetre millimetres 毫米",
        "cm centimeter centimeters centimetre centimetres 厘米",
        "dm 分米",
        "m meter meters metre metres 米",
        "km kilometer kilometers kilometre kilometres 千米 公里",
        "in inch inches 英寸",
        "ft foot feet 英尺",
        "yd yard yards",
        "mi mile miles 英里",
        "mg milligram milligrams 毫克",
        "g gram grams 克",
        "kg kilogram kilograms 千克 公斤",
        "t ton tons tonne tonnes 吨",
        "lb lbs pound pounds",
        "oz ounce ounces",
        "ml milliliter milliliters millilitre millilitres 毫升",
        "l liter liters litre litres 升",
        "s sec secs second seconds 秒 秒钟",
        "min mins minute minutes 分钟",
        "h hr hrs hour hours 小时 时",
        "day days 天",
        "week weeks 周",
        "month months 月 个月",
        "year years 年",
        "cent cents penny pennies 分",
        "dollar dollars usd 美元",
        "yuan rmb 元 块 块钱 人民币",
    )
    for name in names.split()
}
"""Name of a unit -> its canonical name."""

SHORT_UNITS = {"s", "m", "g", "l", "h", "t"}
"""Names that are variables more often than units."""

_OTHER_SHORT_UNITS = {"am", "pm", "st", "th", "yr", "gm", "cc", "sq", "rs"}
"""More two-letter names that math-verify drops as units and that are not products of variables."""

_SYMBOLS = {
    prefix + symbol
    for symbols, prefixes in (
        ("N J W V A K F T H C", ("", "k", "M", "m", "µ", "n")),
        ("m s g", ("k", "M", "m", "µ", "n")),
        ("Hz Pa mol eV cal bar", ("", "k", "M", "m", "G")),
        ("Wb Ω rad sr ppm mph kph rpm dB Å", ("",)),
    )
    for symbol in symbols.split()
    for prefix in prefixes
}
"""Symbols of units in which capitals count."""

_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "立方": 3}
"""Word before a unit -> the unit's power."""


def is_unit(letters: str, short: bool) -> bool:
    """Whether one or two letters after a number are a unit; ``short`` decides for those of ``SHORT_UNITS``."""
    if letters in SHORT_UNITS:
        return short
    return letters in UNITS or letters.lower() in _OTHER_SHORT_UNITS


# Words that multiply the number before them

_FACTORS: dict[str, Fraction] = {
    word: Fraction(value)
    for value, words in (
        *(("12", "dozen"), ("100", "hundred"), ("1000", "thousand"), ("1e4", "万"), ("1e5", "lakh")),
        *(("1e6", "million mil mln mn"), ("1e7", "crore"), ("1e8", "亿"), ("1e9", "billion bn"), ("1e12", "trillion")),
        # These count in the plural alone: five tens, five thirds.
        *(("10", "ten"), ("1/2", "halve"), ("1/3", "third"), ("1/5", "fifth"), ("1/6", "sixth"), ("1/7", "seventh")),
        *(("1/8", "eighth"), ("1/9", "ninth"), ("1/10", "tenth"), ("1/100", "hundredth"), ("1/1000", "thousandth")),
        ("1/1000000", "millionth"),
    )
    for word in words.split()
}
_PLURAL = "|".join(word for word, value in _FACTORS.items() if value < 1 or word == "ten")
_SINGULAR = "|".join(word for word, value in _FACTORS.items() if value > 10 and word.isascii())
_FACTOR = rf"(?:(?P<factor>(?i:(?:{_PLURAL})(?=s)|{_SINGULAR}))(?i:s?)(?![A-Za-z])|(?P<sign>[万亿]))"
_LEADING_FACTOR = re.compile(rf"{_FACTOR}\s*")
_TEXT_K = re.compile(r"(?<=[0-9}])\s{0,9}\\text\s{0,3}\{\s{0,9}k\s{0,9}\}")
_TEXT_WITH_FACTOR = re.compile(
    rf"(?<=\S)\s{{0,9}}{TEXT}\{{[\s~-]{{0,9}}{_FACTOR}[\s~]{{0,9}}(?P<rest>[^{{}}]{{0,99}})\}}"
)
_BARE_FACTOR = re.compile(rf"(?<=[^\s{{])[\s~]{{0,9}}(?<![A-Za-z]){_FACTOR}(?P<rest>)")


def _factor_of(found: re.Match[str]) -> Fraction:
    return _FACTORS[(found["factor"] or found["sign"]).lower()]


def with_factors(latex: str) -> str:
    """LaTeX with the words that multiply a number as factors: ``5\\text{ million}`` is ``5\\times 1000000``."""

    def times(found: re.Match[str]) -> str:
        value = _factor_of(found)
        factor = str(value) if value > 1 else f"{value.denominator}^{{-1}}"
        text = rf"\text{{ {found['rest']}}}" if found["rest"] else ""
        return rf" \times {factor} {text}"

    latex = _TEXT_K.sub(r" \\times 1000 ", latex)
    for _ in range(2):  # "hundred million"
        latex = _BARE_FACTOR.sub(times, _TEXT_WITH_FACTOR.sub(times, latex))
    return latex


# Words that make another number of the one beside them

_CHANGES = re.compile(
    r"(?<![A-Za-z\\])(?:not|(?:is|are|was|do|does|did|ca|wo|ai)n['’]?t|cannot"
    r"|squared|cubed|factorial|minus|modulo|mod|root"
    r"|and (?:an?|one|two|three) (?:half|third|quarter)s?|or (?:more|less|fewer)"
    r"|(?:to the|th) power|to the [a-z]{3,9}th"
    r"|doubled|tripled|quadrupled|halved|quartered|reversed|divided|(?:below|under) zero|too (?:small|large|low|high)"
    r"|(?:point|comma|times) (?:zero|one|two|three|four|five|six|seven|eight|nine|ten)|opposite direction"
    r"|false|wrong|incorrect|impossible)(?![A-Za-z])",
    re.IGNORECASE,
)
_CHANGES_NEXT = re.compile(
    r"(?<![A-Za-z\\])(?:no|never|non|neither|nor|without|except|negative|plus|twice|thrice|double|triple|half|third"
    r"|quarter|reciprocal|inverse|opposite|logarithm|log|ln|sqrt|sin|cos|tan|power|anything but|almost|nearly"
    r"|neg|exp|hardly|barely|up to|other than|excluding|quadruple|(?:square|cube) of"
    r"|(?:third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|percent)s? of"
    r"|at least|at most|(?:more|less|fewer|greater) than|(?:over|under|above|below|beyond)(?=[\s${}\\]{1,9}[0-9]))"
    r"(?![A-Za-z])",
    re.IGNORECASE,
)
"""Words that change the number after them; after it they may be harmless, as in 18 with no remainder."""

_DIGIT = re.compile("[0-9]")


def modifiers_in(text: str) -> list[str]:
    """The words that change the value of a number in ``text``, such as "not" and "twice"."""
    last = max((found.end() for found in _DIGIT.finditer(text)), default=0)
    return [word.lower() for word in _CHANGES.findall(text) + _CHANGES_NEXT.findall(text, 0, last)]


# Numbers with units


class Quantity(NamedTuple):
    """A plain number with its unit."""

    value: Decimal
    unit: str
    """The canonical name in ``UNITS`` and its power; ``%``; another word as it is; empty if there is none."""
    known: bool
    """Whether the unit is one of ``UNITS`` or ``%``; two known units that differ mean different answers."""


_QUANTITY = re.compile(
    r"(?:[A-Za-z]\s*=\s*)?([¥€£]?\s*[+-]?[¥€£]?[0-9.,]+)\s*"
    r"(%|\(([^()0-9]*)\)|([A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff .'-]*?)(\s*\^?\s*\{?\s*[23]\s*\}?)?|)"
)
_POWER_WORD = re.compile(rf"({'|'.join(_POWERS)})\.?\s*")
_OPERATION = re.compile(r"(?:squared|cubed|factorial|times [a-z]|doubled|tripled|halved|divided)\b")


def read_quantity(text: str, short: bool = False) -> Quantity | None:
    """The number and unit of unified ``text`` such as ``18 dollars``, ``9 (apples)``, ``20 cm^2``, ``3元``, ``25%``.

    None if there is no plain number, or if the text after it may be a variable (``3x``, ``2 ab``, and without ``short``
    also ``5 m``).
    """
    found = _QUANTITY.fullmatch(text) if len(text) <= 120 else None
    value = plain_number(re.sub(r"[¥€£\s]", "", found[1]).rstrip(",")) if found else None
    if found is None or value is None:
        return None
    if found[2] == "%":
        return Quantity(value, "%", True)
    unit = (found[3] or found[4] or "").strip().rstrip(".")
    if unit in {"M", "S", "G", "H", "T"} or _OPERATION.match(unit.lower()):
        return None  # 5M are millions
    phrase = unit.lower()
    while factor := _LEADING_FACTOR.match(phrase):
        if (multiple := _factor_of(factor)) < 1:
            return None
        value, phrase = value * int(multiple), phrase[factor.end() :]
    if unit and not phrase:
        return Quantity(value, "", False)
    prefix = _POWER_WORD.match(phrase)
    name = phrase[prefix.end() :] if prefix else phrase
    power = str(_POWERS[prefix[1]]) if prefix else re.sub(r"\D", "", found[5] or "")
    if name in UNITS and (short or name not in SHORT_UNITS or power or found[3] is not None):
        return Quantity(value, UNITS[name] + power, True)
    is_word = not found[4] or not found[4][0].isascii() or len(found[4].split()[0]) >= 4
    return Quantity(value, phrase, False) if is_word and not power else None


# Units, angles and bases in LaTeX

_LONG_UNITS = "|".join(name for name in UNITS if len(name) > 1 and name.isascii())
_BARE_UNIT = re.compile(rf"(?<=[0-9}}\s])(?<![A-Za-z\\])({_LONG_UNITS})(?![A-Za-z{{])")
_MICRO = re.compile(rf"\\mu\s{{0,3}}(?:{TEXT}\{{)?|μ")
_SPACING = re.compile(r"\\[,;:! ]|\\cdot(?![A-Za-z])")
_UNIT_TEXT = re.compile(rf"{TEXT}\{{([^{{}}]{{0,99}})\}}\s{{0,3}}(?:\^\s{{0,3}}\{{?\s{{0,3}}(-?[1-9])\s{{0,3}}\}}?)?")
_UNIT_TOKEN = re.compile(r"(?P<word>[A-Za-zµΩÅ]+)\.?(?:\^?\{?(?P<power>-?[1-9])\}?)?|(?P<slash>/)|(?P<other>[^\s~.·])")
_PARTS = re.compile(r"[,;+]|\\text\s{0,3}\{\s{0,3}(?:and|or)\s{0,3}\}")
_ARC = re.compile(r"(?<=[0-9}])\s{0,3}(?:(\^\s?\{?\s?\\circ|°)|\^?\{?((?:'|′|\\prime\s?){1,2}))")

_NUMERALS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_DROPPED_IN_BASE = re.compile(rf"{TEXT}|\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|[\s{{}}()~$,]")
_BASE = re.compile(
    rf"([0-9][0-9A-F]{{0,40}})(?:_(?:base)?|base-?)([0-9]{{1,2}}|{'|'.join(_NUMERALS)})(?![0-9A-Za-z])", re.I
)
_SUBSCRIPT = re.compile("[₀-₉]+")
_SUBSCRIPT_DIGITS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")


def units_in(latex: str) -> set[tuple[tuple[str, int], ...]]:
    """The units after numbers or in ``\\text{}``, one of each answer of a list; none if any word is unknown."""
    units = set()
    latex = _SPACING.sub(" ", _MICRO.sub(lambda found: r"\text{µ" if found[0].endswith("{") else "µ", latex))
    latex = _BARE_UNIT.sub(r"\\text{\1}", latex) if "{" not in latex else latex
    for part in _PARTS.split(latex):
        powers: Counter[str] = Counter()
        sign = 1
        for content, power in _UNIT_TEXT.findall(part):
            factor = 1
            for found in _UNIT_TOKEN.finditer(content):
                word = found["word"]
                if found["other"]:
                    return set()
                if found["slash"] or word == "per":
                    sign = -1
                elif word in _POWERS:
                    factor = _POWERS[word]
                elif word.lower() not in _FACTORS:
                    name = word if word in _SYMBOLS else UNITS.get(word.lower())
                    if name is None:
                        return set()
                    is_last = found.end() == len(content.rstrip())
                    powers[name] += sign * int(found["power"] or (is_last and power) or factor)
                    factor = 1
        if powers:
            units.add(tuple(sorted(powers.items())))
    return units


def arcs_in(latex: str) -> list[int]:
    """Whether angles in ``latex`` are in degrees (0), minutes (1) or seconds (2), in order."""
    return [0 if degrees else len(re.findall(r"'|′|\\prime", primes)) for degrees, primes in _ARC.findall(latex)]


def numerals_in(latex: str) -> list[tuple[str, int]]:
    """Digits and base of numbers such as ``1010_2``, ``1010_{\\text{two}}`` and ``1010\\text{ base }2``."""
    latex = _SUBSCRIPT.sub(lambda found: f"_{found[0].translate(_SUBSCRIPT_DIGITS)}", latex)
    found = [(digits, name.lower()) for digits, name in _BASE.findall(_DROPPED_IN_BASE.sub("", latex))]
    bases = [(digits, int(name) if name.isdigit() else _NUMERALS.index(name) + 2) for digits, name in found]
    # 3E_2 is three times E_2, 3E_{16} a number.
    return [(digits, base) for digits, base in bases if base > 1 and (digits.isdigit() or base > 10)]
