"""What algebra drops from an answer: units, factors such as "million", bases, and words such as "not".

math-verify takes all of these for presentation, so that 5 m, 5 km, 5 million and "not 5" were the same to it.
"""

import re
from collections import Counter

from verl.rewards.notation import UNITS

_TEXT = r"\\(?:text(?:bf|rm|it|normal|sf)?|mbox|hbox|math(?:rm|bf|it|sf|normal)|operatorname)\*?\s{0,3}"

_FACTORS = {
    **{"hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}", "trillion": "10^{12}"},
    **{"dozen": "12", "lakh": "10^{5}", "crore": "10^{7}", "万": "10^{4}", "亿": "10^{8}"},
    **{"ten": "10", "mil": "10^{6}", "mln": "10^{6}", "mn": "10^{6}", "bn": "10^{9}", "halve": "2^{-1}"},
    **{"tenth": "10^{-1}", "hundredth": "10^{-2}", "thousandth": "10^{-3}", "millionth": "10^{-6}"},
    **{name: f"{i}^{{-1}}" for name, i in (("third", 3), ("fifth", 5), ("sixth", 6), ("eighth", 8), ("ninth", 9))},
}
"""Word that multiplies the number before it -> the factor in LaTeX."""

_FACTOR = (
    "(?i:(?P<factor>(?:halve|third|fifth|sixth|eighth|ninth|tenth|hundredth|thousandth|millionth)(?=s)|hundred|thousand|million|billion|trillion|dozen|lakh|crore|ten(?=s)|mil|mln|mn|bn)s?(?![A-Za-z])"
    "|(?P<sign>[万亿]))"
)
_TEXT_K = re.compile(r"(?<=[0-9}])\s{0,9}\\text\s{0,3}\{\s{0,9}k\s{0,9}\}")
_TEXT_WITH_FACTOR = re.compile(
    rf"(?<=\S)\s{{0,9}}{_TEXT}\{{[\s~-]{{0,9}}{_FACTOR}[\s~]{{0,9}}(?P<rest>[^{{}}]{{0,99}})\}}"
)
_BARE_FACTOR = re.compile(rf"(?<=[^\s{{])[\s~]{{0,9}}(?<![A-Za-z]){_FACTOR}(?P<rest>)")

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

_LONG_UNITS = "|".join(name for name in UNITS if len(name) > 1 and name.isascii())
_BARE_UNIT = re.compile(rf"(?<=[0-9}}\s])(?<![A-Za-z\\])({_LONG_UNITS})(?![A-Za-z{{])")
_MICRO = re.compile(rf"\\mu\s{{0,3}}(?:{_TEXT}\{{)?|μ")
_SPACING = re.compile(r"\\[,;:! ]|\\cdot(?![A-Za-z])")
_UNIT_TEXT = re.compile(rf"{_TEXT}\{{([^{{}}]{{0,99}})\}}\s{{0,3}}(?:\^\s{{0,3}}\{{?\s{{0,3}}(-?[1-9])\s{{0,3}}\}}?)?")
_UNIT_TOKEN = re.compile(r"(?P<word>[A-Za-zµΩÅ]+)\.?(?:\^?\{?(?P<power>-?[1-9])\}?)?|(?P<slash>/)|(?P<other>[^\s~.·])")
_PARTS = re.compile(r"[,;+]|\\text\s{0,3}\{\s{0,3}(?:and|or)\s{0,3}\}")

_NUMBER_IN_TEXT = re.compile(rf"{_TEXT}\{{([^{{}}A-Za-z\u4e00-\u9fff]{{1,99}})\}}")
_VARIABLE_IN_TEXT = re.compile(rf"(?<=[0-9}})])(?:\s|~){{0,9}}{_TEXT}\{{\s{{0,9}}([abknpquvwxyz])\s{{0,9}}\}}")
_ARC = re.compile(r"(?<=[0-9}])\s{0,3}(?:(\^\s?\{?\s?\\circ|°)|\^?\{?((?:'|′|\\prime\s?){1,2}))")
_PRIME = re.compile(r"\^\s?\{?\s?(?:\\prime(?![A-Za-z])\s?){1,3}\}?")
_PRIMED = re.compile(r"[A-Za-z](?:'{1,3}(?![a-z])|\^\{?(?:\\prime\s?){1,3}\}?)")
_COMMANDS = re.compile(rf"{_TEXT}\{{[^{{}}]{{0,99}}\}}|\\[A-Za-z]+")
_VARIABLE = re.compile("(?<![A-Za-z])[A-Za-z](?![A-Za-z])")

