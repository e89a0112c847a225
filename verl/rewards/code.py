"""Verifier of programs with tests. Programs run in a sandbox (``verl.utils.sandbox``) that holds no expected result.

A program with tests on standard input runs once for each, and its output is compared here. Assertions run in a sandbox
of their own, where the names that they take from the program stand for it: calls, attributes and items are asked of a
second sandbox, which holds the program and no test, and answers with values of built-in types. A program knows what it
is called with and says what its calls return, in whatever way; it can neither see nor reach what that is compared with.
"""

import ast
import builtins
import json
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from select import select
from typing import Any, NamedTuple

from verl.utils.sandbox import Ending, run_python
from verl.verifiers.verdict import Verdict

SECONDS = 4.0
"""Time of a program for one test on standard input, or for all its calls."""

FLOAT_TOLERANCE = 1e-6
"""Relative or absolute, of a printed number that has a decimal point in the expected output."""

REASONS = {"timeout": "timeout", "memory": "memory"}
"""How a program ended that failed -> the reason of its verdict, else ``different``."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*+([\w+.-]*+)[^\n]*+\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3")


class Tests(NamedTuple):
    """The tests that a ground truth holds for a program."""

    pipes: list[tuple[str, str]]
    """Standard input and expected output."""
    checks: list[tuple[str, list[str]]]
    """Source of each test with assertions, and the names in it that are the program's."""

    @property
    def number(self) -> int:
        return len(self.pipes) + len(self.checks)


def verify_code(
    solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """Verify the program in the last fenced block of a response; with ``quick``, return None if there is one.

    ``boxed`` says whether there is a block. ``share`` is the share of tests that pass; none is tried after the program
    has once run out of time or memory. ``extra_info`` is not used.

    Raises ``ValueError`` for a ground truth without tests.
    """
    tests = ground_truth if isinstance(ground_truth, Tests) else read_tests(ground_truth)
    program = extract_program(solution)
    if program is None:
        return Verdict(False, False, "missing", share=0.0)
    if quick:
        return None
    passed, failure = _run_pipes(program, tests.pipes)
    if failure not in REASONS and tests.checks:
        more, failure_of_calls = _run_calls(program, tests)
        passed, failure = passed + more, failure or failure_of_calls
    correct = passed == tests.number
    reason = "exact" if correct else REASONS.get(failure or "", "different")
    extras = {"tests": tests.number, "tests_passed": passed}
    return Verdict(correct, True, reason, program, share=passed / tests.number, extras=extras)


def extract_program(text: str) -> str | None:
    """Return the last fenced block marked as Python, else the last one without a mark; None without such a block."""
    blocks = [(language.lower(), code) for language, code in _BLOCK.findall(text)]
    marked = [code for language, code in blocks if language in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return next(reversed(marked or plain), None)


# --- tests on standard input -----------------------------------------------------------------------------------------


def _run_pipes(program: str, pipes: list[tuple[str, str]]) -> tuple[int, Ending | None]:
    """How many tests the program passed, and how it ended where it first failed."""
    passed, failure = 0, None
    for stdin, expected in pipes:
        ending, stdout, _ = run_python(program, stdin, seconds=SECONDS)
        if ending == "ok" and same_output(stdout, expected):
            passed += 1
        else:
            failure = failure or ending
        if ending in REASONS:
            break
    return passed, failure


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines; blanks and empty lines at the end do not count."""
    lines = (text.rstrip().splitlines() for text in (printed, expected))
    return all(
        a is not None and b is not None and all(_same_word(x, y) for x, y in zip_longest(a.split(), b.split()))
        for a, b in zip_longest(*lines)
    )


def _same_word(word: str | None, expected: str | None) -> bool:
    if word == expected:
        return True
    if word is None or expected is None or "." not in expected or max(len(word), len(expected)) > 64:
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except ValueError:
        return False


# --- assertions and calls --------------------------------------------------------------------------------------------

ANSWERS = '''
import operator, os, sys, types, typing
def text(value):
    """A value of built-in types as a literal."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None or isinstance(value, bool):
        return repr(value)
    for kind in (int, str, bytes):
        if isinstance(value, kind):
            return kind.__repr__(value)
    for kind in (float, complex):
        if isinstance(value, kind):
            return kind.__repr__(value).replace("inf", "1e999")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(key)}: {text(item)}" for key, item in value.items()) + "}"
    for kind, (start, end) in {list: "[]", tuple: ("(", ",)"), set: "{}", frozenset: "{}"}.items():
        if isinstance(value, kind):
            inner = ", ".join(map(text, value))
            return start + inner + end if inner else f"{kind.__name__}()" if start == "{" else start + end[-1]
    raise TypeError(type(value))
def called_back(number):
    def function(*arguments):
        print(f'("call", {number}, {text(arguments)})', file=answers, flush=True)
        return eval(requests.readline(), scope)
    return function
