import math

import pytest

from tests.kit import refused
from tests.tables import refusals
from verl.evaluation.benchmarks import Benchmark, Problem
from verl.evaluation.benchmarks.rows import inline_options, read_problem, recognise_fields

OWN = Benchmark("own")


def read(row: dict, mapping: dict[str, str] | None = None, benchmark: Benchmark = OWN) -> Problem:
    return read_problem(row, 0, recognise_fields([row], mapping, "own", "own.jsonl"), benchmark)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1?", "answer": "2"},
        {"problem": "1+1?", "final_answer": "2", "id": 7},
        {"Problem": "1+1?", "Answer": 2.0, "level": "easy"},
        {"content": "1+1?", "ground_truth": 2},
        {"input": "1+1?", "target": 2.0, "type": "sum"},
        {"body": "1+1?", "label": "2"},
        {"query": "1+1?", "correct": "2", "answer": None},
        {"problem": "1+1?", "question": "1+1?", "answer": ["2"], "solution": ""},
        {"prompt": "1+1?", "gold": " 2\n"},
    ],
)
def test_names_of_fields(row: dict):
    assert read(row) == Problem(0, "1+1?", "2", "open_answer", {}, None)


def test_a_body_goes_before_its_question():
    row = {"Body": "There are 3 apples.", "Question": "How many?", "Answer": 3.0, "Type": "Sum"}
    assert read(row).question == "There are 3 apples. How many?"
    assert read(row | {"question_concat": "There are 3 apples. How many?"}).question == "There are 3 apples. How many?"
    assert read({"passage": None, "question": "How many?", "answer": "3"}).question == "How many?"


def test_the_answer_ends_the_solution_or_the_question():
    row = {"problem": "1+1?", "solution": "It is \\boxed{2}.", "type": "sum"}
    assert read(row) == Problem(0, "1+1?", "2", "open_answer", {}, "It is \\boxed{2}.")
    worked = "She has 1200 + 5 = 1205.\n#### 1,205"
    found = read({"question": "How many?", "answer": worked})
    assert found == Problem(0, "How many?", "1205", "open_answer", {}, worked)
    found = read({"question": "Which?(A) 1(B) 2\nAnswer: B", "answer": ""})
    assert (found.question, found.answer) == ("Which?(A) 1(B) 2", "B")
    assert read({"question": "How many? answers: $\\frac{3}{10}$", "answer": "$$"}).answer == "$\\frac{3}{10}$"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "options": ["A)1", "B)2"], "correct": "B"},
        {"question": "Which?", "choices": ["1", "2"], "answer": 1},
        {"question": "Which?", "choices": ["1", "2"], "gold": [1]},
        {"question": "Which?", "options": {"A": "1", "B": "2"}, "label": "B", "answer": None},
        {"question": "Which?", "options": "A. 1 B. 2", "answer": "(B)"},
    ],
)
def test_options_beside_the_question(row: dict):
    problem = read(row)
    assert problem.question == "Which?\n(A) 1\n(B) 2"
    assert problem.answer in ("B", "(B)")
    assert (problem.data_source, problem.extra_info) == ("multiple_choice", {"options": {"A": "1", "B": "2"}})


