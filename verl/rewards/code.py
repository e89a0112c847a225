"""Verifier that tests programs in a sandbox (``verl.utils.sandbox``) without access to the expected results.

For tests on standard input, the program runs once per test and its output is compared in this process. Assertions run
in a sandbox that does not contain the program. Names that the program defines are replaced by proxies. The proxies
forward calls, attributes and items to a second sandbox. It contains the program but no tests, and replies with values
of built-in types. The program sees the arguments of its calls, but never the expected results.
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
"""Time limit of a program in seconds, per test on standard input or for all calls together."""

FLOAT_TOLERANCE = 1e-6
"""Relative and absolute tolerance for numbers that are written with a decimal point in the expected output."""

REASONS = {"timeout": "timeout", "memory": "memory"}
"""Verdict reasons for programs that exceed a limit. All other failures have the reason ``different``."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*+([\w+.-]*+)[^\n]*+\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3")


class Tests(NamedTuple):
    """Tests from a ground truth."""

    pipes: list[tuple[str, str]]
    """Standard input and expected output of each test."""
    checks: list[tuple[str, list[str]]]
    """Source of each test with assertions, and the names used in it that the program must define."""

    @property
    def number(self) -> int:
        return len(self.pipes) + len(self.checks)


def verify_code(
    solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """Verify the program in the last fenced block. If ``quick`` is set, return None instead of running the program.

    In the verdict, ``boxed`` states whether there is a program, and ``share`` is the fraction of passed tests. Testing
    stops when the program exceeds its time or memory limit. ``extra_info`` is unused.

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
    """Return the last fenced block labeled as Python, or else the last unlabeled block, or None if there is neither."""
    blocks = [(language.lower(), code) for language, code in _BLOCK.findall(text)]
    labeled = [code for language, code in blocks if language in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return next(reversed(labeled or plain), None)


# --- tests on standard input -----------------------------------------------------------------------------------------


def _run_pipes(program: str, pipes: list[tuple[str, str]]) -> tuple[int, Ending | None]:
    """Return the number of passed tests and how the program ended in its first failed test."""
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
    """Return whether two outputs have the same words on each line, ignoring spacing and trailing empty lines."""
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

SERVER = '''
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
        value, changed = call(target, *rest) if kind == "call" else (HANDLERS[kind](target, *rest), "{}")
        literal = plain(value)
        if literal is None:
            objects.append(value)
            return f'("object", {len(objects) - 1}, {changed})'
        return f'("value", {literal}, {changed})'
    except Exception as error:
        return f'("error", {type(error).__name__!r}, {{}})'
HANDLERS = {"attribute": getattr, "item": operator.getitem, "in": operator.contains, "is": isinstance}
HANDLERS |= {"length": len, "text": str, "truth": bool, "iterate": iter, "next": next}
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
"""Source of the server in the program's sandbox. Lines that set ``PROGRAM`` and the file descriptors ``READ`` and
``WRITE`` are prepended. The server provides common imports, as programming contest websites do."""

CLIENT = '''
import ast, builtins, json, os, sys
sys.set_int_max_str_digits(0)
tests = json.load(sys.stdin)
answers, requests = os.fdopen(READ), os.fdopen(WRITE, "w", errors="backslashreplace")
num_requests, functions = 0, []
class Shown:
    """A function of the tests or of Python in the arguments of a call."""
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
    global num_requests
    num_requests += 1
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
        # A StopIteration outside of an iteration would end loops of the tests.
        ends = error is StopIteration and kind != "next"
        raise error if isinstance(error, type) and issubclass(error, Exception) and not ends else Exception
    return Remote(value) if outcome == "object" else value
class Remote:
    """Proxy of an object in the program, equal only to itself."""
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
    """Return the value as it would be after a round trip through JSON."""
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
    before = num_requests
    try:
        for name in names:
            scope[name] = getattr(program, name, *(getattr(builtins, name) for _ in [0] if hasattr(builtins, name)))
        exec(source, scope)
        passed += num_requests > before
    except BaseException:
        pass
print(f"\\n{passed}")
'''
"""Source of the program that runs tests. The program reads tests as JSON and prints the number of passed tests."""


def _run_calls(program: str, tests: Tests) -> tuple[int, Ending | None]:
    """Return the number of passed tests and, if some failed, how the program ended."""
    (requests, send_request), (replies, send_reply) = os.pipe(), os.pipe()
    client = f"READ, WRITE = {replies}, {send_request}\n{CLIENT}"
    checks = json.dumps(tests.checks)
    with ThreadPoolExecutor(1) as thread:
        testing = thread.submit(run_python, client, checks, seconds=3 * SECONDS, descriptors=(replies, send_request))
        select([requests], [], [])  # the program's time limit starts with the first request
        server = f"READ, WRITE = {requests}, {send_reply}\nPROGRAM = {program!r}\n{SERVER}"
        served = run_python(server, seconds=SECONDS, descriptors=(requests, send_reply))
        tested = testing.result()
    passed = int(tested.stdout.rsplit("\n", 2)[-2]) if tested.ending == "ok" else 0
    return passed, None if passed == len(tests.checks) else served.ending


# --- ground truths ---------------------------------------------------------------------------------------------------


def read_tests(truth: Any) -> Tests:
    """Read the tests from a ground truth, which may be JSON text.

    Valid formats are ``{"tests": [...]}`` and veRL's ``{"inputs": [...], "outputs": [...]}`` with an optional function
    name ``fn_name``. A test is text with assertions, ``{"input": ..., "output": ...}`` or ``[input, output]``.

    Raises ``ValueError`` for any other format.
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
    """Parse a test with assertions and return its source and the names that the program must define.

    These names are used in the test but are neither built in nor defined by this test or an earlier test. If there are
    no such names, the functions that the test calls are returned. Names that the test defines are added to ``known``.
    ``entry_point`` is passed to HumanEval's ``check``.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source!r:.200} is not Python: {error}") from error
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
        # The program may redefine a built-in function such as "sum".
        names = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        names -= known - set(dir(builtins))
    if not names and "solution" not in source:
        raise ValueError(f"{source!r:.200} does not test the program")
    return source, sorted(names)


def _call(function: str, arguments: Any, expected: Any) -> str:
    """Return a test that calls a function or a method of ``class Solution``. Text arguments contain JSON lines."""
    if not function.isidentifier():
        raise ValueError(f"fn_name={function!r} must be the name of a function")
    arguments = [json.loads(line) for line in arguments.split("\n")] if isinstance(arguments, str) else arguments
    expected = json.loads(expected) if isinstance(expected, str) else expected
    return f"assert _same(_function({function!r})(*{list(arguments)!r}), {expected!r})"