def call(function, arguments, named):
    before = [*map(plain, arguments)]
    value = function(*arguments, **named)
    changed = [i for i, was in enumerate(before) if was and was != plain(arguments[i])]
    return value, "{" + ", ".join(f"{i}: {plain(arguments[i])}" for i in changed) + "}"
def plain(value):
    try:
        return text(value)
    except TypeError:
        return None
def answer(request):
    try:
        kind, target, *rest = eval(request, scope)
        value, changed = call(target, *rest) if kind == "call" else (ASKED[kind](target, *rest), "{}")
        literal = plain(value)
        if literal is None:
            objects.append(value)
            return f'("object", {len(objects) - 1}, {changed})'
        return f'("value", {literal}, {changed})'
    except Exception as error:
        return f'("error", {type(error).__name__!r}, {{}})'
ASKED = {"attribute": getattr, "item": operator.getitem, "in": operator.contains, "is": isinstance}
ASKED |= {"length": len, "text": str, "truth": bool, "iterate": iter, "next": next}
sys.set_int_max_str_digits(0)
requests, answers = os.fdopen(READ), os.fdopen(WRITE, "w", errors="backslashreplace")
module = sys.modules["solution"] = types.ModuleType("solution")
objects = [module]
for name in "bisect collections functools heapq itertools math random re string".split():
    setattr(module, name, __import__(name))
for name in "Any Callable Deque Dict FrozenSet Iterable Iterator List Optional Sequence Set Tuple Union".split():
    setattr(module, name, getattr(typing, name))
for name in "Counter OrderedDict defaultdict deque".split():
    setattr(module, name, getattr(module.collections, name))
scope = {**module.__dict__, "_objects": objects, "_called_back": called_back, "inf": 1e999, "nan": -(1e999 - 1e999)}
exec(compile(PROGRAM, "solution.py", "exec"), module.__dict__)
while request := requests.readline():
    print(answer(request), file=answers, flush=True)
os._exit(0)
'''
"""Runs with the program, after lines that set ``PROGRAM`` and the descriptors ``READ`` and ``WRITE``. Programs of
functions may leave out the usual imports, as on the sites that set such tasks."""

JUDGE = '''
import ast, builtins, json, os, sys
sys.set_int_max_str_digits(0)
tests = json.load(sys.stdin)
answers, requests = os.fdopen(READ), os.fdopen(WRITE, "w", errors="backslashreplace")
asked, functions = 0, []
class Shown:
    """What stands for a function of the tests or of Python where the program is called with it."""
    def __init__(self, function):
        self.name = getattr(function, "__name__", "")
        if getattr(builtins, self.name, None) is not function:
            self.name = f"_called_back({len(functions)})"
            functions.append(function)
    def __repr__(self): return self.name
def exchange(message):
    print(message, file=requests, flush=True)
    return ast.literal_eval(answers.readline())
def ask(kind, target, *rest):
    global asked
    asked += 1
    outcome, value, changed = exchange(repr((kind, target, *rest)))
    while outcome == "call":
        try:
            returned = repr(functions[value](*changed))
        except Exception:
            returned = "1/0"
        outcome, value, changed = exchange(returned)
    for place, new in changed.items():
        old = rest[0][place]
        if isinstance(old, list):
            old[:] = new
        elif isinstance(old, (dict, set)):
            old.clear()
            old.update(new)
    if outcome == "error":
        error = getattr(builtins, value, Exception)
        # Where nothing is iterated, it would end the tests' own loops.
        ends = error is StopIteration and kind != "next"
        raise error if isinstance(error, type) and issubclass(error, Exception) and not ends else Exception
    return Remote(value) if outcome == "object" else value
class Remote:
    """Something of the program; equal to itself alone."""
    def __init__(self, number): self.__dict__["number"] = int(number)
    def __repr__(self): return f"_objects[{self.number}]"
    def __str__(self): return ask("text", self)
    def __call__(self, *arguments, **named):
        return ask("call", self, [Shown(a) if callable(a) and type(a) is not Remote else a for a in arguments], named)
    def __getattr__(self, name): return ask("attribute", self, name)
    def __setattr__(self, name, value): raise AttributeError(name)
    def __getitem__(self, key): return ask("item", self, key)
    def __contains__(self, item): return ask("in", self, item)
    def __instancecheck__(self, value): return ask("is", value, self)
    def __len__(self): return ask("length", self)
    def __bool__(self): return ask("truth", self)
    def __iter__(self): return Iterated(ask("iterate", self).number)
    def __next__(self): return ask("next", self)
class Iterated(Remote):
    def __iter__(self): return self
