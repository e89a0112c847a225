"""The names of the paper's release, as our earlier code recorded them on the embedded task."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from verl.config import PPOConfig, load_config
from verl.trainer.logging.release_names import release_names

SHAPING = load_config(PPOConfig, "ppo_trainer").reward_manager
INDICATORS = SHAPING.indicator_names
METRIC = "{Effective,Traditional} Rank{, diff, diff 2}"
DATASET = "{global/Effective Rank,cumulative/Effective Rank diff{, 2}}"
LENGTHS = "{mean,max,min,clip_ratio}"
OURS = f"""
    {{,val/}}cal/{{overall,correct,incorrect}}/layer_{{1,2}}/{METRIC}/{{mean,max,min}}
    {{,val/}}cal/layer_{{1,2}}/{DATASET}
    {{,val/}}cal/{{num_correct,num_incorrect,overall/layer_{{1,2}}/nonfinite}}
    {{,val/}}{{prompt_length,response_length,response_length/correct,response_length/incorrect}}/{LENGTHS}
    reward_manager/layer_{{1,2}}/Effective Rank{{, diff, diff 2}}/{{deviation,mu,weight}}
    reward_manager/{{layer_{{1,2}}/{{beta,beta_max,phi}},phi_mean,scale,shaped_token_share}}
    {{critic/score_0,score}}/mean
    val/{{pass@1,score/mean,verifier/exact}}
"""
RELEASE = f"""
    {{,val/}}cal/accuracy
    {{,val/}}cal/layer_{{1,2}}/{METRIC}/{{overall,correct,incorrect}}/{{mean,max,min}}
    {{,val/}}response_length/overall/{LENGTHS}
    cal/base_v/Effective Rank{{, diff, diff 2}}
    reward_manager/{{diff_2_tendency,percentage_deviation,performance_scaling_factor}}_mean
    reward_manager/{{relative_deviation,weight}}_effective_rank{{,_diff,_diff_2}}_mean
    val/arithmetic/layer_{{1,2}}/{METRIC}/{{overall,correct,incorrect}}
    val/arithmetic/layer_{{1,2}}/{DATASET}
    val/arithmetic/pass@1
    val/arithmetic/test_{{correctness,score,score_0,overall_len,correct_len,incorrect_len}}
    val/cal_{{overall,correct,incorrect}}/arithmetic/layer_{{1,2}}/{METRIC}
    val/test_{{correctness,score,score_0,overall_len,correct_len,incorrect_len}}/arithmetic
"""


def expanded(text: str) -> Iterator[str]:
    """The names that ``text`` stands for, its braces read as a shell does."""
    if match := re.search(r"{([^{}]*)}", text):
        for choice in match[1].split(","):
            yield from expanded(text[: match.start()] + choice + text[match.end() :])
    else:
        yield text


def listed(text: str) -> set[str]:
    return {name for line in text.strip().splitlines() for name in expanded(line.strip())}


def test_every_name_of_the_release_comes_back():
    extra = release_names(dict.fromkeys(listed(OURS), 1.0), SHAPING, dict.fromkeys(INDICATORS, 2.0), ["arithmetic"])
    assert set(extra) == listed(RELEASE)
    assert not set(extra) & listed(OURS)


SCORES = ["val/test_score_0/a/b", "val/a/b/test_score_0", "val/test_score/a/b", "val/a/b/test_score"]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("response_length/max", ["response_length/overall/max"]),
        ("cal/correct/layer_2/Curvature/min", ["cal/layer_2/Curvature/correct/min"]),
        ("reward_manager/layer_1/beta", ["reward_manager/diff_2_tendency_mean"]),
        ("val/score/mean", SCORES),
        ("val/response_length/correct/mean", ["val/test_correct_len/a/b", "val/a/b/test_correct_len"]),
        ("val/cal/layer_1/global/Curvature", ["val/a/b/layer_1/global/Curvature"]),
        ("val/cal/overall/layer_1/nonfinite", []),
        ("actor/lr", []),
    ],
)
def test_a_number_keeps_its_value(name: str, theirs: list[str]):
    assert release_names({name: 0.5}, SHAPING, {}, ["a/b"]) == dict.fromkeys(theirs, 0.5)


def test_terms_of_phi_are_those_of_the_first_layer():
    metrics = {"reward_manager/phi_mean": 0.0}
    for number, indicator in enumerate(INDICATORS):
        metrics |= {f"reward_manager/layer_1/{indicator}/deviation": float(number)}
        metrics |= {f"reward_manager/layer_2/{indicator}/deviation": 9.0}
    deviations = {"effective_rank_diff_2": 0.0, "effective_rank": 1.0, "effective_rank_diff": 2.0}
    expected = {f"reward_manager/relative_deviation_{name}_mean": value for name, value in deviations.items()}
    expected |= {"cal/base_v/Effective Rank": 31.5, "reward_manager/percentage_deviation_mean": 0.0}
    assert release_names(metrics, SHAPING, {"Effective Rank": 31.5}, []) == expected
    # A validation alone has no terms of Phi, and the guide need not be an indicator.
    assert release_names({"val/pass@1": 1.0}, SHAPING, {"Effective Rank": 31.5}, []) == {}
    shaping = replace(SHAPING, guidance_metric="avg_log_probs")
    metrics = {"reward_manager/phi_mean": 0.0, "reward_manager/layer_1/avg_log_probs/deviation": 4.0}
    assert release_names(metrics, shaping, {}, []) == {"reward_manager/percentage_deviation_mean": 4.0}


def test_several_sources_have_metrics_of_their_own():
    metrics = {"val/score/mean": 0.5, "val/a/score/mean": 0.0, "val/a/rewards/mean": 0.25, "val/b/pass@1": 1.0}
    names = {"val/test_score_0/a": 0.0, "val/test_score/a": 0.25, "val/test_correctness/b": 1.0}
    names |= {"val/b/pass@1": 1.0, "val/a/test_score_0": 0.0, "val/a/test_score": 0.25, "val/b/test_correctness": 1.0}
    assert release_names(metrics, SHAPING, {}, ["a", "b"]) == names


def test_the_accuracy_is_that_of_the_batch():
    counts = {"cal/num_correct": 1.0, "cal/num_incorrect": 3.0}
    assert release_names(counts, SHAPING, {}, []) == {"cal/accuracy": 0.25}
