"""One notation for answers: full-width and Unicode signs as LaTeX, wrappers and spacing gone, units told from numbers.

Every function takes time linear in the text's length, up to the small factor of a fixed number of passes.
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
    # Two backslashes end the row of a matrix.
    (re.compile(r"(?<!\\)\\[()\[\],!;:]|\\?\$|\{,\}(?=\d{3})"), ""),
    (re.compile(r"\\q?quad(?![A-Za-z])|(?<!\\)\\ |~|\s+"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\le(?:q|qslant)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\ge(?:q|qslant)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\ne(?![A-Za-z])|\\not\s*="), r"\\neq"),
    (re.compile(r"\\mid(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:varnothing|oslash|O)(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?|\s*\\degree(?![A-Za-z])|(?<=\d)\s*degrees?\b"), ""),
    (re.compile(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?:√|(?<![A-Za-z\\])sqrt)\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])(ln|lg|log|sin|cos|tan|cot|arcsin|arccos|arctan|pi)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"C_\{?(\w+)\}?\s*\^\s*\{?(\w+)\}?"), r"\\binom{\1}{\2}"),
    (re.compile(r"\+\s*\\infty"), r"\\infty"),
    # Not 2e-1, which may be twice e, less one.
    (re.compile(r"(?<![\w.])(\d+\.\d+(?=[eE][+-]?\d)|\d+(?=[eE]\d\d))[eE]\+?(-?\d+)(?![\d.])"), r"\1 \\times 10^{\2}"),
]
_SET_OF_REALS = re.compile(
    r"(?:\\mathbb\s*\{R\}|R|all real(?: number)?s?|\(-\\infty\s*,\s*\\infty\s*\)|全体实数|实数集R?)\.?", re.I
)
_NOTHING = re.compile(
    r"(?:no (?:real )?solutions?\s*:?\s*(?:\\emptyset)?|\\emptyset|\\\{\s*\\\}|none|无解|空集)", re.IGNORECASE
)
_BUILDER = re.compile(r"\\?\{\s*([A-Za-z])\s*(?:\\in\s*\S+?\s*)?[|:]\s*([^|]*?)\\?\}")


def unify(text: str) -> str:
    """``text`` in one notation; what it means mathematically stays, what is only presentation goes."""
    text = _CIRCLED.sub(r"(\1)", text.translate(_TRANSLATION))
    for _ in range(2):
        text = _WRAPPER.sub(_unwrapped, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("*").rstrip(".,;: ").lstrip(":, ")
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
    # 5\\text{ m} is a length, 5m five times m: the brackets keep that.
    if content.lower() in SHORT_UNITS and before.rstrip(" ~\\,$")[-1:].isdigit():
        return f" ({content}) "
    return f" {content} "


def squeeze(text: str) -> str:
    """Unified text without needless braces and spaces, for comparison as text.

    A space between two numbers stays, unless it parts thousands: ``1 1/2`` is not ``11/2``.
    """
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"(?<=\d) (?=\d{3}(?![\d/.]))|(?<!\d) | (?!\d)|\\(?=[{}])", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


_WORDS = re.compile(r"[A-Za-z\u4e00-\u9fff0-9 .,:'’!?()&/-]+")
_JOINERS = re.compile(r"\b(?:and|or)\b|[和或与及且]")
_WORD = re.compile(r"[A-Za-z]{3,}|[\u4e00-\u9fff]|\b[ap]\.?m\b", re.IGNORECASE)
_NOT_SAID = re.compile(
    # Points, commas and bars count between two digits, a minus before a digit or all of the text.
    r"(?<=\d),(?=\d{3}(?!\d))|(?<!\d)[.,/]|[.,/](?!\d)|(?<=[a-z\u4e00-\u9fff])-|(?<!^)-(?!\d)"
    r"|[^0-9a-z:.,/\u4e00-\u9fff-]+"
)


def words_in(text: str) -> str | None:
    """What unified ``text`` says, in lower case and without signs, where it is words; None where it is mathematics."""
    if not _WORDS.fullmatch(text) or not _WORD.search(_JOINERS.sub("", text)):
        return None
    joined = re.sub(r"(?<=\d)\s*/\s*(?=\d)", "/", text.lower())
    return _NOT_SAID.sub("", re.sub(r"(?<=\d)\s+(?=\d)", ",", joined))


class Quantity(NamedTuple):
    """A plain number with what stands behind it."""

    value: Decimal
    unit: str
    """Canonical, as ``UNITS`` has it; ``%``; another word as it is; empty where there is none."""
    known: bool
    """Whether the unit is one of ``UNITS``, so that another known one means another answer."""


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
"""Name of a unit -> the name that stands for it here."""

SHORT_UNITS = {"s", "m", "g", "l", "h", "t"}
"""Names that are variables more often than units."""

_OTHER_SHORT_UNITS = {"am", "pm", "st", "th", "yr", "gm", "cc", "sq", "rs"}
"""Further names of two letters that math-verify leaves out as units, and that are no products of variables."""

_FACTORS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8}
"""Words behind a number that multiply it -> the power of ten."""

_FACTOR = re.compile(r"(?:(hundred|thousand|million|billion|trillion)(?![a-z])|([万亿]))\s*")
_OPERATION = re.compile(r"(?:squared|cubed|factorial|times [a-z])\b")

_QUANTITY = re.compile(
    r"(?:[A-Za-z]\s*=\s*)?([¥€£]?\s*[+-]?[¥€£]?[0-9.,]+)\s*"
    r"(%|\(([^()0-9]*)\)|([A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff .'-]*?)(\s*\^?\s*\{?\s*[23]\s*\}?)?|)"
)


def read_quantity(text: str, short: bool = False) -> Quantity | None:
    """The number and unit of unified ``text`` such as ``18 dollars``, ``9 (apples)``, ``20 cm^2``, ``3元``, ``25%``.

    None where there is no plain number or what follows it may be a variable (``3x``, ``2 ab``, and without ``short``
    ``5 m``).
    """
    found = _QUANTITY.fullmatch(text) if len(text) <= 120 else None
    if found is None:
        return None
    value = plain_number(re.sub(r"[¥€£\s]", "", found.group(1)).rstrip(","))
    if value is None:
        return None
    unit = (found.group(3) or found.group(4) or "").strip().lower().rstrip(".")
    if found.group(2) == "%":
        return Quantity(value, "%", True)
    if _OPERATION.match(unit):
        return None
    factor = _FACTOR.match(unit)
    if factor:
        value, unit = value.scaleb(_FACTORS[factor.group().strip()]), unit[factor.end() :]
        if not unit:
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
    """LaTeX in which a variable that ends it is in braces, for math-verify leaves out what it takes for a unit.

    It takes ``t`` for one in ``2+3t``, ``ab`` in ``5ab`` and the imaginary unit in ``5\\mathrm{i}``. Names of two
    letters in ``UNITS`` stay units; with ``short`` those of ``SHORT_UNITS`` do too, behind a number alone.
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
    # Behind a sign, braces would make it a set.
    return rest + (letters if rest[-1] in "+-*/=<>(,;:|&" else f"{{{letters}}}")


