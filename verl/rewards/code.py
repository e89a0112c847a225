"""Verifier of programs with tests. Programs run in a sandbox (``verl.utils.sandbox``) that holds no expected result.

A program with tests on standard input runs once for each, and its output is compared here. Assertions and calls take
two sandboxes: in the first the program runs, and the values of its calls leave as text. In the second, without the
program, they take the place of the calls. So printing, exiting, or objects that equal everything pass no test.
"""

import ast
import builtins
import json
import math
import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from verl.rewards.score import Verdict
from verl.utils.sandbox import Ending, run_python

SECONDS = 4.0
"""Time of a program for one test on standard input, or for all its calls."""

FLOAT_TOLERANCE = 1e-6
"""Relative or absolute, of a printed number that has a decimal point in the expected output."""

REASONS = {"timeout": "timeout", "memory": "memory"}
"""How a program ended that failed -> the reason of its verdict, else ``different``."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*+([\w+.-]*+)[^\n]*+\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3")


class Tests(NamedTuple):
    """What a ground truth asks of a program."""

    pipes: list[tuple[str, str]]
    """Standard input and expected output."""
    steps: list[tuple[str, bool]]
    """What runs with the program: source, and whether its value is kept, under its index, rather than executed."""
    checks: list[list[str]]
    """For each test what it compares with, and assertions in which ``_value_<index>`` stands for a value."""
    imports: list[str]
    """Statements before the assertions."""

    @property
    def number(self) -> int:
        return len(self.pipes) + len(self.checks)


def verify_code(
    solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on the program in the last fenced block of a response; with ``quick``, None if there is one.

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
    """The last fenced block marked as Python, else the last one without a mark; None without such a block."""
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

RUN_CALLS = '''
import ast, os, sys, types, typing
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
def plain(value):
    """A value of built-in types, which has no methods of the program; iterators become lists."""
    return ast.literal_eval(text(list(value) if hasattr(value, "__next__") else value))
sys.set_int_max_str_digits(0)
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
module = sys.modules["solution"] = types.ModuleType("solution")
for name in "bisect collections functools heapq itertools math random re string".split():
    setattr(module, name, __import__(name))
for name in "Any Callable Deque Dict FrozenSet Iterable Iterator List Optional Sequence Set Tuple Union".split():
    setattr(module, name, getattr(typing, name))
for name in "Counter OrderedDict defaultdict deque".split():
    setattr(module, name, getattr(module.collections, name))
exec(compile(PROGRAM, "solution.py", "exec"), module.__dict__)
for index, (source, is_value) in enumerate(STEPS):
    module.__dict__["_plain"] = plain
    try:
        if is_value:
            print(index, text(eval(source, module.__dict__)), file=results, flush=True)
        else:
            exec(source, module.__dict__)
    except Exception as error:
        print(f"{source}: {error!r}", file=sys.stderr)
'''
"""Runs after lines that set ``PROGRAM`` and ``STEPS``; prints values as ``<index> <literal>``. Programs of functions
may leave out the usual imports, as on the sites that set such tasks."""

JUDGE = '''
import ast, json, sys
def plain(value):
    """As JSON has it."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
def same(value, expected):
    value, expected = plain(value), plain(expected)
    return value == expected or (isinstance(expected, list) and len(expected) == 1 and value == expected[0])
sys.set_int_max_str_digits(0)
imports, values, tests = json.load(sys.stdin)
scope = {"_same": same}
for index, literal in values.items():
    try:
        scope[f"_value_{index}"] = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
exec("\\n".join(imports), scope)
passed = 0
for checks in tests:
    try:
        exec("\\n".join(checks), scope)
        passed += 1
    except Exception:
        pass
