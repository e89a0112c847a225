import pytest

from verl.rewards.math import equivalent
from verl.rewards.open_answer import verify_open_answer

APART = [
    # numbers
    (r"10^{-17}", r"1.6\times 10^{-19}"),
    (r"\frac{1}{2^{60}}", r"\frac{1}{2^{98}}"),
    ("0.0", r"6.67\times 10^{-11}"),
    ("-10^{-20}", "10^{-20}"),
    ("1/99!", "1/100!"),
    ("10^{-17}", "0"),
    ("0.000012", r"0.0000123"),
    ("e^{-50}", "e^{-51}"),
    (r"10^{-17}\pi", r"10^{-18}\pi"),
    (r"\sin(10^{-17})", r"\sin(10^{-18})"),
    (r"1.0000001\times 10^{-30} + 0.0", r"2\times 10^{-30}"),
    # complex numbers: part by part
    ("10^{-17}i", "10^{-19}i"),
    ("1+10^{-17}i", "1+10^{-19}i"),
    # entries
    ("(10^{-17}, 1, 2)", "(10^{-18}, 1, 2)"),
    ("[10^{-17}, 2)", "[10^{-19}, 2)"),
    (r"(-\infty, 10^{-17}) \cup (1, 2)", r"(-\infty, 10^{-18}) \cup (1, 2)"),
    (r"\{10^{-17}, 2\}", r"\{10^{-19}, 2\}"),
    ("10^{-17}, 10^{-18}", "10^{-17}, 10^{-19}"),
    (r"\pm 10^{-17}", r"\pm 10^{-18}"),
    (r"\begin{pmatrix} 10^{-17} \\ 2 \end{pmatrix}", r"\begin{pmatrix} 10^{-19} \\ 2 \end{pmatrix}"),
    # equations and inequalities
    ("x = 10^{-17}", "x = 10^{-19}"),
    ("10^{-17}", "x = 10^{-19}"),
    ("2x = 10^{-17}", "2x = 10^{-19}"),
    ("y = x + 10^{-17}", "y = x + 10^{-18}"),
    ("10^{-17} > x", "x < 10^{-19}"),
    (r"(-\infty, 10^{-17})", "x < 10^{-19}"),
    # expressions in variables, where only a small or a large x shows the difference
    ("10^{-17} x", "10^{-19} x"),
    ("x + 10^{-17}", "x + 10^{-19}"),
    ("x + 10^{-17} x^2", "x + 10^{-19} x^2"),
    (r"10^{-17} \sin x", r"10^{-18} \sin x"),
]

EQUAL = [
    ("0.333333", r"\frac13"),
    (r"16\times 10^{-20}", r"1.6\times 10^{-19}"),
    (r"\frac{1}{2^{98}}", "2^{-98}"),
    ("2^{100}", "1267650600228229401496703205376"),
    ("0", r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\cos 2x", r"1-2\sin^2 x"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
    ("n(n-1)!", "n!"),
    ("2x-y+1=0", "y=2x+1"),
    ("x^2-25=0", "x^2=25"),
    ("x>2", r"(2,\infty)"),
    ("2>x", "x<2"),
    ("2,1", "1,2"),
    (r"x\in(1,2)", "(1,2)"),
    (r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}"),
]


@pytest.mark.parametrize(("answer", "truth"), APART)
def test_small_numbers_differ(answer: str, truth: str):
    assert not equivalent(answer, truth)
    assert not equivalent(truth, answer)
    assert not verify_open_answer(rf"\boxed{{{answer}}}", truth).correct


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_other_forms_of_a_number_agree(answer: str, truth: str):
    assert equivalent(answer, truth)
    assert equivalent(truth, answer)


def test_the_tolerance_of_a_problem_widens_the_agreement():
    def correct(answer: str, **info: float) -> bool:
        return verify_open_answer(rf"\boxed{{{answer}}}", r"1.6\times 10^{-19}", info).correct

    assert correct(r"1.61\times 10^{-19}", relative_tolerance=0.01)
    assert not correct(r"1.61\times 10^{-19}", relative_tolerance=0.001)
    assert correct(r"1.6001\times 10^{-19}") and not correct(r"1.601\times 10^{-19}")
