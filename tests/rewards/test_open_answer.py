from decimal import Decimal

import pytest

from verl.rewards.open_answer import Tolerance, verify_open_answer
from verl.rewards.score import Verdict

SAME = [
    # numbers with units
    ("18 dollars", "18"),
    (r"\$18", "18"),
    ("9", "9 (apples)"),
    ("9 oranges", "9 (apples)"),
    ("5 m", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\ \mathrm{cm}", "5厘米"),
    ("864", r"864 \mbox{ inches}^2"),
    ("15 cm^2", r"15\mbox{ cm}^2"),
    ("3元", "3"),
    ("３元", "3"),
    ("10%", "0.1"),
    ("0.1", r"10\%"),
    ("10", r"10\%"),
    ("100°", r"100^\circ"),
    (r"\frac{270}{7}^\circ", r"\frac{270}7\text{ degrees}"),
    ("10080", r"10,\!080"),
    ("1,000", "1000"),
    ("4", "4.0"),
    ("2700000000", "2.7×10^9"),
    ("0.3333", r"\frac{1}{3}"),
    ("3.1416", r"\pi"),
    # expressions
    ("(x-1)(x+1)", "x^2-1"),
    ("2x+3", "y=2x+3"),
    (r"1-\mathrm{i}", "1-i"),
    (r"\ln 2", "ln2"),
    ("√2", r"\sqrt{2}"),
    ("sqrt(2)", r"\sqrt{2}"),
    (r"1\frac45", r"\frac{9}{5}"),
    ("137.5", r"137 \frac{1}{2}"),
    ("1/9", "1:9"),
    ("C_{5}^{2}", "10"),
    (r"\begin{pmatrix}-1/3\\2/3\end{pmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}"),
    # sets, intervals, several answers
    ("3 or 5", "5,3"),
    ("5和3", "3,5"),
    (r"x=-2, x=6", "-2,6"),
    ("5;10", "$5$;$10$"),
    ("24;112", "24,112"),
    (r"\{2,5,3\}", "{2,3,5}"),
    ("2,5,3", r"\{2,3,5\}"),
    (r"\{x\mid -2\le x<1\}", "[-2,1)"),
    ("-2≤x<1", r"$\{x|-2\leq x < 1\}$"),
    ("x>2", r"(2,+\infty)"),
    (r"(1, \sqrt{3})\cup(-\sqrt{3},-1)", r"(-\sqrt{3},-1) \cup (1,\sqrt{3})"),
    (r"x\geq -3 且 x\neq 0", r"x \geq -3, x \neq 0"),
    (r"\mathbb{R}", "all real numbers"),
    ("无解", "No solution"),
    ("①③④", "(1)(3)(4)"),
    (r"\textcircled{1}\textcircled{3}", "①③"),
    # words
    (r"\text{Evelyn}", "Evelyn"),
    ("evelyn.", r"\text{Evelyn}"),
    ("3:30 PM", "3:30 p.m."),
    ("第一象限", "第一象限"),
    ("8.2 mph", "8.2 mph"),
    ("25000/49 meters, 1000/49 seconds", "25000 / 49 meters, 1000/49 seconds"),
    ("2.5", r"2.5 \mathrm{~m}"),
    ("7 million", "7000000"),
    ("3万元", "30000"),
    ("1 000", "1000"),
    ("2t(3t+2)", "6t^2+4t"),
]
"""Answer, ground truth."""

DIFFERENT = [
    (r"5\text{ m}", "5 cm"),
    ("5 m", "5 cm"),
    ("15 cm", r"15\mbox{ cm}^2"),
    (r"25\%", "0.2"),
    ("3.14", r"\pi"),
    ("0.33", r"\frac13"),
    ("8164962", "8164961"),
    ("2", "2s"),
    ("3", "3x"),
    ("-9", "-9 x"),
    ("6", "6m"),
    ("3", "3xy"),
    ("p-q", "q-p"),
    ("10;5", "5;10"),
    ("(2,1)", "(1,2)"),
    ("x=1,y=2", "x=2,y=1"),
    ("1,2,3", "1,2"),
    ("1", "1,2"),
    ("[-2,1]", "[-2,1)"),
    ("①③", "(1)(3)(4)"),
    ("a > b > c", "b > a > c"),
    ("Bob", "Evelyn"),
    ("3:30 am", "3:30 p.m."),
    ("第二象限", "第一象限"),
    ("必要不充分条件", "充要条件"),
    ("Evelyn", "5"),
    ("82 mph", "8.2 mph"),
    ("34 cup", "3/4 cup"),
    ("-abc", "abc"),
    ("(3,4), 5 miles", "(-3,-4), 5 miles"),
    ("7 million", "7"),
    ("5 squared", "5"),
    ("1 1/2", "11/2"),
    ("12 34", "1234"),
    ("5ab", "5"),
    (r"5\mathrm{i}", "5"),
    ("5", "2+3t"),
    ("6t^2+4", "6t^2+4t"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{1}{\sqrt{2}}c"),
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_the_same(answer: str, truth: str):
    verdict = verify_open_answer(rf"so \boxed{{{answer}}}", truth)
    assert verdict.correct and verdict.reason in ("exact", "equivalent")


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different(answer: str, truth: str):
    verdict = verify_open_answer(rf"so \boxed{{{answer}}}", truth)
    assert not verdict.correct and verdict.reason in ("different", "unparsed")


@pytest.mark.parametrize(
    ("solution", "truth", "verdict"),
    [
        ("It is 5.", "5", Verdict(True, False, "exact", "5")),
        ("故答案为：5元。", "5", Verdict(True, False, "exact", "5元")),
        ("答案是 12。", "12", Verdict(True, False, "exact", "12")),
        ("The answer is 7 cm.", "7", Verdict(True, False, "exact", "7 cm")),
        (r"$\framebox{204}$ minutes", "204", Verdict(True, True, "exact", "204")),
        (r"\boxed{\textbf{(113) }}", "113", Verdict(True, True, "equivalent", r"\textbf{(113) }")),
        (r"$x=\boxed{3}$ and $y = \boxed{5}$.", "3;5", Verdict(True, True, "exact", "3; 5")),
        (r"\boxed{5}, \boxed{3}", "3,5", Verdict(True, True, "equivalent", "5; 3")),
        (r"First \boxed{4}. Then I found another one: \boxed{5}", "4,5", Verdict(False, True, "different", "5")),
        (r"\boxed{4}, no: \boxed{5}", "5", Verdict(True, True, "exact", "5")),
        ("I do not know.", "5", Verdict(False, False, "missing")),
        (r"\boxed{@#}", "5", Verdict(False, True, "unparsed", "@#")),
    ],
)
def test_where_the_answer_stands(solution: str, truth: str, verdict: Verdict):
    assert verify_open_answer(solution, truth) == verdict


@pytest.mark.parametrize(
    ("answer", "truth", "info", "correct"),
    [
        ("4.25", "4.2", {"tolerance": "1e-1"}, True),
        ("4.35", "4.2", {"tolerance": "1e-1"}, False),
        ("1.61", "1.6", {"relative_tolerance": 0.01}, True),
        ("1.7", "1.6", {"relative_tolerance": 0.01}, False),
        (r"4.49 \times 10^{33}", "4.5e33", {"relative_tolerance": 0.01}, True),
        (r"3.9 \times 10^{33}", "4.5e33", {"relative_tolerance": 0.01}, False),
        ("1.61", "1.6", None, False),
        ("1.61", "1.6", {"tolerance": "roughly"}, False),
    ],
)
def test_tolerances(answer: str, truth: str, info: dict | None, correct: bool):
    assert verify_open_answer(rf"\boxed{{{answer}}}", truth, info).correct is correct


def test_quick_leaves_algebra_alone():
    assert verify_open_answer(r"\boxed{(x-1)(x+1)}", "x^2-1", quick=True) is None
    assert verify_open_answer(r"\boxed{9 oranges}", "9 (apples)", quick=True).correct
    assert verify_open_answer(r"\boxed{8 oranges}", "9 (apples)", quick=True).reason == "different"
    long = "x+" * 300 + "1"
    assert verify_open_answer(rf"\boxed{{{long}}}", "5", quick=True).reason == "different"
    assert verify_open_answer(rf"\boxed{{{long} }}", long, quick=True).reason == "exact"


def test_an_exponent_beyond_all_limits_is_allowed_nothing():
    tolerance = Tolerance({"tolerance": 0.1, "relative_tolerance": 0.1})
    for value in ("1e999999999999", "-1e999999999999", "1.5e10000000"):
        assert not tolerance.allows(Decimal(value), Decimal("0.5"))
        assert not tolerance.allows(Decimal("0.5"), Decimal(value))
