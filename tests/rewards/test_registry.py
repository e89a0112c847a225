import math
import time

import pytest

from tests.tables import refusals
from verl.algorithms.votes import answer_classes
from verl.config.errors import ConfigError
from verl.config.judge import JUDGE
from verl.config.rewards import VERIFIER
from verl.rewards import check_ground_truth, compute_score
from verl.rewards.registry import CUSTOM_FUNCTIONS, VERIFIERS, Job, find_scorer, rewards_boxes
from verl.rewards.score import with_score
from verl.verifiers.answers import vote_key


@pytest.mark.parametrize(
    ("source", "family"),
    [
        *((source, "math") for source in ("math_dapo", "math_dapo_reasoning", "aime2024", "numina_olympiads")),
        ("simplelr_qwen", "math"),
        ("simplelr_abel_hard", "math"),
        ("deepseek_r1", "deepseek_r1"),
        ("deepseek_r1_qwen", "deepseek_r1"),
        ("kk", "kk"),
        ("kk_5ppl", "kk"),
        ("kk/5ppl", "kk"),
        ("K-and-K/knights-and-knaves", "kk"),
    ],
)
def test_variants_of_a_family_share_its_verifier(source: str, family: str):
    assert find_scorer(source) == (VERIFIERS[family], False)


def test_unknown_source_or_mode_is_refused(refused):
    own = "reward_score.custom_functions may name your own: ['gsm9k=file.py:function']"
    with refused(f"data_source='gsm9k': must be one of arithmetic, ...; {own}; did you mean 'gsm8k'..."):
        compute_score("gsm9k", "1", "1")
    for source in ("kkk", "simplelr", "my_kk_set", "deepseek_r10"):  # no variants of a family
        with refused(f"data_source='{source}': must be one of ..."):
            find_scorer(source)
    with refused("mode='both': must be one of independent, mix, partial", ValueError):
        compute_score("math", "1", "1", mode="both")


def test_verifier_without_a_verdict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.rewards.score.silent", lambda *_, quick: None, raising=False)
    monkeypatch.setitem(VERIFIERS, "silent", "verl.rewards.score:silent")
    with pytest.raises(TypeError, match="verl.rewards.score:silent returned None with quick=False"):
        compute_score("silent", "5", "5")


def test_majority_votes_are_answers_after_the_thoughts():
    responses = [rf"<think>\boxed{{{thought}}}</think> \boxed{{{answer}}}" for thought, answer in ["57", "68", "78"]]
    responses += [r"<think>\boxed{7}"]
    scores = [compute_score("math", response, "9") for response in responses]
    # Two votes for 8, one for 7; a thought without an end has none.
    assert not any(score["acc"] for score in scores)
    assert answer_classes([False] * 4, [vote_key(score["answer"]) for score in scores]) == ([1, 2, 2, -1], None)


TWO = [
    "(1) Alice is a knight\n(2) Bob is a knave",
    '{"Alice": "knight", "Bob": "knave"}',
    ' {"Alice": "Knight", "Bob": "KNAVE"}',
    "Alice is a knight, and Bob is a knave.",
    "Bob is a knave, Alice is a knight",
]

TOOL_CALL = """<think>Where?</think>
<tool_call>
{"name": "weather", "parameters": {"city": "Rome", "days": 2}}
{"name": "time", "parameters": {}}
</tool_call>"""


@pytest.mark.parametrize(
    ("source", "truth", "right", "wrong"),
    [
        ("math", 5, "5", "6"),
        ("math", 10**20, "1" + "0" * 20, "1" + "0" * 19),
        ("math", 18.0, "18", "18.5"),
        ("math", 1e-07, "0.0000001", "1"),
        ("math", 1e22, "1" + "0" * 22, "1"),
        ("math", ["5", 7, 0.5], r"\boxed{\frac{1}{2}}", "6"),
        ("gsm8k", [18, "eighteen"], "#### 18", "#### 19"),
        ("arithmetic", -3, "-3", "3"),
        ("deepseek_r1", [3, 4], "<answer>4</answer>", "<answer>5</answer>"),
        ("open_answer", ["New York", "NYC"], r"\boxed{NYC}", r"\boxed{LA}"),
        ("open_answer", True, r"\boxed{true}", r"\boxed{false}"),
        ("open_answer", [False, "no"], r"\boxed{False}", r"\boxed{True}"),
        ("multiple_choice", ["B"], "The answer is (B)", "The answer is (A)"),
        ("kk", {"Alice": "knave", "Bob": None}, "<answer>Alice is a knave</answer>", "<answer>Bob is a knave</answer>"),
        *((("kk", truth, "Alice is a knight. Bob is a knave.", "Alice is a knave. Bob is a knave.")) for truth in TWO),
        ("searchR1_nq", {"target": ["NYC", 1898]}, "<answer>1898</answer>", "<answer>1899</answer>"),
        ("searchR1_hotpotqa", {"target": "NYC"}, "<answer>nyc</answer>", "NYC"),
        ("search_r1", ["NYC", True], "<answer>true</answer>", "<answer>LA</answer>"),
        ("rlla", TOOL_CALL, TOOL_CALL, TOOL_CALL.replace("Rome", "Oslo")),
        ("rlla", "<think></think>\n<response>Hi</response>", "<think>\n</think>\n<response>Yes</response>", TOOL_CALL),
        ("countdown", {"target": 7, "numbers": [3, 4]}, "<answer>3+4</answer>", "<answer>3*4</answer>"),
        ("countdown", {"target": 7.0, "numbers": (3.0, 4), "id": "x"}, r"\boxed{3+4}", r"\boxed{7}"),
        ("countdown", '{"target": 7, "numbers": [3, 4]}', r"\boxed{3+4}", r"\boxed{7}"),
    ],
)
def test_ground_truths_of_every_type(source: str, truth: object, right: str, wrong: str):
    check_ground_truth(source, truth)
    assert compute_score(source, right, truth)["acc"] is True
    assert compute_score(source, wrong, truth)["acc"] is False