_HALF_OF_DAY = re.compile(r"(?<![A-Za-z])([ap])\.?m(?![A-Za-z])", re.IGNORECASE)

_NUMERALS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_DROPPED_IN_BASE = re.compile(rf"{_TEXT}|\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|[\s{{}}()~$,]")
_BASE = re.compile(
    rf"([0-9][0-9A-F]{{0,40}})(?:_(?:base)?|base-?)([0-9]{{1,2}}|{'|'.join(_NUMERALS)})(?![0-9A-Za-z])", re.I
)
_DIGIT = re.compile("[0-9]")
_SUBSCRIPTS = re.compile("[₀-₉]{1,2}")

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


def with_factors(latex: str) -> str:
    """LaTeX with the words that multiply a number as factors: ``5\\text{ million}`` is ``5\\times 10^{6}``."""
    latex = _TEXT_K.sub(r" \\times 10^{3} ", latex)
    for _ in range(2):  # "hundred million"
        latex = _BARE_FACTOR.sub(_times, _TEXT_WITH_FACTOR.sub(_times, latex))
    return latex


def _times(found: re.Match[str]) -> str:
    rest = found["rest"]
    text = rf"\text{{ {rest}}}" if rest else ""
    return rf" \times {_FACTORS[(found['factor'] or found['sign']).lower()]} {text}"


def measures_differ(answer: str, truth: str) -> bool:
    """Whether both have units, or both a base, and these differ; or one has words that change its value."""
    if modifiers_in(answer) != modifiers_in(truth) or _is_no_numeral(answer) > _is_no_numeral(truth):
        return True
    if ("=" in answer) == ("=" in truth) and _names_differ(answer, truth):
        return True
    for find in (units_in, arcs_in, bases_in, _HALF_OF_DAY.findall):
        ours, theirs = find(answer), find(truth)
        if ours and theirs and ours != theirs:
            return True
    return False


def without_text(latex: str) -> str:
    """LaTeX without ``\\text{}`` and the like around numbers, signs and single variables, which algebra would drop, and
    with ``'`` for ``^{\\prime}``."""
    latex = _PRIME.sub(lambda found: "'" * found[0].count("prime"), latex)
    return _VARIABLE_IN_TEXT.sub(r" \1", _NUMBER_IN_TEXT.sub(r"\1", latex))


def arcs_in(latex: str) -> list[int]:
    """Whether angles in ``latex`` are in degrees (0), minutes (1) or seconds (2), in order."""
    return [
        0 if degrees else len(primes.replace("\\prime", "'").replace(" ", ""))
        for degrees, primes in _ARC.findall(latex)
    ]


def _names_differ(answer: str, truth: str) -> bool:
    """Whether variables differ in their primes or, inside of expressions, only in their capitals."""
    if len(_PRIMED.findall(answer)) != len(_PRIMED.findall(truth)):
        return True
    ours, theirs = (set(_VARIABLE.findall(_COMMANDS.sub(" ", text))) for text in (answer, truth))
    alone = len(answer.strip(" $()")) == 1 or len(truth.strip(" $()")) == 1
    return not alone and ours != theirs and {name.lower() for name in ours} == {name.lower() for name in theirs}


def _is_no_numeral(latex: str) -> bool:
    """Whether a digit is too large for its base: ``18_5``."""
    return any(int(digit, 36) >= base for digits, base in _bases(latex) for digit in digits)


def modifiers_in(text: str) -> list[str]:
    """The words that change the value of a number in ``text``, such as "not" and "twice"."""
    last = max((found.end() for found in _DIGIT.finditer(text)), default=0)
    return [word.lower() for word in _CHANGES.findall(text) + _CHANGES_NEXT.findall(text, 0, last)]


def bases_in(latex: str) -> list[int]:
    """The bases of numbers such as ``1010_2``, ``1010_{\\text{two}}`` and ``1010\\text{ base }2``."""
    return [base for _, base in _bases(latex)]


def _bases(latex: str) -> list[tuple[str, int]]:
    latex = _SUBSCRIPTS.sub(lambda found: "_" + "".join(str(ord(digit) - ord("₀")) for digit in found[0]), latex)
    found = [(digits, name.lower()) for digits, name in _BASE.findall(_DROPPED_IN_BASE.sub("", latex))]
    bases = [(digits, int(name) if name.isdigit() else _NUMERALS.index(name) + 2) for digits, name in found]
    # 3E_2 is three times E_2, 3E_{16} a number.
    return [(digits, base) for digits, base in bases if base > 1 and (digits.isdigit() or base > 10)]


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
                elif word in ("square", "sq", "cubic"):
                    factor = 3 if word == "cubic" else 2
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