def plain(value):
    """As JSON has it."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
def same(value, expected):
    value, expected = plain(value), plain(expected)
    return value == expected or (isinstance(expected, list) and len(expected) == 1 and value == expected[0])
program = sys.modules["solution"] = Remote(0)
def function(name):
    return getattr(program.Solution() if hasattr(program, "Solution") else program, name)
scope = {"_same": same, "_function": function}
passed = 0
for source, names in tests:
    before = asked
    try:
        for name in names:
            scope[name] = getattr(program, name, *(getattr(builtins, name) for _ in [0] if hasattr(builtins, name)))
        exec(source, scope)
        passed += asked > before
    except BaseException:
        pass
print(f"\\n{passed}")
'''
"""Reads tests as JSON; the last line that it prints is how many have passed."""


def _run_calls(program: str, tests: Tests) -> tuple[int, Ending | None]:
    (asks, asked), (answers, answered) = os.pipe(), os.pipe()
    judge = f"READ, WRITE = {answers}, {asked}\n{JUDGE}"
    with ThreadPoolExecutor(1) as thread:
        judging = thread.submit(
            run_python, judge, json.dumps(tests.checks), seconds=3 * SECONDS, descriptors=(answers, asked)
        )
        select([asks], [], [])  # the program's time begins with the first question
        answering = f"READ, WRITE = {asks}, {answered}\nPROGRAM = {program!r}\n{ANSWERS}"
        called = run_python(answering, seconds=SECONDS, descriptors=(asks, answered))
        judged = judging.result()
    passed = int(judged.stdout.rsplit("\n", 2)[-2]) if judged.ending == "ok" else 0
    return passed, None if passed == len(tests.checks) else called.ending


# --- ground truths ---------------------------------------------------------------------------------------------------


def read_tests(truth: Any) -> Tests:
    """Read the tests of a ground truth, which may be JSON text.

    ``{"tests": [...]}`` with assertions as text, ``{"input": ..., "output": ...}``, or pairs of these two; or veRL's
    ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for a function instead of standard input.

    Raises ``ValueError`` for anything else.
    """
    truth = json.loads(truth) if isinstance(truth, str) else truth
    if not isinstance(truth, Mapping):
        raise ValueError(f"{truth!r:.200} must be a mapping with tests, or with inputs and outputs")
    inputs, outputs = truth.get("inputs") or [], truth.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(f"has {len(inputs)} inputs and {len(outputs)} outputs; give one output for each input")
    tests = [*(truth.get("tests") or []), *(truth.get("assert_case") or [])]
    pipes, checks = list[tuple[str, str]](), list[tuple[str, list[str]]]()
    for one_input, output in zip(inputs, outputs, strict=True):
        if truth.get("fn_name"):
            checks.append((_call(str(truth["fn_name"]), one_input, output), []))
        else:
            pipes.append((_lines(one_input), _lines(output)))
    known = set(dir(builtins))
    for test in tests:
        if isinstance(test, str):
            checks.append(_assertions(test, known, truth.get("entry_point")))
        else:
            pair = (test.get("input"), test.get("output")) if isinstance(test, Mapping) else tuple(test)
            if len(pair) != 2 or None in pair:
                raise ValueError(f"{test!r:.200} must be assertions, or an input and an output")
            pipes.append((_lines(pair[0]), _lines(pair[1])))
    if not pipes and not checks:
        raise ValueError(f"{truth!r:.200} has no tests; remove the row")
    return Tests(pipes, checks)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _assertions(source: str, known: set[str], entry_point: str | None) -> tuple[str, list[str]]:
    """Parse a test with assertions, and the names in it that are the program's.

    These are all that neither the tests define nor Python has, or else what it calls. Names that it defines are added
    to ``known``.

    A function ``check(candidate)``, as HumanEval has it, is called with the function ``entry_point``.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source!r:.200} is no Python: {error}") from error
    nodes = [*ast.walk(tree)]
    if not any(isinstance(node, ast.Assert) for node in nodes):
        raise ValueError(f"{source!r:.200} has no assert statement")
    if entry_point is not None:
        source, nodes = f"{source}\ncheck({entry_point})", [*nodes, ast.Name(entry_point, ast.Load())]
    known |= {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name
    }
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    modules = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    known |= {(alias.asname or alias.name).split(".")[0] for node in modules for alias in node.names}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - known
    if not names and not any(getattr(node, "module", None) == "solution" for node in modules):
        # The program's function may be called "sum".
        names = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        names -= known - set(dir(builtins))
    if not names and "solution" not in source:
        raise ValueError(f"{source!r:.200} tests nothing of the program")
    return source, sorted(names)


def _call(function: str, arguments: Any, expected: Any) -> str:
    """Parse a call of a function, or of a method of ``class Solution``; as text, arguments are lines of JSON."""
    if not function.isidentifier():
        raise ValueError(f"fn_name={function!r} must be the name of a function")
    arguments = [json.loads(line) for line in arguments.split("\n")] if isinstance(arguments, str) else arguments
    expected = json.loads(expected) if isinstance(expected, str) else expected
    return f"assert _same(_function({function!r})(*{list(arguments)!r}), {expected!r})"
