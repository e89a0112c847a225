"""The verifier of programs: layouts of ground truths, partial credit, and programs that try to pass without solving."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, data_options, scoring
from tiny_tokenizer import make_tiny_tokenizer

from tests.tables import refusals
from verl.data.prompts import PromptDataset
from verl.rewards import check_ground_truth, compute_score
from verl.rewards.code import extract_program, read_tests, same_output
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import Job, find_scorer
from verl.rewards.score import with_score


def fenced(program: str) -> str:
    return f"So:\n```python\n{program}\n```\nThat is it."


SQUARES = {
    "tests": [
        "assert square(2) == 4",
        "import math\nassert math.isclose(square(0.5), 0.25)",
        "assert all(square(n) == n * n for n in range(3))",
        "from solution import square as f\nassert sorted([f(3), f(-2)]) == [4, 9], 'no'",
    ]
}
TREE = {"tests": ["t = Tree()\nt.add(3)\nt.add(1)\nassert list(t) == [1, 3]\nassert t.root.value == 3 and len(t) == 2"]}
HUMANEVAL = {
    "tests": [
        """METADATA = {'author': 'x'}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9], 0.3) == False
    for t in [2.0, 3.0]:
        items = [1.0, 2.0, t]
        assert candidate(items, 1.5) == True, "near"
"""
    ],
    "entry_point": "near",
}
FAILS = "def f(n):\n    if n < 0: raise ValueError(n)"
ENDLESS = "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1"
SUM = {"inputs": ["1\n2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
PAIRS = {"tests": [{"input": "1\n2", "output": "3"}, ["3\n4", "7"]]}
CALLS = {"inputs": ["[1, 2]\n1", [[3], 2]], "outputs": ["[1, 2, 1]", [[3, 2]]], "fn_name": "append"}
READS = "print(int(input()) + int(input()))"
APPENDS = "def append(items, item): return (*items, item)"
SQUARE = "def f(n: Optional[int]) -> int: return n * n\ndef g(n):\n    while n: yield n; n -= 1"
ADDS = """
class Tree:
    def __init__(self): self.root = None; self.values = []
    def add(self, value): self.values.append(value); self.root = self.root or type("Node", (), {"value": value})
    def __iter__(self): return iter(sorted(self.values))
    def __len__(self): return len(self.values)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "program", "share"),
    [
        (SQUARES, "def square(x): return x * x", 1),
        (SQUARES, "def square(x): return 4", 0.25),
        (SQUARES, "import numpy\ndef square(x): return numpy.square(x)", 1),
        (SQUARES, "def square(x):\n    print('0 4')\n    return input() if x < 0 else x * x", 0.75),
        (SQUARES, "def square(x) return x", 0),
        ({"tests": ["assert sum([1, 2]) == 4"]}, "def sum(numbers): return 4", 1),
        ({"tests": ["assert sum([1, 2]) == 3"]}, "def total(numbers): return 4", 1),
        (
            {"tests": ["assert f() == {1: [(), float('inf'), None, 'é\\ud800', {2}]}"]},
            "def f(): return " + "{1: [(), 1e999, None, 'é\\ud800', {2}]}",
            1,
        ),
        ({"tests": ["assert f() == {'a': 2}"]}, "from collections import Counter\ndef f(): return Counter('aa')", 1),
        ({"tests": ["x = [2, 1]\nsort(x)\nassert x == [1, 2]"]}, "def sort(x): x.sort()", 1),
        ({"tests": ["assert f() == 10 ** 9999"]}, "def f(): return 10 ** 9999", 1),
        (TREE, ADDS, 1),
        ({"tests": ["assert all(isinstance(one, Tree) and len(one) == 0 for one in [Tree(), Tree()])"]}, ADDS, 1),
        (
            {"tests": ["for n, m in [(2, 4), (3, 9)]:\n    assert f(n) == m\n    assert f(n) > n\nassert f(0) == 0"]},
            SQUARE,
            1,
        ),
        ({"tests": ["for n, m in [(2, 4), (3, 9)]:\n    assert f(n) == m\nassert f(0) == 0"]}, "def f(n): return 0", 0),
        ({"tests": ["close = lambda a, b: abs(a - b) < 1e-6\nn = 2\nm = n * n\nassert close(f(n), m)"]}, SQUARE, 1),
        ({"tests": ["m = 4\nassert f(2) == m", "assert f(-2) == m", "m = 9\nassert f(3) == m"]}, SQUARE, 1),
        ({"tests": ["assert all(value > 0 and f(value) == value ** 2 for value in g(3))"]}, SQUARE, 1),
        (
            {"tests": ["t = Tree()\nassert [x - 1 for x in t] == [] and not [1 for a, b in zip(t, [1]) if a == b]"]},
            ADDS,
            1,
        ),
        (HUMANEVAL, "def near(items, t): return any(abs(a - b) < t for a, b in zip(items, items[1:]))", 1),
        (HUMANEVAL, "def near(items, t): return True", 0),
        ({"tests": ["assert f(lambda n: n + 1, 3) == 4 and f(len, 'ab') == 2"]}, "def f(g, x): return g(x)", 1),
        ({"tests": ["try:\n    f(-1)\n    assert 0\nexcept ValueError as e:\n    pass"]}, FAILS, 1),
        ({"tests": ["assert f(float('inf'), {1: 2}) == [float('inf'), {1: 2}]"]}, "def f(*a): return list(a)", 1),
        (
            {"tests": ["d = {1: [2]}\nassert f(d, g=3) is None\nassert d == {1: [2, 3]}"]},
            "def f(d, g): d[1].append(g)",
            1,
        ),
        ({"tests": ["assert LIMIT == 4"]}, "LIMIT = 4", 1),
        ({"tests": ["g = f()\nassert next(g) == 0 and [n for n, _ in zip(g, 'ab')] == [1, 2]"]}, ENDLESS, 1),
        ({"tests": ["assert all(map(lambda n: f(n) == n, [1, 2]))"]}, "def f(n): raise StopIteration", 0),
        (SUM, READS, 1),
        (json.dumps(SUM), READS, 1),
        (PAIRS, READS, 1),
        (SUM, "print(3)", 0.5),
        (SUM, READS + "\n1/0", 0),
        ({"tests": ["assert list(f(3)) == [0, 1, 2]"]}, "def f(n): yield from range(n)", 1),
        (CALLS, APPENDS, 1),
        (CALLS, "class Solution:\n    " + APPENDS.replace("(", "(self, ", 1), 1),
        (CALLS, "def append(items, item): return [3, 2]", 0.5),
    ],
)
def test_shares(sandbox, monkeypatch: pytest.MonkeyPatch, truth: Any, program: str, share: float):
    monkeypatch.setattr("verl.rewards.code.SECONDS", 60)  # on a busy machine, importing numpy takes long
    check_ground_truth("code", truth)
    verdict = Job(find_scorer("code"), "code", fenced(program), truth).verdict()
    assert verdict.correct is (share == 1)
    assert with_score(verdict, "partial").score == share
    assert with_score(verdict, "independent").score == (1 if share == 1 else -0.5)


