import pytest

from verl.rewards.equations import is_name, last_equation, unwrap_equations
from verl.rewards.math import verify_math
from verl.rewards.open_answer import verify_open_answer

NAMES = [
    *("x", "$x$", "x_1", "a_{n}", r"x_{\text{max}}", "x'", r"\theta", "AB", "A'B'", "A_1B_1", "|AB|", r"\angle ABC"),
    *(r"m\angle ABC", r"\overline{AB}", r"S_{\triangle ABC}", r"\hat{y}", "(x, y)", r"\left( a, b \right)"),
    *("f(x)", "f(2)", "f'(x)", "f^{-1}(x)", r"f\left(\frac{1}{2}\right)", "P(A|B)", "P(X=1)", r"\gcd(4, 6)"),
    *("Area", r"\text{Area}", "total cost", "sum"),
]

NO_NAMES = [
    *("", "0", "3", "2x", "5x", "-x", "x^2", "x^{2}", "a_n^2", "x!", "1/x", "x/2", r"\frac{1}{x}", "|x|", "x+1", "x y"),
    *("xy", "xyz", "x(x+1)", "2(x+1)", "f(x)+1", "f(x)^2", "2f(x)", "f(x)g(x)", "(x+1)", "(2x, y)", "(x)(y)"),
    *(r"\sqrt{x}", r"\log x", r"\ln(x)", r"\sin x", r"\pm x", r"\int x", r"x\cdot y", "x²", "√x", r"\text{2x}"),
    *("twice x", r"\text{half of x}", "x" * 300),
]


def test_what_names_a_value():
    assert [name for name in NAMES if not is_name(name)] == []
    assert [text for text in NO_NAMES if is_name(text)] == []


@pytest.mark.parametrize(
    ("text", "unwrapped"),
    [
        ("x = 5", (" 5", False)),
        ("x = 2 + 3 = 5", (" 5", False)),
        ("x=1, y=2", ("1,2", False)),
        ("x=1 or x=2", ("1 or2", False)),
        (r"\{x=1, x=2\}", (r"\{1,2\}", False)),
        ("P(X=1) = 2", (" 2", False)),
        ("2x = 5", ("2x = 5", True)),
        ("x=1, 2y=3", ("1, 2y=3", True)),
        ("x < 5", ("x < 5", False)),
        (r"x \in (1, 2)", (" (1, 2)", False)),
    ],
)
def test_unwrap_equations(text: str, unwrapped: tuple[str, bool]):
    assert unwrap_equations(text) == unwrapped


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("so 2x = 5", "2x = 5"),
        ("thus 2x = 10, so $x = 5", "x = 5"),
        ("The area AB = 5", "AB = 5"),
        ("2 + 3 = 5", "2 + 3 = 5"),
        ("x = 4. It is 5", None),
        ("It is 5", None),
    ],
)
def test_last_equation(text: str, chain: str | None):
    assert last_equation(text, len(text)) == chain


WRONG = [
    ("$2x=5$", "x=5"),
    ("so $2 x = 5$.", "x=5"),
    ("x^2=5", "x=5"),
    ("-x = 5", "x=5"),
    ("0 = 5", "x=5"),
    ("y = 5", "x=5"),
    ("The answer is 2x=5", "5"),
    ("The answer is 2x=5", "x=5"),
    (r"\boxed{y=5}", "x=5"),
    *((rf"\boxed{{{lhs}=5}}", "5") for lhs in ("2x", "{2x}", "x^2", "x²", "0", "-x", "x+1", "xy", "|x|", "x!", "x/2")),
    *(
        (rf"\boxed{{{lhs}=5}}", "5")
        for lhs in (r"\sqrt{x}", r"\log x", "x(x+1)", "2x=3y", "@#2x=3x", r"\text{half of x}")
    ),
    (r"\boxed{\{2x=5\}}", "5"),
    (r"\boxed{(2x=5)}", "5"),
    (r"\boxed{2x=\{5\}}", "5"),
    (r"\boxed{x^2\in\{5\}}", "5"),
    (r"\boxed{2x\equiv 5}", "5"),
    (r"\boxed{2x=1, x^2=2}", "1,2"),
    (r"\boxed{(2x,y)=(1,2)}", "(1,2)"),
]

RIGHT = [
    ("2+3 = 5", "5"),
    ("2+3 = 5", "x=5"),
    ("It is 5", "x=5"),
    ("x = 5", "x=5"),
    ("Hence $2x = 10$ and $x = 5$.", "x=5"),
    ("The answer is x = 5.", "5"),
    ("#### 5", "x=5"),
    (r"\boxed{5}", "x=5"),
    *(
        (rf"\boxed{{{lhs}=5}}", "5")
        for lhs in ("x", "x_1", "AB", "f(2)", r"\angle ABC", r"\text{Area}", "2+3", "x=2+3")
    ),
    (r"\boxed{x=1, x=2}", "1,2"),
    (r"\boxed{(x,y)=(1,2)}", "(1,2)"),
    (r"\boxed{y=2x+1}", "2x+1"),
    (r"\boxed{2x+1}", "y=2x+1"),
    (r"\boxed{\frac{x^2}{4}+y^2=1}", "x^2+4y^2=4"),
]


@pytest.mark.parametrize("verify", [verify_math, verify_open_answer])
def test_only_a_name_is_unwrapped(verify):
    assert [case for case in WRONG if verify(*case).correct] == []
    assert [case for case in RIGHT if not verify(*case).correct] == []
