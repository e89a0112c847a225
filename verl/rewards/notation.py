"""Normalises the notation of answers: Unicode and full-width signs to LaTeX, no wrappers or spacing, units parsed.

Every function takes time linear in the length of the text, with a fixed number of passes.
"""

import re
from decimal import Decimal
from typing import NamedTuple

from verl.rewards.answers import plain_number

_SIGNS = {
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict(zip("　。、【】￥“”‘’′", [" ", ".", ",", "[", "]", "¥", "", "", "'", "'", "'"], strict=True)),
    **dict(zip("−–—‐×·⋅∙÷∕", ["-", "-", "-", "-", r"\times ", r"\cdot ", r"\cdot ", r"\cdot ", "/", "/"], strict=True)),
    **dict(
        zip(
            "≤⩽≥⩾≠∞∪∩∈±∅",
            [*[r"\le "] * 2, *[r"\ge "] * 2, r"\neq ", r"\infty ", r"\cup ", r"\cap ", r"\in ", r"\pm ", r"\emptyset "],
            strict=True,
        )
    ),
    **dict(
        zip(
            "πθαβγωφλ",
            [rf"\{name} " for name in ("pi", "theta", "alpha", "beta", "gamma", "omega", "phi", "lambda")],
            strict=True,
        )
    ),
    **dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", [f"^{digit}" for digit in "0123456789"], strict=True)),
    **{chr(0x2460 + i): f"({i + 1})" for i in range(20)},
    **dict(zip("½⅓¼⅔¾", [r"\frac{1}{2}", r"\frac{1}{3}", r"\frac{1}{4}", r"\frac{2}{3}", r"\frac{3}{4}"], strict=True)),
    "°": r"^\circ ",
    "ℝ": r"\mathbb{R}",
    "\u00a0": " ",
    "\u200b": "",
}
_TRANSLATION = str.maketrans(_SIGNS)

_WRAPPER = re.compile(
    r"\\(?:text(?:bf|rm|it|normal|sf)?|mbox|hbox|math(?:rm|bf|it|sf|normal)|operatorname|boldsymbol|bm)\*?\s*"
    r"\{([^{}]*)\}"
)
_CIRCLED = re.compile(r"\\textcircled\s*\{\s*(\w)\s*\}")
_REWRITES = [
    (re.compile(r"\\(?:left|right|displaystyle|limits|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])\.?"), ""),
    # Not after a backslash: two of them end the row of a matrix.
    (re.compile(r"(?<!\\)\\[()\[\],!;:]|\\?\$|\{,\}(?=\d{3})"), ""),
    (re.compile(r"\\q?quad(?![A-Za-z])|(?<!\\)\\ |~|\s+"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\le(?:q|qslant)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\ge(?:q|qslant)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\ne(?![A-Za-z])|\\not\s*="), r"\\neq"),
    (re.compile(r"\\mid(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:varnothing|oslash|O)(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\%"), "%"),
    (
        re.compile(r"\s{0,9}\^\s{0,9}\{?\s{0,9}\\circ\s{0,9}\}?|\s{0,9}\\degree(?![A-Za-z])|(?<=\d)\s{0,9}degrees?\b"),
        "",
    ),
    (re.compile(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?:√|(?<![A-Za-z\\])sqrt)\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])(ln|lg|log|sin|cos|tan|cot|arcsin|arccos|arctan|pi)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"C_\{?(\w{1,9})\}?\s{0,9}\^\s{0,9}\{?(\w{1,9})\}?"), r"\\binom{\1}{\2}"),
    (re.compile(r"\+\s*\\infty"), r"\\infty"),
    # Not 2e-1, which may mean 2 times e minus 1.
    (re.compile(r"(?<![\w.])(\d+\.\d+(?=[eE][+-]?\d)|\d+(?=[eE]\d\d))[eE]\+?(-?\d+)(?![\d.])"), r"\1 \\times 10^{\2}"),
]
_LEADING = re.compile(r"\A[:\s]*+(?:,(?!\d)[:,\s]*+)?")
"""A comma before a digit is a decimal one."""

_SET_OF_REALS = re.compile(
    r"(?:\\mathbb\s*\{R\}|R|all real(?: number)?s?|\(-\\infty\s*,\s*\\infty\s*\)|全体实数|实数集R?)\.?", re.I
)
_NOTHING = re.compile(
    r"(?:no (?:real )?solutions?\s*+(?::\s*+)?(?:\\emptyset)?|\\emptyset|\\\{\s*\\\}|none|无解|空集)", re.IGNORECASE
)
_BUILDER = re.compile(r"\\?\{\s*+([A-Za-z])\s*+(?:\\in\s*+\S+?\s*+)?[|:]\s*+([^|]*?)\\?\}")