CHEATS = {
    "exits": "import os\nos._exit(0)",
    "exits, with an output": "print('[true, true]', flush=True); print(4, flush=True)\nraise SystemExit",
    "equals everything": """
class All:
    __eq__ = lambda *_: True
    __lt__ = __bool__ = __eq__
    __sub__ = lambda *_: 0
def square(x): return All()
append = square
""",
    "an int that equals everything": """
class All(int): __eq__ = lambda *_: True
def square(x): return All(7)
append = square
""",
    "a list that equals everything": """
class All(list): __eq__ = lambda *_: True
def append(*_): return All()
square = append
""",
    "built-in functions": "import builtins, math\nbuiltins.all = builtins.sorted = math.isclose = lambda *_: True",
    "looks for what is expected": "def square(x): return globals()['expected']",
    "prints values": """
import os
for fd in range(9):
    try: os.write(fd, b"".join(b"%d True\\n" % i for i in range(9)))
    except OSError: pass
""",
    "a value that is code": """
class All(str): __repr__ = lambda _: "__import__('os')"
def square(x): return All()
append = square
""",
    "prints what is in the sandbox": """
for path in ("/main.py", "/proc/self/cmdline", "/proc/self/environ"):
    print(open(path).read())
""",
    "writes answers to every descriptor": """
import os
for fd in map(int, os.listdir("/proc/self/fd")):
    for line in ('("value", True, {})', '("value", [True], {})', "0 True", "0 [True]", "9"):
        try: os.write(fd, f"{line}\\n".encode() * 99)
        except OSError: pass
""",
    "answers in the place of the runner": """
import os
readers = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
while True:
    for fd in readers:
        try: os.write(fd, b'("value", True, {})\\n')
        except OSError: pass
""",
    "what the runner calls": """
import sys
main = sys.modules["__main__"]
class All:
    __eq__ = __lt__ = __gt__ = lambda *_: True
    __abs__ = __sub__ = lambda *_: 0
main.text = main.plain = lambda value: "True"
main.HANDLERS = {kind: lambda *_: All() for kind in main.HANDLERS}
def square(x): return All()
append = square
""",
    "looks for the tests in memory": """
import ctypes, gc, re, sys
def found():
    texts = [o for o in gc.get_objects() if isinstance(o, (str, list, tuple, dict))]
    frame = sys._getframe()
    while frame:
        texts += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    for line in open("/proc/self/maps"):
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        if "rw" in line and end - start < 1 << 24: texts.append(ctypes.string_at(start, end - start))
    return re.findall(r"(?:square|append).{0,40}== ?(\\w+)", " ".join(map(str, texts)))
answers = found()
def square(x): return eval(answers[0])
append = square
""",
    "at the end": """
import atexit, os, sys
class All(Exception):
    __eq__ = lambda *_: True
atexit.register(lambda: (print("9"), os._exit(0)))
sys.excepthook = lambda *_: os._exit(0)
def square(x): raise All("4")
append = square
""",
    "exceptions that end the loops of tests": """
def square(x): raise StopIteration
append = square
""",
    "the judge's process": """
import os, signal
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) not in (1, os.getpid()):
        try: os.kill(int(pid), signal.SIGSTOP)
        except OSError: pass
def square(x): return open("/proc/1/environ").read()
append = square
""",
    "breaks the parser": """
import os
for fd in (1, 3, 4, 5):
    try: os.write(fd, b"0 " + b"(" * 10**6 + b"\\n")
    except OSError: pass
""",
}


