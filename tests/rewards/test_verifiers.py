import pytest

from verl.rewards import compute_score
from verl.rewards.arithmetic import verify_arithmetic
from verl.rewards.gsm8k import verify_gsm8k
from verl.rewards.math import equivalent, verify_math
from verl.rewards.score import Verdict


@pytest.mark.parametrize(
    ("truth", "answer", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", r"\frac12", True),
        (r"\frac{1}{2}", "1/2", True),
        ("(x+1)^2", "x^2+2x+1", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("5", "x=5", True),
        ("5", r"5\text{ cm}", True),
        (r"90^\circ", "90", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"\text{(A)}", "A", True),
        (r"\text{(A)}", "B", False),
        ("[0,1)", "[0,1]", False),
        ("-8", "-8i", False),
        ("5", r"5\mathrm{i}", False),
        ("5", "5ab", False),
        ("5", "2+3t", False),
        ("2+3t", "5", False),
        ("6t^2+4t", "6t^2+4", False),
        ("6t^2+4t", "2t(3t+2)", True),
        (r"\sin t", r"\cos(\pi/2-t)", True),
        ("6m", "6", False),
        ("6m", r"m \cdot 6", True),
        ("2ab", "2bc", False),
        ("6", "6 m", True),
        (r"\frac{1}{2}", r"\frac{1}{2} m", True),
        ("12", "12cm", True),
        ("x=c", "x = c", True),
        (r"3\pi", "9.42", False),
        ("5", r"\frac{", False),
        ("5", "", False),
    ],
)
def test_equivalent(truth: str, answer: str, same: bool):
    assert equivalent(answer, truth) is same


@pytest.mark.parametrize(
    ("solution", "truth", "verdict"),
    [
        (r"\boxed{42}", "42", Verdict(True, True, "exact", "42")),
        (r"\boxed{43}", "42", Verdict(False, True, "different", "43")),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", Verdict(True, True, "equivalent", r"\frac{2}{4}")),
        (r"\boxed{x+1}", "x+2", Verdict(False, True, "different", "x+1")),
        ("The answer is $x+1$.", "1+x", Verdict(True, False, "equivalent", "$x+1$")),
        ("It is 42", "42", Verdict(True, False, "exact", "42")),
        ("no idea", "42", Verdict(False, False, "missing", "")),
    ],
)
def test_verify_math(solution: str, truth: str, verdict: Verdict):
    assert verify_math(solution, truth) == verdict


def test_quick_leaves_algebra_to_others():
    assert verify_math(r"\boxed{x+1}", "1+x", quick=True) is None
    assert verify_math(r"\boxed{3}", "4", quick=True) == Verdict(False, True, "different", "3")
    assert verify_gsm8k(r"\boxed{\frac{36}{2}}", "18", quick=True) is None
    assert verify_gsm8k(r"\boxed{18 dollars}", "18", quick=True) == Verdict(True, True, "exact", "18 dollars")


@pytest.mark.parametrize(
    ("solution", "truth", "correct"),
    [
        ("6 * 3 = 18\n#### 18", "18", True),
        (r"\boxed{\$18}", "18", True),
        (r"\boxed{18 \text{ clips}}", "18", True),
        (r"\boxed{18 dollars per day}", "18", True),
        (r"\boxed{x = 18}", "18", True),
        (r"\boxed{18.00}", "18", True),
        (r"\boxed{1,800}", "1800", True),
        (r"\boxed{\frac{36}{2}}", "18", True),
        (r"\boxed{\sqrt{18}}", "18", False),
        (r"\boxed{18^2}", "18", False),
        (r"\boxed{1/18}", "18", False),
        (r"\boxed{18x}", "18", False),
        (r"\boxed{18k}", "18", False),
        (r"\boxed{18 km}", "18", True),
        (r"\boxed{18 m}", "18", True),
        (r"\boxed{17}", "18", False),
        (r"\boxed{18, 19}", "18", False),
        ("She makes 18 dollars.", "18", True),
        ("", "18", False),
    ],
)
def test_verify_gsm8k(solution: str, truth: str, correct: bool):
    verdict = verify_gsm8k(solution, truth)
    assert verdict is not None and verdict.correct is correct


FORMULAS = (
    r"−18|–18|- 18|-(18)|−(18)|x - 18|x+18|i18|x18|18x|18y dollars|18π|18i|√18|∛18|³√18|18²|18³|18!|½18|18½|18‰"
    r"|¬18|≠18|>18|<18|18+|18 -|18 million|18\text{ million}|18 billion dollars|18 hundred|18 dozen|18 lakh"
    r"|18 squared|18 factorial|not 18|isn't 18|never 18|\text{not }18|minus 18|negative 18|half of 18"
    r"|\text{half of }18|twice 18|log 18|at least 18|more than 18|18 or more|18_5|18_{16}|18 (base 9)|0x18|1/18"
    r"|18 - π|18 tenths|18 hundredths|18 halves|18 doubled|18 halved|18 divided by two|18 times two|18 and one half"
    r"|neg 18|up to 18|other than 18|hardly 18|two thirds of 18|ten percent of 18|the square of 18|quadruple 18"
    r"|exp 18|18 or nineteen|seventeen or 18|18 point five|18 nineteen|two 18s|dozen 18|hundred 18"
    r"|five from 18|between 18 and twenty"
    r"|18% of fifty|18\text{ percent of fifty}|18 is less than the answer|18 is too small|18? No, seventeen"
    r"|18 is impossible|18 below zero|18 !|(18)!|➖18|❌18|18\text{0}|18\mathrm{0}|18 M dollars|18 K"
    r"|18 - nineteen|2*9 = 19 or 18|3*7 = 18 dollars"
    r"|-x=18|xy=18|x²=18|√x=18|\vert x\vert=18|18万|eighteen minus 18"
).split("|")
AMOUNTS = (
    r"$18|\$18|£18|USD 18|x = 18|x=\$18|Total: 18|total = 18|(18)|+18|18.00|18%|18 dollars|18 \text{ km/h}"
    r"|18-inch|18 a day|18 square feet|18 more apples|18 apples and oranges|$18$ dollars|\$18 \text{ per day}"
    r"|\text{Answer: }18|\textbf{18}|18 with no remainder|18 times|18 dollars left over|18年"
    r"|18 - good luck|18 – good luck|18 — that is all|18 - done!|18 ft²|18 cats & dogs|18¢|₹18|18 L|≈18"
    r"|`18`|“18”|«18»|18 \checkmark|\large 18|\boldsymbol{18}|{\bf 18}|\color{red}{18}|\textcolor{red}{18}"
    r"|\underline{18}|１８|3 * 6 = 18 dollars|3\times 6 = \$18|$9 + $9 = $18|18 (eighteen)"
    r"|18 two-story houses|18 seven-year-olds|\text{Total} = 18|18 quarters"
    r"|\(18\)|\[18\]|\(18\) minutes|18 ✓|18 ✅️|18 hours and that is it"
    r"|She makes $18 every day at the farmers' market."
).split("|")


def test_a_number_counts_only_beside_words():
    def right(answer: str) -> bool:
        return compute_score("gsm8k", rf"\boxed{{{answer}}}", "18")["correctness"]

    assert [answer for answer in FORMULAS if right(answer)] == []
    assert [answer for answer in AMOUNTS if not right(answer)] == []
    assert compute_score("gsm8k", r"\boxed{1 800}", "1800")["correctness"]


@pytest.mark.parametrize(
    "said",
    [
        *("18 - good luck", "18 — good luck!", "18!", "18, since 9*2=18.", "18 (9 × 2).", "18 because 2*9=18"),
        *("**18**", "$18.", r"\[18\]", "18 dollars", "9 * 2 = $18."),
    ],
)
def test_a_stated_amount(said: str):
    assert compute_score("gsm8k", f"The answer is {said}", "18")["correctness"]
    assert not compute_score("gsm8k", f"The answer is {said}", "17")["correctness"]


@pytest.mark.parametrize(
    ("solution", "verdict"),
    [
        (r"1+1=02 \boxed{12}", Verdict(True, True, "exact", "12")),
        (r"\boxed{012}", Verdict(True, True, "exact", "012")),
        (r"\boxed{\frac{24}{2}}", Verdict(False, True, "different", r"\frac{24}{2}")),
        ("10+2=12", Verdict(True, False, "exact", "12")),
        ("", Verdict(False, False, "missing", "")),
    ],
)
def test_verify_arithmetic(solution: str, verdict: Verdict):
    assert verify_arithmetic(solution, "12") == verdict
    assert verify_arithmetic(solution, "12", quick=True) == verdict
