import pytest

from verl.rewards import compute_score
from verl.rewards.measures import measures_differ, with_factors

DIFFERENT = [
    # bases
    *[
        ("1010_3", "1010_2"),
        ("1010_{3}", "1010_2"),
        (r"1010_{\text{three}}", r"1010_{\text{two}}"),
        ("1010₃", "1010_2"),
    ],
    ("1010_{(3)}", "1010_2"),
    ("(1010)_3", "(1010)_2"),
    (r"1010\text{ base }3", "1010_2"),
    ("(1,10_3)", "(1,10_2)"),
    ("1010 (base 3)", "1010_2"),
    ("2A_{15}", "2A_{16}"),
    # factors
    *[
        (r"5\text{ million}", "5"),
        ("5", r"5\text{ million}"),
        (r"5\text{ million}", r"5\text{ billion}"),
        ("5 million", "5"),
    ],
    (r"3\pi\text{ million}", r"3\pi"),
    (r"\frac{1}{2}\text{ million}", r"\frac{1}{2}"),
    (r"5\text{ dozen}", "5"),
    (r"x\text{ million}", "x"),
    (r"5\text{ hundred}", "5"),
    ("5万", "5"),
    (r"5\text{-million}", "5"),
    (r"5\text{ mil}", "5"),
    (r"5\text{ k}", "5"),
    (r"5\text{ tens}", "5"),
    # units
    (r"5\text{ m}", r"5\text{ km}"),
    (r"5\mathrm{~m}", r"5\mathrm{~km}"),
    (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    (r"\frac12\text{ m}", r"\frac12\text{ km}"),
    (r"5\sqrt2\text{ cm}", r"5\sqrt2\text{ m}"),
    ("5 m", "5 km"),
    *[
        (r"5\text{ m/s}", r"5\text{ km/h}"),
        (r"5\text{ hours}", r"5\text{ minutes}"),
        (r"5\,\mathrm{MeV}", r"5\,\mathrm{eV}"),
    ],
    (r"5\text{ dollars}", r"5\text{ cents}"),
    (r"5\text{ kN}", r"5\text{ N}"),
    *[
        (r"5\text{ ms}", r"5\text{ s}"),
        (r"5\ \mu\mathrm{m}", r"5\ \mathrm{m}"),
        (r"5\mathrm{\,s}", r"5\mathrm{\,ms}"),
        ("5 mm", "5 cm"),
        ("5 hours", "5 days"),
        ("30'", r"30^\circ"),
    ],
    # fractions in words, numbers and variables in text, other variables
    *[(rf"5\text{{ {name}}}", "5") for name in ("tenths", "hundredths", "thousandths", "thirds", "halves", "x")],
    *[(rf"5\text{{{sign}}}", "5") for sign in ("0", ".5", "+1", "/2", "!")],
    (r"5\mathrm{0}", "5"),
    (r"5\mathbf{x}", "5"),
    ("f'(x)", "f(x)"),
    ("x'", "x"),
    ("2x", "2X"),
    ("x^2Y", "x^2y"),
    # no numeral of its base, a decimal comma, blanks between digits
    ("5_2", "5"),
    ("18_5", "18"),
    ("1{,}5", "15"),
    ("5\n\n6", "56"),
    ("5M", "5"),
    # words
    *[(rf"5\text{{ {words}}}", "5") for words in ("doubled", "and one half", "to the fourth", "divided by two")],
    *[(rf"\text{{{words} }}5", "5") for words in ("up to", "other than", "the square of", "hardly", "two thirds of")],
    (r"5\text{ a.m.}", r"5\text{ p.m.}"),
    (r"5\text{ (wrong)}", "5"),
    (r"\text{not }5", "5"),
    (r"\text{half of }5", "5"),
    (r"\text{at least }5", "5"),
    (r"5\text{ squared}", "5"),
]

SAME = [
    ("1010", "1010_2"),
    ("1010_{2}", "1010_2"),
    ("2A_{16}", "2A_{16}"),
    ("x_2+x_1", "x_1+x_2"),
    ("5{,}000{,}000", r"5\text{ million}"),
    (r"\frac{1}{2}\text{ million}", "500000"),
    (r"60", r"5\text{ dozen}"),
    *[("0.5", r"5\text{ tenths}"), (r"\frac{5}{3}", r"5\text{ thirds}")],
    *[("f'(x)", r"f^{\prime}(x)"), (r"30^\circ", "30"), ("1{,}234", "1234"), (r"9\pi\text{ cm}^2", r"9\pi")],
    *[("5 dollars", "5"), (r"y' = 2x", "2x"), (r"5\text{}", "5")],
    (r"5\text{ million dollars}", r"5{,}000{,}000\text{ dollars}"),
    (r"5\text{ hundred million}", "500000000"),
    *[
        ("5", r"5\text{ km}"),
        (r"5\text{ km}", "5"),
        (r"5\text{ km}", r"5\text{ kilometers}"),
        (r"5\text{ apples}", "5"),
    ],
    (r"5\mathrm{~m/s}", r"5\text{ m/s}"),
    (r"5\text{ square cm}", r"5\text{ cm}^2"),
]


@pytest.mark.parametrize("source", ["math", "open_answer"])
def test_units_factors_bases_and_words_count(source: str):
    def right(answer: str, truth: str) -> bool:
        return compute_score(source, rf"\boxed{{{answer}}}", truth)["correctness"]

    assert [case for case in DIFFERENT if right(*case)] == []
    assert [case for case in SAME if not right(*case)] == []


def test_measures():
    assert with_factors(r"5\text{ million dollars}") == r"5 \times 10^{6} \text{ dollars}"
    assert with_factors(r"\text{million}") == r"\text{million}"
    assert not measures_differ(r"E_{1}+3 E_{2} \text{ units}", "E_{1}+3 E_{2}")
    assert measures_differ(r"3\text{ cm}, 4\text{ m}", r"3\text{ cm}, 4\text{ km}")
    assert not measures_differ(r"3\text{ cm}, 4\text{ cm}", r"3, 4\text{ cm}")
    assert not measures_differ(r"5\text{ m}\cdot\text{s}^{-1}", r"5\text{ m/s}")
    assert not measures_differ(r"5\text{ metres per second}", r"5\text{ m/s}")
    assert not measures_differ(r"5\text{ widgets}", r"5\text{ km}")