print(f"\\n{passed}")
'''
"""Reads imports, values and assertions as JSON; the last line that it prints is how many tests have passed."""


def _run_calls(program: str, tests: Tests) -> tuple[int, Ending | None]:
    called = run_python(f"PROGRAM = {program!r}\nSTEPS = {tests.steps!r}\n{RUN_CALLS}", seconds=SECONDS)
    values = dict(line.split(" ", 1) for line in called.stdout.split("\n") if re.match(r"[0-9]{1,6} ", line))
    judged = run_python(JUDGE, json.dumps([tests.imports, values, tests.checks]), seconds=SECONDS)
    passed = int(judged.stdout.rsplit("\n", 2)[-2]) if judged.ending == "ok" else 0
    return passed, None if passed == len(tests.checks) else called.ending


# --- ground truths ---------------------------------------------------------------------------------------------------


def read_tests(truth: Any) -> Tests:
    """The tests of a ground truth, which may be JSON text.

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
    cutter = _CallCutter(_kept_back([test for test in tests if isinstance(test, str)]))
    pipes, checks = list[tuple[str, str]](), list[list[str]]()
    for one_input, output in zip(inputs, outputs, strict=True):
        if truth.get("fn_name"):
            checks.append(cutter.call(str(truth["fn_name"]), one_input, output))
        else:
            pipes.append((_lines(one_input), _lines(output)))
    for test in tests:
        if isinstance(test, str):
            checks.append(cutter.assertions(test))
        else:
            pair = (test.get("input"), test.get("output")) if isinstance(test, Mapping) else tuple(test)
            if len(pair) != 2 or None in pair:
                raise ValueError(f"{test!r:.200} must be assertions, or an input and an output")
            pipes.append((_lines(pair[0]), _lines(pair[1])))
    if not pipes and not checks:
        raise ValueError(f"{truth!r:.200} has no tests; remove the row")
    return Tests(pipes, cutter.steps, checks, cutter.imports)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


_CHAIN = (ast.Call, ast.Attribute, ast.Subscript, ast.Name)
_CONVERSIONS = ("dict", "len", "list", "next", "set", "sorted", "str", "tuple")
"""Built-in functions that are called with the program: they may turn an object of its own into a value."""
_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _kept_back(sources: list[str]) -> frozenset[str]:
    """Names that tests define without the program and only compare with, as in ``expected = 4``."""
    others = [node for source in sources for node in _statements(source) if not isinstance(node, ast.Assert)]
    names = frozenset(name for node in others for name in _defined(node))
    while True:
        cutter = _CallCutter(names)
        used = {name for node in others if not cutter.keeps_back(node) for name in _named(node)}
        if not names & used:
            try:
                for source in sources:
                    cutter.assertions(source)
            except ValueError:  # an assertion on nothing but such names
                return frozenset()
            used = {name for step, _ in cutter.steps for name in _named(ast.parse(step))}
        if not names & used:
            return names
        names -= used


def _statements(source: str) -> list[ast.stmt]:
    """The statements of a test; a loop over assertions is one assertion. Raises ``ValueError`` if it is no Python."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source!r:.200} is no Python: {error}") from error
    for place, node in enumerate(statements):
        asserts = [one.test for one in node.body if isinstance(one, ast.Assert)] if isinstance(node, ast.For) else []
        if isinstance(node, ast.For) and len(asserts) == len(node.body) and not node.orelse:
            scope = [ast.comprehension(node.target, node.iter, [], 0)]
            every = ast.GeneratorExp(ast.BoolOp(ast.And(), asserts) if len(asserts) > 1 else asserts[0], scope)
            statements[place] = ast.Assert(ast.Call(ast.Name("all", ast.Load()), [every], []))
    return statements


def _defined(node: ast.stmt) -> list[str]:
    """The names that an assignment or a function definition defines; none for other statements."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _named(node: ast.AST) -> set[str]:
    """All names in a piece of a program, those that it defines included."""
    inner = [*ast.walk(node)]
    return {one.id for one in inner if isinstance(one, ast.Name)} | {
        one.name for one in inner if isinstance(one, ast.FunctionDef)
    }


def _bound(node: ast.AST) -> set[str]:
    """The names that an expression or function gives values itself."""
    stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return stored | {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}


class _CallCutter(ast.NodeTransformer):
    """Replaces what an assertion takes from the program by names of values: ``f(2) == 4`` by ``_value_0 == 4``.

    That is every longest chain of calls, attributes and subscripts that begins with a name that is neither built in nor
    imported by the tests, such as ``Solution().solve([1])[0]``, conversions included (``list(primes(9))``). A
    comprehension with such a name is taken as a whole, and what it takes from the program are plain values there.

    Args:
        kept_back: names whose definitions go to the assertions, so that the program does not see them.
    """

    def __init__(self, kept_back: frozenset[str] = frozenset()) -> None:
        self.steps: list[tuple[str, bool]] = []
        self.imports: list[str] = []
        self._kept_back = kept_back
        self._known = set(dir(builtins)) | kept_back
        self._within = False

    def assertions(self, source: str) -> list[str]:
        """The assertions of a test, and its other statements added to ``steps``."""
        checks, asserts = [], 0
        for statement in _statements(source):
            if isinstance(statement, ast.Assert):
                checks.append(ast.unparse(ast.Assert(self._cut(statement.test))))
                asserts += 1
                continue
            text = ast.unparse(statement)
            if self.keeps_back(statement):
                checks.append(text)
                continue
            self.steps.append((text, False))
            if isinstance(statement, ast.Import | ast.ImportFrom) and getattr(statement, "module", "") != "solution":
                self.imports.append(text)
                self._known |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        if not asserts:
            raise ValueError(f"{source!r:.200} has no assert statement outside a function")
        return checks

    def keeps_back(self, node: ast.stmt) -> bool:
        """Whether a statement only defines such names, with nothing of the program."""
        defined = {*_defined(node)}
        return bool(defined) and defined <= self._kept_back and _named(node) - _bound(node) <= self._known

    def call(self, function: str, arguments: Any, expected: Any) -> list[str]:
        """A call of a function, or of a method of ``class Solution``; as text, arguments are lines of JSON."""
        if not function.isidentifier():
            raise ValueError(f"fn_name={function!r} must be the name of a function")
        arguments = [json.loads(line) for line in arguments.split("\n")] if isinstance(arguments, str) else arguments
        expected = json.loads(expected) if isinstance(expected, str) else expected
        called = f"(Solution().{function} if 'Solution' in globals() else {function})(*{list(arguments)!r})"
        return [f"assert _same({self._keep(called)}, {expected!r})"]

    def _cut(self, test: ast.expr) -> ast.expr:
        """The test of an assertion with names of values. Raises ``ValueError`` if it takes none from the program."""
        known, steps = self._known, len(self.steps)
        test = self.visit(test)
        if len(self.steps) == steps:  # the program's function may be called "sum"
            self._known = known - set(dir(builtins))
            test, self._known = self.visit(test), known
        if len(self.steps) == steps:
            raise ValueError(f"assert {ast.unparse(test):.200} tests nothing of the program")
        return test

    def visit(self, node: ast.AST) -> Any:
        root = node
        while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
            if isinstance(root, ast.Call):
                converts = isinstance(root.func, ast.Name) and root.func.id in _CONVERSIONS and root.args
                root = root.args[0] if converts else root.func
            else:
                root = root.value
        if self._within and isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "hasattr"):
            return node  # about objects of the program
        if isinstance(node, _CHAIN) and isinstance(root, ast.Name) and root.id not in self._known:
            if not self._within:
                return ast.Name(self._keep(ast.unparse(node)))
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            return node if stored else ast.Call(ast.Name("_plain"), [node], [])
        if isinstance(node, _SCOPES) and not self._within:
            if _named(node) <= _bound(node) | self._known:
                return node
            whole = ast.ListComp(node.elt, node.generators) if isinstance(node, ast.GeneratorExp) else node
            self._within = True
            self.generic_visit(whole)
            self._within = False
            return ast.Name(self._keep(ast.unparse(whole)))
        if isinstance(node, ast.comprehension):
            node.ifs = [self.visit(condition) for condition in node.ifs]
            return node  # objects of the program may be iterated
        return self.generic_visit(node)

    def _keep(self, expression: str) -> str:
        """Add an expression to ``steps``; the name of its value."""
        self.steps.append((expression, True))
        return f"_value_{len(self.steps) - 1}"
