from decimal import Decimal

import pytest

from verl.rewards.algebra import measures_differ
from verl.rewards.equations import is_name, last_equation, unwrap_equations
from verl.rewards.lexicon import Quantity, read_quantity, with_factors
from verl.rewards.notation import split_answers, squeeze, unify


@pytest.mark.parametrize(
    ("text", "unified"),
    [
        ("（１，２）", "(1,2)"),
        ("$x\\geqslant 3$。", r"x\ge 3"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )"),
        (r"\dfrac{1}{2}\text{ hours}", r"\frac{1}{2}  hours "),
        (r"5\text{ m}", "5 (m)"),
        (r"2.5\mathrm{~m}", "2.5 (m)"),
        (r"\mathrm{m}+1", "m +1"),
        (r"30^{\circ}", "30"),
        ("π/2", r"\pi /2"),
        (r"\{x \mid x<4\}", "x<4"),
        ("{1,2}", r"\{1,2\}"),
        (r"\{1,2\}", r"\{1,2\}"),
        (r"\$\,18", "18"),
        ("ln2", r"\ln 2"),
        ("②④", "(2)(4)"),
        ("全体实数", r"\mathbb{R}"),
        (r"(-\infty,+\infty)", r"\mathbb{R}"),
        ("No solution", r"\emptyset"),
        ("-1.5e-7", r"-1.5 \times 10^{-7}"),
        ("2e-1", "2e-1"),
        ("", ""),
    ],
)
def test_unify(text: str, unified: str):
    assert squeeze(unify(text)) == squeeze(unified)
    assert unify(text).split() == unified.split()


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("18", Quantity(Decimal(18), "", False)),
        ("x = 18", Quantity(Decimal(18), "", False)),
        ("-1,200.5", Quantity(Decimal("-1200.5"), "", False)),
        ("18 dollars", Quantity(Decimal(18), "dollar", True)),
        ("¥18", Quantity(Decimal(18), "", False)),
        ("18元", Quantity(Decimal(18), "yuan", True)),
        ("20cm^2", Quantity(Decimal(20), "cm2", True)),
        ("20 square meters", Quantity(Decimal(20), "m2", True)),
        ("20平方厘米", Quantity(Decimal(20), "cm2", True)),
        ("5 (m)", Quantity(Decimal(5), "m", True)),
        ("9 (red apples)", Quantity(Decimal(9), "red apples", False)),
        ("25%", Quantity(Decimal(25), "%", True)),
        ("7 million", Quantity(Decimal(7_000_000), "", False)),
        ("1.5 billion dollars", Quantity(Decimal(1_500_000_000), "dollar", True)),
        ("3万元", Quantity(Decimal(30_000), "yuan", True)),
        ("3千克", Quantity(Decimal(3), "kg", True)),
        ("5 times", Quantity(Decimal(5), "times", False)),
        ("5 times x", None),
        ("5 squared", None),
        ("5 m", None),
        ("5xy", None),
        ("5x", None),
        ("5/2", None),
        ("cm", None),
        (".", None),
        ("9" * 200, None),
    ],
)
def test_quantities(text: str, quantity: Quantity | None):
    assert read_quantity(text) == quantity


def test_a_short_unit_where_one_is_expected():
    assert read_quantity("5 m", short=True) == Quantity(Decimal(5), "m", True)
    assert read_quantity("5 x", short=True) is None


@pytest.mark.parametrize(
    ("text", "answers", "ordered"),
    [
        ("5", ["5"], False),
        ("3, 5", ["3", "5"], False),
        ("3 or 5", ["3", "5"], False),
        ("5; 10", ["5", "10"], True),
        ("5和10", ["5", "10"], False),
        ("1,200", ["1,200"], False),
        ("(1,2),(3,4)", ["(1,2)", "(3,4)"], False),
        (r"\{1,2\}", ["1", "2"], False),
        ("[0,1)", ["[0,1)"], False),
        (r"\frac{1}{2}, -3", [r"\frac{1}{2}", "-3"], False),
        ("x^{a,b}, y", ["x^{a,b}", "y"], False),
    ],
)
def test_lists_of_answers(text: str, answers: list[str], ordered: bool):
    assert split_answers(text) == (answers, ordered)


def test_commas_that_may_part_thousands():
    assert split_answers("24,112", thousands=False) == (["24", "112"], False)


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


def test_the_equation_that_ends_at_a_number():
    for text, chain in {
        "so 2x = 5": "2x = 5",
        "thus 2x = 10, so $x = 5": "x = 5",
        "The area AB = 5": "AB = 5",
        "x = 4. It is 5": None,
        "It is 5": None,
    }.items():
        assert last_equation(text, len(text)) == chain


def test_measures():
    assert with_factors(r"5\text{ million dollars}") == r"5 \times 1000000 \text{ dollars}"
    assert with_factors(r"\text{million}") == r"\text{million}"
    assert not measures_differ(r"E_{1}+3 E_{2} \text{ units}", "E_{1}+3 E_{2}")
    assert measures_differ(r"3\text{ cm}, 4\text{ m}", r"3\text{ cm}, 4\text{ km}")
    assert not measures_differ(r"3\text{ cm}, 4\text{ cm}", r"3, 4\text{ cm}")
    assert not measures_differ(r"5\text{ m}\cdot\text{s}^{-1}", r"5\text{ m/s}")
    assert not measures_differ(r"5\text{ metres per second}", r"5\text{ m/s}")
    assert not measures_differ(r"5\text{ widgets}", r"5\text{ km}")
