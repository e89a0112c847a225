from decimal import Decimal

import pytest

from verl.rewards.notation import Quantity, keep_variable, read_quantity, split_answers, squeeze, unify, words_in


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
    ("text", "squeezed"),
    [
        ("1 1/2", "1 1/2"),
        ("12  34", "12 34"),
        ("1 000", "1000"),
        ("1 234/5", "1 234/5"),
        (r"\{ 1 , {2} \}", "{1,2}"),
        ("2 x + 3 y", "2x+3y"),
    ],
)
def test_squeeze(text: str, squeezed: str):
    assert squeeze(text) == squeezed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Mrs. Hilt", "mrshilt"),
        ("3:30 p.m.", "3:30pm"),
        ("必要不充分条件", "必要不充分条件"),
        ("5", None),
        ("8.2 mph", "8.2mph"),
        ("25,000/49 meters", "25000/49meters"),
        ("45 / 98 meters, 30 seconds", "45/98meters30seconds"),
        ("(-3, -4), 5 miles", "-3-45miles"),
        ("2-3 days", "2-3days"),
        ("10 20 days", "10,20days"),
        ("five-year lift-off", "fiveyearliftoff"),
        ("5-year plan", "5yearplan"),
        ("-abc", "-abc"),
        ("ab", None),
        ("2 and 3", None),
        ("5和3", None),
        ("x=five", None),
    ],
)
def test_words(text: str, words: str | None):
    assert words_in(text) == words


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
    ("text", "short", "kept"),
    [
        ("6m", False, "6{m}"),
        ("6 m", True, "6 m"),
        (r"\frac{1}{2} m", True, r"\frac{1}{2} m"),
        ("2+3t", True, "2+3{t}"),
        ("x^2 m", True, "x^2{m}"),
        ("-5ab", True, "-5{ab}"),
        ("5 cm", False, "5 cm"),
        (r"\sin t", False, r"\sin{t}"),
        ("x = c", False, "x =c"),
        (r"5\mathrm{i}", False, "5{i}"),
        (r"5\mathrm{i}+2", False, "5 i +2"),
        (r"3\pi", False, r"3\pi"),
        ("x_t", False, "x_t"),
        ("6 hours", False, "6 hours"),
        ("m", False, "m"),
        ("", False, ""),
    ],
)
def test_variables_that_end_an_expression(text: str, short: bool, kept: str):
    assert keep_variable(text, short) == kept


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
