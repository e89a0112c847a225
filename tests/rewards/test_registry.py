import subprocess
import sys

import pytest

from verl.rewards import compute_score, register_verifier
from verl.rewards.registry import DEEPSEEK_R1, KNIGHTS_AND_KNAVES, MATH, PREFIXES, VERIFIERS, find_scorer, load_verifier
from verl.rewards.score import Verdict, score_of


@pytest.mark.parametrize(
    ("solution", "independent", "mix"),
    [(r"\boxed{12}", 1.0, 1.0), ("12", 0.5, 1.0), (r"\boxed{13}", -0.5, 0.0), ("13", -1.0, 0.0), ("", -1.0, 0.0)],
)
@pytest.mark.parametrize("source", ["arithmetic", "openai/gsm8k", "math"])
def test_scores(source: str, solution: str, independent: float, mix: float):
    result = compute_score(source, solution, "12", {"index": 1})
    assert result["score"] == independent
    assert result["correctness"] is (independent > 0)
    assert result["boxed"] is solution.startswith("\\")
    assert compute_score(source, solution, "12", mode="mix")["score"] == mix


def test_every_registered_verifier_loads():
    assert all(callable(load_verifier(path)) for path in [*VERIFIERS.values(), *PREFIXES.values()])


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("simplelr_qwen", MATH),
        ("simplelr_abel_hard", MATH),
        ("deepseek_r1", DEEPSEEK_R1),
        ("deepseek_r1_qwen", DEEPSEEK_R1),
        ("kk", KNIGHTS_AND_KNAVES),
        ("kk_5ppl", KNIGHTS_AND_KNAVES),
        ("kk/5ppl", KNIGHTS_AND_KNAVES),
        ("K-and-K/knights-and-knaves", KNIGHTS_AND_KNAVES),
    ],
)
def test_variants_of_a_family_share_its_verifier(source: str, path: str):
    assert find_scorer(source) == (path, False)


@pytest.mark.parametrize("source", ["kkk", "simplelr", "my_kk_set", "deepseek_r10"])
def test_no_variant_of_a_family(source: str):
    with pytest.raises(ValueError, match=f"data_source='{source}': must be one of"):
        find_scorer(source)


def test_unknown_source_names_the_known_ones():
    with pytest.raises(ValueError, match=r"data_source='gsm9k': must be one of arithmetic, .*; did you mean 'gsm8k'"):
        compute_score("gsm9k", "1", "1")


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode='both': must be one of independent, mix"):
        compute_score("math", "1", "1", mode="both")


def test_long_answers_are_cut_in_the_score():
    assert len(score_of(Verdict(False, True, "different", "x" * 1000), "mix")["answer"]) == 200


def test_register_verifier(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.rewards.registry.VERIFIERS", dict(VERIFIERS))
    register_verifier("mine", "verl.rewards.arithmetic:verify_arithmetic")
    assert compute_score("mine", "5", "5")["score"] == 0.5
    register_verifier("mine", "verl.rewards.arithmetic:verify_arithmetic")
    with pytest.raises(ValueError, match="data_source='mine': already scored by"):
        register_verifier("mine", "verl.rewards.math:verify_math")
    with pytest.raises(ValueError, match="verifier of other='no_function': must have the form module:function"):
        register_verifier("other", "no_function")


def test_a_verifier_without_a_verdict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(VERIFIERS, "silent", "builtins:print")
    with pytest.raises(TypeError, match="builtins:print returned None with quick=False"):
        compute_score("silent", "5", "5")


@pytest.mark.slow
def test_importing_the_package_loads_no_algebra():
    code = "import sys, verl.rewards, verl.rewards.pool; print({'sympy', 'math_verify', 'torch'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"
