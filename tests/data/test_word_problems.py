import re
from collections import Counter

import pytest

from verl.data.generated import split_of
from verl.data.word_problems import INSTRUCTION, KINDS, split
from verl.rewards import compute_score


def test_problems_are_solved_step_by_step():
    problems = split("train", 2000, seed=0)
    assert split("train", 2100, seed=0)[:2000] == problems != split("train", 2000, seed=1)
    shares = Counter(problem.kind for problem in problems)
    weights = {kind: weight for kind, (weight, _) in KINDS.items()}
    for kind, weight in weights.items():
        assert shares[kind] / 2000 == pytest.approx(weight / sum(weights.values()), abs=0.03)
    for problem in problems:
        *steps, last = problem.solution.split("\n")
        assert last == f"#### {problem.answer}"
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        result = 0
        for position, step in enumerate(steps):
            left, sign, right, result = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", step).groups()
            assert int(result) == {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right))
            # The first step takes two numbers of the question, each later one the result and the next of them.
            taken = {int(left), int(right)} if position == 0 else {int(right)}
            assert taken == set(numbers[:2] if position == 0 else numbers[2:])
        assert result == problem.answer == str(int(result))
        assert problem.question.endswith(f"? {INSTRUCTION}") and split_of(problem.question) == "train"


def test_solution_and_answer_in_words_are_right():
    (problem,) = split("test", 1, seed=0)
    for response in (problem.solution, f"That makes {problem.answer} in all.", rf"\boxed{{{problem.answer}}}"):
        assert compute_score("word_problems", response, problem.answer)["acc"]
    assert not compute_score("word_problems", f"{problem.answer}, no, 99", problem.answer)["acc"]
