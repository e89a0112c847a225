"""Custom reward functions that are added with weights."""

from pathlib import Path

import pytest

from tests.kit import scoring, user_code
from tests.tables import refusals
from verl.config.judge import JUDGE
from verl.config.rewards import RewardScoreConfig, summands
from verl.rewards.combined import INAPPLICABLE, add_verdicts, summand_names
from verl.rewards.custom import check_function, custom_verdict, further_parameters, is_async
from verl.rewards.pool import VerifierPool
from verl.rewards.services import question_key
from verl.verifiers.verdict import Verdict

FUNCTIONS = """
import asyncio

def right(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str == ground_truth

def short(solution_str, limit=3, **kwargs):
    return {"score": float(len(solution_str) <= limit), "length": len(solution_str)}

def style(solution_str, **kwargs):
    return None if "?" in solution_str else 0.5

def strict(solution_str, ground_truth, **kwargs):
    return {"score": -1, "acc": solution_str == ground_truth, "length": 99}

async def waits(solution_str, **kwargs):
    await asyncio.sleep(0.01)
    return 4.0

def never(**kwargs):
    return None

def graded(solution_str, level, **kwargs):
    return 1
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    return user_code(tmp_path, FUNCTIONS)


def test_paths_are_split_at_plus_signs():
    assert summands("a.py:f") == [(1.0, "a.py:f")]
    assert summands(".5*a.py:f + 2 * b.py:g") == [(0.5, "a.py:f"), (2.0, "b.py:g")]
    assert summands("m.n:f + -0.5*b/c.py:g+2e-1*h:i") == [(1.0, "m.n:f"), (-0.5, "b/c.py:g"), (0.2, "h:i")]
    # A file's name may have any of these characters.
    assert summands("c++/2*3.py:f") == [(1.0, "c++/2*3.py:f")]


def test_scores_are_added_with_weights_and_kept_by_name(file: str):
    path = f"{file}:right+0.5*{file}:short+-2*{file}:style"
    verdict = custom_verdict(path, "mine", "42", "42", {"limit": 1, "other": 3})
    # 1 + 0.5 * 0 - 2 * 0.5; the column `limit` reaches the function that has the parameter.
    assert verdict.score == 0.0 and verdict.correct
    assert verdict.extras == {"right": 1.0, "short": 0.0, "length": 2, "style": 0.5}
    assert further_parameters(path) == ("limit",)
    # None adds nothing, and the other weights stay as they are.
    asked = custom_verdict(path, "mine", "??", "42", {})
    assert (asked.score, asked.correct) == (0.5, False) and "style" not in asked.extras


def test_acc_of_any_function_says_what_is_correct(file: str):
    path = f"{file}:short+{file}:strict"
    assert [custom_verdict(path, "mine", text, "42", {}).correct for text in ("42", "4")] == [True, False]
    # The first extra value of a name stays.
    assert custom_verdict(path, "mine", "42", "42", {}).extras["length"] == 2


def test_same_names_are_numbered(file: str):
    assert is_async(f"{file}:waits+0.25*{file}:right") and not is_async(f"{file}:right+{file}:short")
    verdict = custom_verdict(f"{file}:right+{file}:right", "mine", "1", "1", {})
    assert verdict.score == 2.0 and verdict.extras == {"mine.right_1": 1.0, "mine.right_2": 1.0}


def test_names_of_results_keep_their_meaning(tmp_path: Path):
    """Functions may be called as the keys of results are, and be objects without a name."""
    source = """
import functools

def score(solution_str, **kwargs):
    return 0.25

def correctness(solution_str, **kwargs):
    return {"score": 0.5, "acc": False}

half = functools.partial(score)
"""
    file = user_code(tmp_path, source)
    verdict = custom_verdict(f"{file}:score+{file}:correctness+{file}:half", "mine", "1", "1", {})
    assert (verdict.score, verdict.correct) == (1.0, False)
    assert verdict.extras == {"mine.score": 0.25, "mine.correctness": 0.5, "half": 0.25}


def test_judge_keeps_its_name_and_decides_only_alone(file: str):
    parts = [(1.0, f"{JUDGE}"), (1.0, f"{file}:right"), (1.0, "b.py:judge")]
    assert summand_names(parts) == ["judge", "right", "b.judge"] and summand_names(parts[2:]) == ["b.judge"]
    judged = Verdict(True, False, "custom", score=0.5, stated=True)
    wrong = Verdict(False, False, "custom", score=0.0)
    assert add_verdicts(parts, [judged, INAPPLICABLE, INAPPLICABLE]).correct
    assert not add_verdicts(parts, [judged, wrong, INAPPLICABLE]).correct
    assert not add_verdicts(parts[1::-1], [wrong, judged]).correct


def test_answers_are_forgotten_when_their_function_changes(tmp_path: Path):
    files = [user_code(tmp_path, FUNCTIONS, name) for name in ("a.py", "b.py")]
    question = (f"{files[0]}:waits", "mine", "7", "7", {}, True)
    before = question_key(question)
    # Each function of a sum has its answers, which another one's file does not change.
    Path(files[1]).write_text(f"{FUNCTIONS}# changed")
    assert question_key(question) == before
    Path(files[0]).write_text(f"{FUNCTIONS}# changed")
    assert question_key(question) != before


@pytest.mark.parametrize(("call", "line"), refusals("rewards/refusals.txt", "sums"))
def test_sum_that_cannot_be_used_is_refused(file: str, refused, call: str, line: str):
    def score(path: str) -> Verdict:
        return custom_verdict(path.replace("FILE", file), "mine", "?", "1", {})

    def check(path: str) -> None:
        check_function(path.replace("FILE", file), {})

    def configured(path: str) -> RewardScoreConfig:
        return scoring(custom_functions=[f"mine={path}"])

    with refused(line):
        eval(call, {"score": score, "check": check, "configured": configured})


@pytest.mark.slow
def test_function_beside_a_coroutine_has_its_own_process(tmp_path: Path):
    """One that hangs is killed, holds up no coroutine, and costs its response alone; a verifier keeps its mode."""
    source = """
import asyncio, os, time

def hangs(solution_str, **_):
    if solution_str == "hang":
        time.sleep(600)
    return {"score": 0.5, "pid": os.getpid()}

async def waits(solution_str, **_):
    return {"score": 0.25, "loop": os.getpid()}
"""
    file = user_code(tmp_path, source)
    both, path = f"{file}:hangs+{file}:waits", "verl.rewards.registry:verifier"
    functions = [f"mine={both}", f"math={path}+2*{file}:waits", f"other={path}+{file}:waits"]
    config = scoring(mode="independent", custom_functions=functions, num_workers=1, timeout_s=5.0)
    sources = ["mine", "mine", "math", "math", "math", "other"]
    texts = ["7", "hang", "It is 7", r"\boxed{7}", "hang", "7"]
    with VerifierPool(config) as pool:
        found = pool.score_batch(sources, texts, ["7"] * 6)
    assert [verdict.score for verdict in found] == [0.75, 0.0, 0.5 + 0.5, 1.0 + 0.5, -1.0 + 0.5, 0.25]
    assert [verdict.reason for verdict in found][:5] == ["custom", "timeout", "exact", "exact", "missing"]
    assert found[0].extras["pid"] != found[0].extras["loop"] and found[3].extras["verifier"] == 1.0
    assert found[3].answer == "7" and found[5].extras == {"waits": 0.25} | found[5].extras