def test_wrong_answers_make_options():
    """The layout of GPQA: the order of options follows from the question alone."""
    wrong = {f"Incorrect Answer {i}": text for i, text in enumerate(("two", "three\n", "four"), start=1)}
    row = {"Question": "Which one?", "Correct Answer": "one", "Pre-Revision Correct Answer": "none", **wrong}
    problem = read(row)
    assert problem.question == "Which one?\n(A) three\n(B) one\n(C) four\n(D) two"
    assert (problem.answer, problem.data_source) == ("B", "multiple_choice")
    assert problem.extra_info == {"options": {"A": "three", "B": "one", "C": "four", "D": "two"}}
    asked = [read(row | {"Question": f"Which of {i}?"}) for i in range(40)]
    assert {p.answer for p in asked} == set("ABCD")
    assert all(p.extra_info["options"][p.answer] == "one" for p in asked)
    # A number stays a text, and no index.
    number = read({"question": "1+1?", "correct_answer": 2, "Incorrect Answer 1": "3"})
    assert number.extra_info["options"][number.answer] == "2"


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("最小的数是()\nA.-2  B.0  C. 3", {"A": "-2", "B": "0", "C": "3"}),
        ("结果为（Ａ）", {}),
        ("Which (A) $x<1$ (B) $x>1$", {"A": "$x<1$", "B": "$x>1$"}),
        ("of set B(A) The median of A(B) The mean\\n(C) None", {"A": "The median of A", "B": "The mean", "C": "None"}),
        ("which: (F) $a$ (G) $b$ (H) $c$", {"F": "$a$", "G": "$b$", "H": "$c$"}),
        ("$\\textbf{(A)}\\ 3(1 + r) = 7\\qquad \\textbf{(B)}\\ 3r = 7$", {"A": "3(1 + r) = 7", "B": "3r = 7"}),
        ("A) Line\nB) Plane\n\nEnter the letter.", {"A": "Line", "B": "Plane"}),
        ("A triangle has corners A. and B. Which? A. 1 B. 2", {"A": "1", "B": "2"}),
        ("How many apples has A?", {}),
    ],
)
def test_options_inside_the_question(question: str, options: dict[str, str]):
    assert inline_options(question) == options


def test_letters_are_options_only_where_there_are_some():
    assert read({"question": "Which bin, A or B?", "answer": "B"}).data_source == "open_answer"
    assert read({"question": "Which? A. 1 B. 2", "answer": "2"}).data_source == "open_answer"
    assert read({"question": "What is P(A) if P(B)=1?", "answer": "P"}).data_source == "open_answer"
    assert read({"question": "Which? A. 1 B. 2", "answer": "AB"}).data_source == "multiple_choice"
    assert read({"question": "Which?", "options": ["1", "2"], "answer": 2}).answer == "2"
    row = {"question": "Which? A 1 B. 2", "answer": "1", "choice_answer": "A"}
    assert (read(row).answer, read(row).data_source, read(row).extra_info) == ("A", "multiple_choice", {})
    assert read(row | {"choice_answer": ""}).data_source == "open_answer"


def test_several_answers_and_tolerances_reach_the_verifier():
    assert read({"question": "x?", "final_answer": ["$1$,$2$"]}).answer == "$1$,$2$"
    assert read({"question": "x?", "final_answer": ["1", "2"]}).answer == "1, 2"
    row = {"question": "r?", "final_answer": ["4.2"], "error": "1e-1", "unit": "%"}
    assert read(row).extra_info == {"tolerance": "1e-1"}
    loose = Benchmark("loose", relative_tolerance=0.01)
    assert read({"question": "r?", "answer": "4.2"}, benchmark=loose).extra_info == {"relative_tolerance": 0.01}


def test_mapped_fields():
    row = {"aufgabe": "1+1?", "question": "Number 1", "loesung": "2", "by": "mine"}
    mapping = {"question": "aufgabe", "answer": "loesung"}
    assert read(row, mapping) == Problem(0, "1+1?", "2", "open_answer", {}, None)
    assert read(row, mapping | {"verifier": "by"}).data_source == "mine"


@pytest.mark.parametrize(("row", "mapping", "line"), refusals("evaluation/refusals.txt", "fields"))
def test_fields_that_are_not_recognised(row: str, mapping: str, line: str):
    with refused(line):
        recognise_fields([eval(row), {"level": 3}], eval(mapping), "own", "own.jsonl")


@pytest.mark.parametrize(("row", "line"), refusals("evaluation/refusals.txt", "rows"))
def test_rows_that_cannot_be_read(row: str, line: str):
    with refused(line, ValueError):
        read(eval(row, {"nan": math.nan, "inf": math.inf}))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text", ["A. " * 50_000, "A. B. " * 25_000, " " * 10**5, "(A)," * 45 + "!", "answer: " * 12_000]
)
def test_long_rows_are_read_at_once(text: str):
    assert read({"question": text + "x", "answer": "5"}).answer == "5"
    assert read({"question": "?", "answer": text + "x"}).answer.endswith("x")
    assert read({"question": "?", "options": [text, "x"], "answer": 1}).answer == "B"