def test_any_accepted_answer_is_right():
    scorer, truth = find_scorer("math"), [r"\frac{x}{2}", "7"]
    assert Job(scorer, "math", "7", truth).verdict(quick=True).reason == "exact"
    # 0.5 x needs algebra for the first of them, so a wrong answer does too.
    assert Job(scorer, "math", r"\boxed{0.5x}", truth).verdict(quick=True) is None
    assert Job(scorer, "math", r"\boxed{0.5x}", truth).verdict().reason == "equivalent"
    assert Job(scorer, "math", "8", truth).verdict().reason == "different"


@pytest.mark.parametrize(("source", "truths", "line"), refusals("rewards/refusals.txt", "truths"))
def test_ground_truths_that_nothing_can_match_are_refused(refused, source: str, truths: str, line: str):
    deep: list = []
    for _ in range(10**5):
        deep = [deep]
    for truth in eval(f"[{truths}]", {"deep": deep}):
        with refused(line.replace("SCORED", f"(data_source='{source}' is scored by ...)")):
            check_ground_truth(source, truth, {"mine": "builtins:print"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, "Infinity", "sNaN", "1e400", "a lot", True])
def test_tolerance_that_makes_every_answer_right_or_wrong(value: object):
    for name in ("tolerance", "relative_tolerance"):
        with pytest.raises(ConfigError, match=rf"^extra_info.{name}=.*: must be a number from 0 to below"):
            check_ground_truth("open_answer", "5.5", extra_info={name: value})
        # Without the check, as none at all.
        assert not compute_score("open_answer", r"\boxed{7.5}", "5.5", {name: value})["acc"]
        assert compute_score("open_answer", r"\boxed{5.50}", "5.5", {name: value})["acc"]
    check_ground_truth("open_answer", "5.5", extra_info={"tolerance": "1e-1", "relative_tolerance": 0.01})


def test_longest_countdown_is_quick():
    numbers = [10**12 - i for i in range(25)]
    expression = "/".join(f"({number}" for number in numbers) + ")" * 25
    assert len(expression) <= 400
    job = Job(find_scorer("countdown"), "countdown", rf"\boxed{{{expression}}}", {"target": 1, "numbers": numbers})
    started = time.perf_counter()
    for _ in range(20):
        assert job.verdict(quick=True).reason == "different"
    # Well under a millisecond each; the bound leaves room for a loaded machine.
    assert (time.perf_counter() - started) / 20 < 0.01


@pytest.mark.parametrize(
    ("response", "asked", "other"),
    [
        # Of a prompt that asks for ####, and of any other.
        ("8 * 9 is 72\n#### 72", 1.0, 0.5),
        (r"\boxed{72}", 1.0, 1.0),
        ("junk 72", 0.5, 0.5),
        ("#### 71", -0.5, -1.0),
        ("#### 2. Solve it\n72", 0.5, 0.5),
        ("71", -1.0, -1.0),
    ],
)
def test_form_that_the_prompt_asks_for_is_well_formed(response: str, asked: float, other: float):
    scores = []
    for takes_hashes in (True, False):
        job = Job(find_scorer("gsm8k"), "gsm8k", response, "72", None, takes_hashes)
        scores.append(with_score(job.verdict(), "independent").score)
    assert scores == [asked, other]


@pytest.mark.parametrize(
    ("calls", "score"),
    [
        # Names: 2 of 2. Of at most 1 + 3 + 1 = 5 points: 1 for the names, 1 + 1 for the first call, 1 for the second.
        ('{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}\n{"name": "time", "parameters": {}}', 1.8),
        ('{"name": "time", "parameters": {}}\n{"name": "weather", "parameters": {"city": "Rome", "days": 2}}', 3.0),
        # Names: 1 of 2; the call's parameters: 1 of 2, with the right value: 2 of 5 points.
        ('{"name": "weather", "parameters": {"city": "Rome"}}', -0.6),
        ("no call", -3.0),
        ('{"name": "weather"}', -3.0),
        ('{"name": "time", "parameters": {}}\n' * 65, -3.0),
        ("[" * 10**5, -3.0),
    ],
)
def test_tool_calls_are_scored_by_their_parts(calls: str, score: float):
    response = f"<think>\n</think>\n<tool_call>\n{calls}\n</tool_call>"
    found = compute_score("rlla", response, TOOL_CALL)
    assert found["reward_extra_info"] == {"format_reward": 1.0, "accuracy_reward": pytest.approx(score)}
    assert found["score"] == pytest.approx(1 + score) and found["boxed"] and found["acc"] == (score == 3)
    assert compute_score("rlla", response + " more", TOOL_CALL)["score"] == pytest.approx(score)


def test_verifier_of_a_sum_expects_its_box(monkeypatch: pytest.MonkeyPatch):
    assert rewards_boxes("gsm8k") and not rewards_boxes("countdown")
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "*", f"1.0*{VERIFIER}+0.5*{JUDGE}")
    assert rewards_boxes("gsm8k") and not rewards_boxes("countdown") and not rewards_boxes("mine")
    monkeypatch.setitem(CUSTOM_FUNCTIONS, "*", f"0.5*{JUDGE}")
    assert not rewards_boxes("gsm8k")
