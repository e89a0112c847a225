"""Handles equations as answers: ``x = 5`` and ``2 + 3 = 5`` mean 5, but ``2x = 5`` and ``x^2 = 5`` do not."""

import re

_TOKEN = re.compile(
    r"\\?(?P<open>[({\[])|\\?(?P<close>[)}\]])|(?P<sign>(?<![<>!:\\])=(?!=)|\\(?:in|equiv|approx)(?![A-Za-z]))"
    r"|(?P<mark>[,;]|\\(?:text|mathrm|mbox)\s{0,9}\{\s{0,9}(?:and|or)\s{0,9}\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))"
)
_SPACING = re.compile(r"\\(?:left|right|[bB]ig[lr]?|displaystyle|q?quad)(?![A-Za-z])|\\[!,;: ]|[\s~$&]")
_INDEX = r"(?:_(?:\w|\\[A-Za-z]{1,12}|\{[^{}]{0,60}(?:\{[^{}]{0,60}\}[^{}]{0,60})?\}))?"
_MARK = r"(?:'{1,3}|\^\{?(?:-1|\*|\\prime|\([a-z0-9]\))\}?)?"
_WRAPPED = (
    r"\\(?:text|math)(?:bf|it|rm|cal|bb|sf)?\{[^{}0-9][^{}]{0,80}\}"
    r"|\\(?:operatorname|over(?:line|rightarrow)|vec|(?:wide)?hat|bar|tilde|boldsymbol|bm)\{[^{}0-9][^{}]{0,80}\}"
)
_GREEK = (
    r"\\(?:(?:var)?(?:epsilon|theta|phi|rho|sigma)|alpha|beta|gamma|delta|zeta|eta|iota|kappa|lambda|mu|nu|xi|pi|tau"
    r"|upsilon|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|ell|hbar)"
)
_NAME = re.compile(
    rf"(?:m?\\(?:angle|triangle))?(?:[A-Za-z]|{_GREEK}|{_WRAPPED}|(?:[A-Z](?:'|_\w)?){{2,6}}){_INDEX}{_MARK}{_INDEX}"
    r"|\|\s?[A-Z]{2}\s?\|"
)
_FUNCTION = re.compile(
    rf"(?:[d-hp-wyA-Z]|{_GREEK}|{_WRAPPED}|\\?(?:gcd|lcm|min|max|det|dim|deg|rank|tr|Pr|Re|Im|arg)){_INDEX}{_MARK}"
)
_WORDS = re.compile(r"[A-Za-z]{4,20}|(?:[A-Za-z]{1,20}[ -]){1,9}[A-Za-z]{1,20}|(?i:sum|age|lcm|gcd|max|min|ans)")

_BEFORE_EQUATION = re.compile(r"[\n,;:$。，；]|\.(?=\s)|\\[()\[\]]|(?<![\\A-Za-z])[A-Za-z]{2,30}\s(?=\s{0,9}[^\s=])")
_AROUND = re.compile(r"\s*(?:\\left)?\\?([({\[])(.*[^\\])\\?([)}\]])\s*", re.DOTALL)
_MULTIPLE_OF_VARIABLE = re.compile(
    r"[0-9.]{1,9}\s?[*·]?\s?[A-Za-z](?:\s?[-+/]\s?[0-9.]{1,9})?|[A-Za-z]\s?(?:[-+*/^]|\\cdot)\s?[0-9.]{1,9}"
)
_SAID_OF = re.compile(r"(?<!equation\s)(?<![A-Za-z])(?:is|are|was|were|be|equals?|equal\sto)[\s$]{1,3}\Z")
_LETTER = re.compile("[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]{1,30}")
_MULTIPLE = re.compile(
    r"(?<![A-Za-z])(?:twice|thrice|double|triple|half|third|quarter|squared?|cubed?|root|power|times|minus|plus|negative|not|log"
    r"|two|three|four|five|six|seven|eight|nine|ten|hundred|reciprocal|inverse|opposite)(?![A-Za-z])",
    re.IGNORECASE,
)

MAX_CHARS = 400
"""Maximum length of bracketed text in which equations are reduced."""

MAX_NAME = 200
"""Maximum length of a name."""