def has_variables(text: str) -> bool:
    """Whether letters are left in LaTeX without its commands and words."""
    return re.search("[A-Za-z]", _NO_VARIABLES.sub("", text)) is not None


_SPLIT = re.compile(r"(?P<open>\\?[({\[])|(?P<close>\\?[)}\]])|(?P<mark>[,;]|\b(?:and|or)\b|[和或与及且])")
"""The last are the words of ``_JOINERS``."""


def split_answers(text: str, thousands: bool = True) -> tuple[list[str], bool]:
    """The answers that unified ``text`` lists, and whether their order counts because semicolons part them.

    One surrounding pair of set braces is left out. With ``thousands`` a comma between a digit and three digits parts
    nothing.
    """
    inner = text[2:-2] if text.startswith(r"\{") and text.endswith(r"\}") else text
    parts, depth, start, ordered = [], 0, 0, False
    for found in _SPLIT.finditer(inner):
        if found.lastgroup == "open":
            depth += 1
        elif found.lastgroup == "close":
            depth -= 1
        elif depth == 0 and not (thousands and found.group() == "," and _parts_thousands(inner, found.start())):
            ordered = ordered or found.group() == ";"
            parts.append(inner[start : found.start()])
            start = found.end()
    parts.append(inner[start:])
    return [part.strip() for part in parts if part.strip()], ordered


def _parts_thousands(text: str, comma: int) -> bool:
    before, after = text[max(0, comma - 3) : comma], text[comma + 1 : comma + 5]
    return before[-1:].isdigit() and bool(re.fullmatch(r"\d{3}(?!\d).?", after))
