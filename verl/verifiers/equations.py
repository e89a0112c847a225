"""Equations as answers: ``x = 5`` answers 5 and so does ``2 + 3 = 5``, but ``2x = 5`` and ``x^2 = 5`` do not."""

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
"""Longer text is not unwrapped."""

MAX_NAME = 200
"""Longer text names nothing."""


def is_name(text: str) -> bool:
    """Whether the left side of an equation names one value.

    A symbol (``x_1``, ``\\theta``), a segment, angle or shape (``AB``, ``\\angle ABC``), a value of a function
    (``f(2)``, ``P(A)``), words (``total cost``), or a tuple of symbols (``(x, y)``).
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
    # x(x+1) is a product, whatever x is.
    return arguments[:1] in ("(", "[") and _closes_at_end(arguments) and bare[0] not in _COMMAND.sub("", arguments)


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that ``text`` begins with is closed by its last character."""
    depth = 0
    for position, symbol in enumerate(text):
        depth += (symbol in "([{") - (symbol in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


def unwrap_equations(text: str) -> tuple[str, bool]:
    """``text`` with the last side alone of each equation whose first is a name, and whether other equations are left.

    Of several answers, separated by commas, semicolons or words, each is looked at on its own; brackets around all of
    them do not matter.
    """
    around = _AROUND.fullmatch(text) if len(text) <= MAX_CHARS else None
    if around and _closes_at_end(around.group(1) + around.group(2) + around.group(3)):
        inner, left = unwrap_equations(around.group(2))
        return text[: around.start(2)] + inner + text[around.end(2) :], left
    parts: list[str] = []
    depth = start = 0
    first, after_first, last, left = -1, -1, -1, False

    def finish(end: int) -> None:
        nonlocal left
        named = first >= 0 and is_name(text[start:first])
        left = left or (first >= 0 and not named)
        # Numbers between the name and the last side must equal it: x = 4 = 5 gives no value.
        chain = named and last > after_first and not _LETTER.search(_COMMAND.sub("", text[after_first:end]))
        left = left or chain
        parts.append(text[after_first if chain else last if named else start : end])

    for token in _TOKEN.finditer(text):
        if token.lastgroup == "open":
            depth += 1
        elif token.lastgroup == "close":
            depth -= 1
        elif depth == 0 and token.lastgroup == "sign":
            first, after_first = (first, after_first) if first >= 0 else token.span()
            last = token.end()
        elif depth == 0:
            finish(token.start())
            parts.append(token.group())
            start, first, after_first, last = token.end(), -1, -1, -1
    finish(len(text))
    return "".join(parts), left


def last_equation(text: str, end: int) -> str | None:
    """Return the chain of equations in ``text`` that ends at ``end``, without the words before it; None without one."""
    line = text[max(0, end - MAX_NAME) : end]
    sign = line.rfind("=")
    if sign < 0 or any(match.end() > sign for match in _BEFORE_EQUATION.finditer(line.replace("$", " "))):
        return None
    start = max((match.end() for match in _BEFORE_EQUATION.finditer(line, 0, sign)), default=0)
    chain = line[start:].strip(" $*")
    return None if chain.startswith("=") else chain


def leaves_open(text: str, chain: str) -> bool:
    """Whether an equation that ends ``text`` gives the value of a multiple or a sum of a variable, as ``2x = 18`` does.

    "She makes 2x = 2 * 9 = 18" and "her wins are 2x = 18" say whose value it is.
    """
    first, *middle, _ = (side.strip(" $") for side in chain.split("="))
    computed = any(re.search(r"[0-9]\s?[-+*/×]", side) for side in middle)
    said = _SAID_OF.search(text, max(0, len(text) - len(chain) - MAX_NAME), len(text) - len(chain))
    return not computed and not said and _MULTIPLE_OF_VARIABLE.fullmatch(first) is not None