def is_name(text: str) -> bool:
    """Return whether ``text``, the left side of an equation, names a value.

    Names are symbols (``x_1``, ``\\theta``), segments, angles and shapes (``AB``, ``\\angle ABC``), function values
    (``f(2)``, ``P(A)``), words (``total cost``), and tuples of symbols (``(x, y)``).
    """
    if len(text) > MAX_NAME or _MULTIPLE.search(text):
        return False
    if _WORDS.fullmatch(text.strip(" $*:")) and (" " not in text.strip() or max(map(len, text.split())) >= 4):
        return True
    bare = _SPACING.sub("", text.strip(" *"))
    if _NAME.fullmatch(bare):
        return True
    if bare.startswith("(") and bare.endswith(")"):
        return all(_NAME.fullmatch(part) for part in bare[1:-1].split(","))
    function = _FUNCTION.match(bare)
    arguments = bare[function.end() :] if function else ""
    # x(x+1) is a product rather than a function value.
    return arguments[:1] in ("(", "[") and _closes_at_end(arguments) and bare[0] not in _COMMAND.sub("", arguments)


def _closes_at_end(text: str) -> bool:
    """Return whether ``text`` starts with a bracket that is closed by the last character."""
    depth = 0
    for position, symbol in enumerate(text):
        depth += (symbol in "([{") - (symbol in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


def unwrap_equations(text: str) -> tuple[str, bool]:
    """Reduce equations with a name on the left to their right sides. Also return whether other equations remain.

    Equations separated by commas, semicolons or words are reduced individually, even inside a pair of brackets.
    """
    bracketed = _AROUND.fullmatch(text) if len(text) <= MAX_CHARS else None
    if bracketed and _closes_at_end(bracketed.group(1) + bracketed.group(2) + bracketed.group(3)):
        inner, remaining = unwrap_equations(bracketed.group(2))
        return text[: bracketed.start(2)] + inner + text[bracketed.end(2) :], remaining
    parts: list[str] = []
    depth = start = 0
    # Start and end index of the equation's first equals sign, and end index of its last one.
    first_start, first_end, last_end, remaining = -1, -1, -1, False

    def finish(end: int) -> None:
        nonlocal remaining
        named = first_start >= 0 and is_name(text[start:first_start])
        remaining = remaining or (first_start >= 0 and not named)
        # Numbers between the name and the last side must be equal to it: x = 4 = 5 has no value.
        chain = named and last_end > first_end and not _LETTER.search(_COMMAND.sub("", text[first_end:end]))
        remaining = remaining or chain
        parts.append(text[first_end if chain else last_end if named else start : end])

    for token in _TOKEN.finditer(text):
        if token.lastgroup == "open":
            depth += 1
        elif token.lastgroup == "close":
            depth -= 1
        elif depth == 0 and token.lastgroup == "sign":
            first_start, first_end = (first_start, first_end) if first_start >= 0 else token.span()
            last_end = token.end()
        elif depth == 0:
            finish(token.start())
            parts.append(token.group())
            start, first_start, first_end, last_end = token.end(), -1, -1, -1
    finish(len(text))
    return "".join(parts), remaining


def last_equation(text: str, end: int) -> str | None:
    """Return the chain of equations that ends at index ``end``, without preceding words, or None if there is none."""
    line = text[max(0, end - MAX_NAME) : end]
    sign = line.rfind("=")
    if sign < 0 or any(match.end() > sign for match in _BEFORE_EQUATION.finditer(line.replace("$", " "))):
        return None
    start = max((match.end() for match in _BEFORE_EQUATION.finditer(line, 0, sign)), default=0)
    chain = line[start:].strip(" $*")
    return None if chain.startswith("=") else chain


def leaves_open(text: str, chain: str) -> bool:
    """Return whether the equation at the end of ``text`` leaves a variable unsolved, as in ``2x = 18``.

    In contrast, "She makes 2x = 2 * 9 = 18" and "her wins are 2x = 18" both state the answer 18.
    """
    left, *middle, _ = (side.strip(" $") for side in chain.split("="))
    computed = any(re.search(r"[0-9]\s?[-+*/×]", side) for side in middle)
    has_subject = _SAID_OF.search(text, max(0, len(text) - len(chain) - MAX_NAME), len(text) - len(chain))
    return not computed and not has_subject and _MULTIPLE_OF_VARIABLE.fullmatch(left) is not None
