"""Finds every regular expression of the project and strings on which a backtracking one would not end.

Run as a script, it times them all and prints those that take too long.
"""

import ast
import importlib
import itertools
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

LENGTH = 25_000

LIMIT_S = 0.25
"""CPU seconds for one string: linear scans take up to 0.09, the quickest quadratic ones 0.5."""

METHODS = ("search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn")

BOUNDED = {
    "verl.verifiers.lexicon._QUANTITY": 120,
    "verl.verifiers.multiple_choice._LETTERS": 200,
}
"""Expression -> the longest text that its callers give to it."""

TAILS = ("\x00", "!", "")


class Expression(NamedTuple):
    """A regular expression and how it is used."""

    name: str
    """``module.NAME``, or ``module:line`` of a call of ``re`` itself."""
    pattern: "re.Pattern[str]"
    anchored: bool
    """Whether it is only ever matched at one position."""


def expressions() -> list[Expression]:
    """Every compiled pattern in a variable of a module, however deep in a list, and every literal given to ``re``."""
    found: list[Expression] = []
    for path in sorted((ROOT / "verl").rglob("*.py")):
        source = path.read_text()
        if "re." not in source or "import re\n" not in source:
            continue
        tree = ast.parse(source)
        name_of_module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name_of_module)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        own = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for name in own:
            uses = {
                call.func.attr for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == name
            }
            anchored = bool(uses) and uses <= {"match", "fullmatch"}
            for index, pattern in enumerate(_patterns_in(getattr(module, name, None))):
                found.append(Expression(f"{name_of_module}.{name}" + f"[{index}]" * bool(index), pattern, anchored))
        for call in calls:
            literal = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            of_re = isinstance(call.func.value, ast.Name) and call.func.value.id == "re" and call.func.attr in METHODS
            if of_re and isinstance(literal, str):
                anchored = call.func.attr in ("match", "fullmatch")
                found.append(Expression(f"{name_of_module}:{call.lineno}", re.compile(literal), anchored))
    return found


def _patterns_in(value: Any) -> Iterator["re.Pattern[str]"]:
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _patterns_in(entry)
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from _patterns_in(entry)


def hostile_strings(pattern: "re.Pattern[str]", length: int) -> Iterator[str]:
    """What each repetition of the pattern repeats, after what may stand before it and before what cannot follow."""
    seen = set()
    for before, body in _pumps(parser.parse(pattern.pattern, pattern.flags), [""]):
        for text in _strings(before, body, length):
            if text not in seen:
                seen.add(text)
                yield text


def _strings(before: str, body: str, length: int) -> Iterator[str]:
    for tail in TAILS:
        yield (before + body * (length // len(body)))[: length - 1] + tail
    block = before + body * 300 + "\x00"
    yield block * (length // len(block))
    unit = before + body
    yield unit * (length // len(unit)) + "\x00"


def _pumps(tree: Any, before: list[str]) -> Iterator[tuple[str, str]]:
    """Text before a repetition, and text that it repeats, for each repetition in ``tree``."""
    for code, argument in tree:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            low, high, body = argument
            bodies = [text for text in _samples(body) if text]
            for start, text in itertools.product(before[:2], bodies[:6]):
                if high is codes.MAXREPEAT or high > 9:
                    yield start, text
            yield from _pumps(body, before)
            before = [a + b * low for a in before[:3] for b in bodies[:2] or [""]]
            continue
        for inner in _inner(code, argument):
            yield from _pumps(inner, before)
        if code not in (codes.ASSERT, codes.ASSERT_NOT, codes.AT):
            before = [a + b for a in before[:3] for b in list(_samples([(code, argument)]))[:3]]


def _inner(code: Any, argument: Any) -> list[Any]:
    if code is codes.SUBPATTERN:
        return [argument[3]]
    if code is codes.BRANCH:
        return list(argument[1])
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [argument[1]]
    return [argument] if code is codes.ATOMIC_GROUP else []


def _samples(tree: Any) -> list[str]:
    """A few texts that ``tree`` matches."""
    texts = [""]
    for code, argument in tree:
        if code is codes.LITERAL:
            choices = [chr(argument)]
        elif code in (codes.IN, codes.ANY, codes.NOT_LITERAL):
            choices = _characters(code, argument)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            low, _, body = argument
            choices = [text * low for text in _samples(body)] if low else ["", *_samples(body)]
        elif code is codes.BRANCH:
            choices = [text for branch in argument[1] for text in _samples(branch)[:2]]
        elif code in (codes.SUBPATTERN, codes.ATOMIC_GROUP):
            choices = _samples(_inner(code, argument)[0])
        else:
            choices = [""]
        texts = [a + b for a in texts[:4] for b in choices[:8]]
    return list(dict.fromkeys(texts))


ANY_CHARACTERS = " \n\t0a5AZ_.,-\\{}()[]$*:=和"


def _characters(code: Any, argument: Any) -> list[str]:
    """Characters of a class, of each kind that it has one."""
    if code is codes.ANY:
        return ["x", " "]
    if code is codes.NOT_LITERAL:
        return [character for character in ANY_CHARACTERS if character != chr(argument)][:3]
    listed = [chr(value) for kind, value in argument if kind is codes.LITERAL]
    ranges = [chr(value[0]) for kind, value in argument if kind is codes.RANGE]
    categories = {codes.CATEGORY_SPACE: " \n", codes.CATEGORY_DIGIT: "7", codes.CATEGORY_WORD: "a0"}
    named = [c for kind, value in argument if kind is codes.CATEGORY for c in categories.get(value, ".x ")]
    if argument[0][0] is codes.NEGATE:
        excluded = set(listed)
        return [character for character in "x 0-" if character not in excluded] or ["\u00e9"]
    return [*named, *ranges, *listed][:8]


class TooSlow(Exception):
    pass


def _stop(signum: int, frame: FrameType | None) -> None:
    raise TooSlow


def check(expression: Expression) -> str | None:
    """The string on which ``expression`` takes too long, shortened; None if there is none."""
    signal.signal(signal.SIGVTALRM, _stop)
    length = BOUNDED.get(expression.name, LENGTH)
    for text in hostile_strings(expression.pattern, length):
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
        try:
            expression.pattern.match(text)
            expression.pattern.fullmatch(text)
            if not expression.anchored:
                for _ in expression.pattern.finditer(text):
                    pass
        except TooSlow:
            return f"{text[:60]!r}...{text[-5:]!r}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def main() -> None:
    slow = 0
    for expression in expressions():
        print(expression.name, end=" ", flush=True)
        text = check(expression)
        slow += text is not None
        print("ok" if text is None else f"TOO SLOW {expression.pattern.pattern!r:.80} on {text}", flush=True)
    sys.exit(slow > 0)


if __name__ == "__main__":
    main()
