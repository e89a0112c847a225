import pytest

from verl.rewards import compute_score
from verl.rewards.answers import extract_answer

IN_PLACE = [
    # numbers without a box
    ("so it is −18", "-18"),
    ("It is -$5", "-5"),
    ("#### -$5", "-5"),
    ("#### −18", "-18"),
    ("#### .5", ".5"),
    ("the chance is 1/18", "1/18"),
    ("It is not 18.", "not 18"),
    ("Not 18", "Not 18"),
    ("I say negative 18", "negative 18"),
    ("it costs 18 million", "18 million"),
    ("it costs 18k", "18k"),
    ("18 is wrong", "18 is wrong"),
    ("so √18", "√18"),
    ("so 18²", "18²"),
    ("so 2^18", "2^18"),
    ("so 18x", "18x"),
    ("so 18 + x", "18 + x"),
    ("so x/18", "x/18"),
    ("thus 18π", "18π"),
    ("= $1{,}800$", "1800"),
    # what changes nothing
    ("9+9 = 18", "18"),
    ("is **18**.", "18"),
    ("=> 18", "18"),
    ("<b>18</b>", "18"),
    ("Step 3 - 18", "18"),
    ("18 - good luck", "18"),
    ("it costs $18/day.", "18"),
    ("18-inch", "18"),
    ("- 18", "18"),
    # boxes
    (r"x = -\boxed{5}", "-5"),
    (r"$-\boxed{5}$", "-5"),
    (r"6, not \boxed{5}", "not 5"),
    (r"\boxed{5}^2", "5^2"),
    (r"2 + 3 = 5; 50\boxed{5}", "5"),  # what comes before a box was computed on the way
    (r"\boxed{x+1}^2", "(x+1)^2"),
    (r"\boxed{5} million", "5 million"),
    (r"\boxed{28.71}^{\circ}", "28.71"),
    (r"\boxed{5} m", "5"),
    (r"- \boxed{5}", "5"),
    (r"3 - 2 = \boxed{1}", "1"),
    (r"2 + \boxed{3} = 5", "3"),
    (r"\boxed{5} + C", "5"),
]


@pytest.mark.parametrize(("text", "answer"), IN_PLACE)
def test_an_answer_comes_with_what_changes_it(text: str, answer: str):
    assert extract_answer(text)[0] == answer


CHANGED = (
    r"It is not 5.|−5|so 5 million|so √5|so x^5|1/5|5²|5 is wrong|negative 5|#### −5|#### 5k|x = -\boxed{5}"
    r"|\sqrt{\boxed{5}}|\boxed{5}^2|\boxed{5}x|6, not \boxed{5}|$\frac{\boxed{5}}{2}$"
).split("|")


@pytest.mark.parametrize("source", ["arithmetic", "gsm8k", "math", "open_answer"])
def test_no_verifier_takes_the_number_alone(source: str):
    assert [text for text in CHANGED if compute_score(source, text, "5")["correctness"]] == []
    for text in ("−5", r"x = -\boxed{5}", "-$5", "so it is −5"):
        assert compute_score(source, text, "-5")["correctness"], text
    assert compute_score(source, r"4*5=20;50\boxed{5}", "5")["correctness"]