def unify(text: str) -> str:
    """``text`` in one notation: its mathematical meaning is kept and presentation is removed."""
    text = _CIRCLED.sub(r"(\1)", text.translate(_TRANSLATION))
    for _ in range(2):
        text = _WRAPPER.sub(_unwrapped, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("*").rstrip(".,;: ")
    text = _LEADING.sub("", text, 1)
    if _SET_OF_REALS.fullmatch(text):
        return r"\mathbb{R}"
    if _NOTHING.fullmatch(text):
        return r"\emptyset"
    builder = _BUILDER.fullmatch(text)
    if builder:
        return builder.group(2)
    if text.startswith("{") and text.endswith("}") and "," in text:
        return rf"\{text[:-1]}\}}"
    return text


def _unwrapped(found: re.Match[str]) -> str:
    content, before = found.group(1).strip(" ~\t\n"), found.string[max(0, found.start() - 9) : found.start()]
    # 5\\text{ m} is a length, 5m is 5 times m: the brackets keep the difference.
    if content.lower() in SHORT_UNITS and before.rstrip(" ~\\,$")[-1:].isdigit():
        return f" ({content}) "
    return f" {content} "


def squeeze(text: str) -> str:
    """Unified text without redundant braces and spaces, for comparison as text.

    A space between two numbers stays unless it separates thousands: ``1 1/2`` is not ``11/2``.
    """
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"(?<=\d) (?=\d{3}(?![\d/.]))|(?<!\d) | (?!\d)|\\(?=[{}])", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


_WORDS = re.compile(r"[A-Za-z\u4e00-\u9fff0-9 .,:'’!?()&/-]+")
_JOINERS = re.compile(r"\b(?:and|or)\b|[和或与及且]")
_WORD = re.compile(r"[A-Za-z]{3,}|[\u4e00-\u9fff]|\b[ap]\.?m\b", re.IGNORECASE)
_NOT_SAID = re.compile(
    # Full stops, commas and slashes count between two digits; a minus counts before a digit or at the start.
    r"(?<=\d),(?=\d{3}(?!\d))|(?<!\d)[.,/]|[.,/](?!\d)|(?<=[a-z\u4e00-\u9fff])-|(?<!^)-(?!\d)"
    r"|[^0-9a-z:.,/\u4e00-\u9fff-]+"
)


def words_in(text: str) -> str | None:
    """Unified ``text`` in lower case and without signs, if it consists of words; None if it is mathematics."""
    if not _WORDS.fullmatch(text) or not _WORD.search(_JOINERS.sub("", text)):
        return None
    joined = re.sub(r"(?<=\d)\s*/\s*(?=\d)", "/", text.lower())
    return _NOT_SAID.sub("", re.sub(r"(?<=\d)\s+(?=\d)", ",", joined))


class Quantity(NamedTuple):
    """A plain number with its unit."""

    value: Decimal
    unit: str
    """The canonical name in ``UNITS``; ``%``; another word as it is; empty if there is none."""
    known: bool
    """Whether the unit is one of ``UNITS`` or ``%``; two known units that differ mean different answers."""


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

_FACTORS = {
    **{"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"dozen": 12, "lakh": 10**5, "crore": 10**7, "万": 10**4, "亿": 10**8},
    **{"tens": 10, "mil": 10**6, "mln": 10**6, "mn": 10**6, "bn": 10**9},
}
"""Word after a number -> what it multiplies the number by."""

_FACTOR = re.compile(
    r"(?:(hundred|thousand|million|billion|trillion|dozen|lakh|crore|tens|mil|mln|mn|bn)(?![a-z])|([万亿]))\s*"
)
_OPERATION = re.compile(
    r"(?:squared|cubed|factorial|times [a-z]|doubled|tripled|halved|divided|halves|millionths|thousandths|hundredths"
    r"|(?:third|fifth|sixth|seventh|eighth|ninth|tenth)s)\b"
)

_QUANTITY = re.compile(
    r"(?:[A-Za-z]\s*=\s*)?([¥€£]?\s*[+-]?[¥€£]?[0-9.,]+)\s*"
    r"(%|\(([^()0-9]*)\)|([A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff .'-]*?)(\s*\^?\s*\{?\s*[23]\s*\}?)?|)"
)


def read_quantity(text: str, short: bool = False) -> Quantity | None:
    """The number and unit of unified ``text`` such as ``18 dollars``, ``9 (apples)``, ``20 cm^2``, ``3元``, ``25%``.

    None if there is no plain number, or if the text after it may be a variable (``3x``, ``2 ab``, and without ``short``
    also ``5 m``).
    """
    found = _QUANTITY.fullmatch(text) if len(text) <= 120 else None
    if found is None:
        return None
    value = plain_number(re.sub(r"[¥€£\s]", "", found.group(1)).rstrip(","))
    if value is None:
        return None
    unit = (found.group(3) or found.group(4) or "").strip().rstrip(".")
    if len(unit) == 1 and unit in "MSGHT":
        return None  # 5M are millions
    unit = unit.lower()
    if found.group(2) == "%":
        return Quantity(value, "%", True)
    if _OPERATION.match(unit):
        return None
    is_multiple = False
    while factor := _FACTOR.match(unit):
        value, unit, is_multiple = value * _FACTORS[factor.group().strip()], unit[factor.end() :], True
    if is_multiple and not unit:
        return Quantity(value, "", False)
    power = re.sub(r"\D", "", found.group(5) or "")
    name = re.sub(r"^(?:square|平方|sq\.?)\s*", "", unit)
    if name != unit:
        power = "2"
    if re.match(r"(?:cubic|立方)\s*", unit):
        name, power = re.sub(r"^(?:cubic|立方)\s*", "", unit), "3"
    if name in UNITS and (short or name not in SHORT_UNITS or bool(power) or found.group(3) is not None):
        return Quantity(value, UNITS[name] + power, True)
    bare = found.group(4)
    is_word = not bare or not bare[0].isascii() or len(bare.split()[0]) >= 4
    return Quantity(value, unit, False) if is_word and not power else None


_LAST_LETTERS = re.compile(r"(?<=[0-9}\s])([A-Za-z]{1,2})\s*$")
_CONSTANT = re.compile(r"\\(?:mathrm|text|mathit|mathbf|rm)\s*\{\s*([ie])\s*\}")
_NO_VARIABLES = re.compile(r"\\(?:text|mbox|mathrm|mathbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_SUM = re.compile(r"(?<=[^\s({\[])\s*[+-]")


def keep_variable(text: str, short: bool = False) -> str:
    """LaTeX with braces around a variable at its end, because math-verify drops what it takes for a unit.

    It takes ``t`` in ``2+3t``, ``ab`` in ``5ab`` and the imaginary unit in ``5\\mathrm{i}`` for units. Two-letter names
    in ``UNITS`` stay units; with ``short`` so do those of ``SHORT_UNITS`` after a single number.
    """
    text = _CONSTANT.sub(r" \1 ", text)
    found = _LAST_LETTERS.search(text)
    if found is None:
        return text
    letters, rest = found.group(1), text[: found.start()].rstrip()
    is_unit = letters.lower() in _OTHER_SHORT_UNITS or (letters in UNITS and letters not in SHORT_UNITS)
    if letters in SHORT_UNITS:
        is_unit = short and not has_variables(rest) and not _SUM.search(rest)
    if not rest or is_unit:
        return text
    # After a sign, braces would make it a set.
    return rest + (letters if rest[-1] in "+-*/=<>(,;:|&" else f"{{{letters}}}")


def has_variables(text: str) -> bool:
    """Whether LaTeX has letters outside its commands and words."""
    return re.search("[A-Za-z]", _NO_VARIABLES.sub("", text)) is not None


_SPLIT = re.compile(r"(?P<open>\\?[({\[])|(?P<close>\\?[)}\]])|(?P<mark>[,;]|\b(?:and|or)\b|[和或与及且])")
"""The words are those of ``_JOINERS``."""


def split_answers(text: str, thousands: bool = True) -> tuple[list[str], bool]:
    """The answers that unified ``text`` lists, and whether their order counts because semicolons separate them.

    One surrounding pair of set braces is removed. With ``thousands``, a comma between a digit and three digits is not a
    separator.
    """
    inner = text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text
    parts, depth, start, ordered = [], 0, 0, False
    for found in _SPLIT.finditer(inner):
        if found.lastgroup == "open":
            depth += 1
        elif found.lastgroup == "close":
            depth -= 1
        elif depth == 0 and not (thousands and found.group() == "," and _is_thousands(inner, found.start())):
            ordered = ordered or found.group() == ";"
            parts.append(inner[start : found.start()])
            start = found.end()
    parts.append(inner[start:])
    return [part.strip() for part in parts if part.strip()], ordered


def _is_thousands(text: str, comma: int) -> bool:
    before, after = text[max(0, comma - 3) : comma], text[comma + 1 : comma + 5]
    return before[-1:].isdigit() and bool(re.fullmatch(r"\d{3}(?!\d).?", after))
