import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.arithmetic import ArithmeticTask, arithmetic_problem
from verl.data.generated import SPLIT_SHARES, GeneratedProblem, split_of
from verl.verifiers.answers import extract_boxed


def value(expression: str) -> int:
    """The value of one-digit and two-digit numbers joined by +, - and *, at most one of them a product, in front."""
    product, *rest = re.split(r"(?=[+-])", expression)
    factors = [int(factor) for factor in product.split("*")]
    head = factors[0] * factors[1] if len(factors) == 2 else factors[0]
    return head + sum(int(term) for term in rest)


def check_steps(problem: GeneratedProblem) -> None:
    """Every step is a true equation, its carry comes from the step before, and the digits spell the answer."""
    restated, _, rest = problem.solution.partition(":")
    steps, _, result = rest.partition(";")
    digits, _, box = result.partition(" ")
    carry = 0
    for step in steps.split(","):
        sides = step.split("=")
        assert len({value(side) for side in sides}) == 1, step
        assert int(re.split(r"[+*-]", sides[0])[2]) == carry, step
        carry = int(sides[-1][-2] if problem.kind == "difference" else sides[-1][0])
    assert int(digits) == int(problem.answer)
    assert box == f"\\boxed{{{problem.answer}}}"
    assert extract_boxed(problem.solution) == problem.answer
    question = re.fullmatch(r"What is (\d+) ([+*-]) (\d+)\?", problem.question)
    assert question is not None
    left, right = re.split(r"[+*-]", restated)
    assert (int(left), int(right)) == (int(question[1]), int(question[3]))


@pytest.mark.parametrize(
    ("kind", "question", "solution", "answer"),
    [
        ("sum", "4821 + 377", "4821+0377:1+7+0=08,2+7+0=09,8+3+0=11,4+0+1=05;05198", "5198"),
        ("difference", "4821 - 4377", "4821-4377:1-7-0=4-10,2-7-1=4-10,8-3-1=4-00,4-4-0=0-00;0444", "444"),
        ("product", "347 * 6", "347*6:7*6+0=42+0=42,4*6+4=24+4=28,3*6+2=18+2=20;2082", "2082"),
        ("difference", "50 - 50", "50-50:0-0-0=0-00,5-5-0=0-00;00", "0"),
    ],
)
def test_format_of_problems(kind: str, question: str, solution: str, answer: str):
    a, _, b = question.split()
    expected = GeneratedProblem(f"What is {question}?", rf"{solution} \boxed{{{answer}}}", answer, kind)
    assert arithmetic_problem(kind, int(a), int(b)) == expected


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
def test_solutions_are_true(a: int, b: int):
    for kind, x, y, answer in (
        ("sum", a, b, a + b),
        ("difference", max(a, b), min(a, b), abs(a - b)),
        ("product", a, b % 10, a * (b % 10)),
    ):
        problem = arithmetic_problem(kind, x, y)
        assert problem.answer == str(answer)
        check_steps(problem)


@pytest.mark.parametrize("task", [ArithmeticTask(), ArithmeticTask((1, 2), (5, 5), (3, 3))])
def test_problems_of_a_task(task: ArithmeticTask):
    problems = task.split("train", 1000, seed=0)
    assert task.split("train", 1200, seed=0)[:1000] == problems != task.split("train", 1000, seed=4)
    assert min(Counter(problem.kind for problem in problems).values()) > 150
    for problem in problems:
        check_steps(problem)
        assert problem.solution.isascii() and problem.solution.isprintable()
        low, high = getattr(task, f"{problem.kind}_digits")
        first, second = map(len, re.findall(r"\d+", problem.question))
        assert low <= first <= high and (second == 1 if problem.kind == "product" else low <= second <= high)


def test_splits_share_no_question():
    # Two-digit operands, so that the splits fill a good part of the space and would meet by chance.
    task = ArithmeticTask(sum_digits=(1, 2), difference_digits=(1, 2), product_digits=(1, 2))
    owners: dict[str, str] = {}
    for seed in range(3):
        for name in SPLIT_SHARES:
            problems = task.split(name, 400, seed)
            questions = [problem.question for problem in problems]
            assert len(set(questions)) == 400
            for question in questions:
                assert owners.setdefault(question, name) == name == split_of(question)


def test_wrong_task_or_split_is_refused(refused):
    for name, digits in {"sum_digits": (0, 3), "product_digits": (4, 3), "difference_digits": (3, 10)}.items():
        with refused(f"{name}={digits}: must satisfy...", ValueError):
            ArithmeticTask(**{name: digits})
    with refused("split='validation': must be one of train, sft_train, test, sft_val", ValueError):
        ArithmeticTask().split("validation", 1, seed=0)
    with refused("size of train=1000: only ... distinct questions found...", ValueError):
        ArithmeticTask((1, 1), (1, 1), (1, 1)).split("train", 1000, seed=0)