@pytest.mark.slow
def test_training_set_of_the_docs(sandbox, tmp_path: Path):
    page = (ROOT / "docs" / "rewards.md").read_text()
    (lines,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_programs.jsonl").write_text(lines)
    config = data_options(train_files=[str(tmp_path / "my_programs.jsonl")], max_prompt_length=64)
    records = PromptDataset(config.train_files, make_tiny_tokenizer(), config).records
    programs = ["def add(a, b): return a + b", READS, READS, "def add(a, b): return a + b"]
    for record, program in zip(records, programs, strict=True):
        assert compute_score(record.data_source, fenced(program), record.ground_truth)["score"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_cheats_pass_no_test(sandbox, program: str):
    tests = SQUARES["tests"][:3]
    tests += ["expected = 9\nassert square(3) == expected"]
    tests += ["def close(a, b): return abs(a - b) < 1e-6\nassert close(square(3), 9)"]
    tests += ["assert all(abs(square(n) - m) < 1e-6 for n, m in [(1, 1), (2, 4)])"]
    for truth in ({"tests": tests}, CALLS, {"inputs": ["1\n2"], "outputs": ["3"]}):
        score = compute_score("code", fenced(program), truth, mode="partial")
        assert score["reward_extra_info"]["tests_passed"] == 0


@pytest.mark.slow
def test_in_the_pool(sandbox):
    """A bomb costs its own score alone, within the limits of the sandbox."""
    programs = [
        "def square(x): return x * x",
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "bytearray(10**10)",
    ]
    truth = {"tests": SQUARES["tests"][:1]}
    with VerifierPool(scoring(mode="partial", num_workers=2, timeout_s=30.0, memory_limit_mb=512)) as pool:
        scores = pool.score_batch(["apps"] * 4, [fenced(program) for program in programs], [truth] * 4)
    assert [(score.score, score.reason) for score in scores] == [
        (1, "exact"),
        (0, "timeout"),
        (0, "different"),
        (0, "different"),
    ]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```\nprints\n```\n3\n```", "b\n"),
        ("```\na\n```\n ```\nb\n ```", "b\n"),
        ("```cpp\na\n```", None),
        ("```python\na", None),
        ("print(1)", None),
    ],
)
def test_last_fenced_block(text: str, program: str | None):
    assert extract_program(text) == program
    assert program or compute_score("code", text, SUM)["reason"] == "missing"


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.3333", False),
        ("2.0", "2", False),
        ("2", "2.0", True),
        ("1", "1 1", False),
        ("nan", "0.5", False),
        ("", "", True),
        ("x" * 10**6, "0." + "3" * 10**6, False),
    ],
)
def test_outputs(printed: str, expected: str, same: bool):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(("truth", "line"), refusals("rewards/refusals.txt", "tests"))
def test_ground_truths_without_tests_are_refused(refused, truth: str, line: str):
    with refused(line, ValueError):
        read_tests(eval(truth))
