import pytest

from verl.rewards import compute_score
from verl.rewards.deepseek_r1 import has_r1_form, verify_deepseek_r1
from verl.rewards.score import Verdict


@pytest.mark.parametrize(
    ("solution", "has_form"),
    [
        ("<think>2+3</think> <answer>5</answer>", True),
        ("2+3</think>\n<answer>\n5\n</answer>\n", True),
        ("\n<think>\n</think><answer>5</answer>", True),
        ("<answer>5</answer>", False),
        ("<think>2+3</think> so <answer>5</answer>", False),
        ("<think>2+3</think> <answer>5</answer> done", False),
        ("so <think>2+3</think> <answer>5</answer>", False),
        ("<think>2+3</think> <answer> </answer>", False),
        ("<think>2+3</think> <answer>5", False),
        ("<think><think>2+3</think> <answer>5</answer>", False),
        ("<think>2</think> <think>3</think> <answer>5</answer>", False),
        ("<think>2+3</think> <answer>4</answer> <answer>5</answer>", False),
        ("<think><answer>5</answer></think>", False),
        ("<answer>5</answer></think>", False),
        ("", False),
    ],
)
def test_form(solution: str, has_form: bool):
    assert has_r1_form(solution) is has_form


@pytest.mark.parametrize(
    ("solution", "verdict"),
    [
        ("<think>so</think> <answer>1/2</answer>", Verdict(True, True, "exact", "1/2")),
        ("<think>so</think> <answer>0.5</answer>", Verdict(True, True, "equivalent", "0.5")),
        (r"<think>so</think> <answer>It is $\boxed{1/2}$.</answer>", Verdict(True, True, "exact", "1/2")),
        ("<think>so</think> <answer>The answer is $1/2$.</answer>", Verdict(True, True, "exact", "$1/2$")),
        ("<think>so</think> <answer>**1/2**</answer>", Verdict(True, True, "exact", "1/2")),
        (r"<think>so</think> <answer>\[1/2\]</answer>", Verdict(True, True, "exact", "1/2")),
        (r"<think>so</think> <answer>-\boxed{1/2}</answer>", Verdict(False, True, "different", "-(1/2)")),
        ("<think>so</think> <answer>3</answer>", Verdict(False, True, "different", "3")),
        ("so <answer>1/2</answer>", Verdict(True, False, "exact", "1/2")),
        ("<answer>3</answer> or <answer>1/2</answer>", Verdict(True, False, "exact", "1/2")),
        ("<answer>1/2</answer> or <answer>3", Verdict(True, False, "exact", "1/2")),
        (r"\boxed{1/2}", Verdict(False, False, "missing")),
        ("<think>so</think> <answer></answer>", Verdict(False, False, "missing")),
    ],
)
def test_verdict(solution: str, verdict: Verdict):
    assert verify_deepseek_r1(solution, "1/2") == verdict


def test_quick_leaves_algebra_to_others():
    assert verify_deepseek_r1("</think><answer>x+1</answer>", "1+x", quick=True) is None
    assert verify_deepseek_r1("</think><answer>4</answer>", "5", quick=True) == Verdict(False, True, "different", "4")


def test_the_form_takes_the_place_of_the_box():
    well_formed, other_form = "</think><answer>{}</answer>", "<answer>{}</answer>"
    scores = [
        compute_score("deepseek_r1", form.format(x), "5")["score"] for form in (well_formed, other_form) for x in "56"
    ]
    assert scores == [1.0, -0.5, 0.5, -1.0]
