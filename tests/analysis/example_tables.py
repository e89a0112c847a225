"""The tables of an analysis of two literal responses to each of twelve prompts, at two steps."""

from functools import cache
from typing import Any

import pandas as pd
from hydra import compose, initialize_config_dir

from verl.analysis.correlations import correlation_table
from verl.analysis.sheets import prompt_row, response_row
from verl.config.analysis import AnalysisConfig, parse_analysis_config
from verl.config.load import CONFIG_DIR
from verl.evaluation.benchmarks import Problem
from verl.evaluation.store import StoredSample
from verl.verifiers.verdict import Verdict
from verl.workers.measurements import MeasuredPrompt


@cache
def analysis_config(*overrides: str) -> AnalysisConfig:
    fixed = ["evaluation=embedded", "calculator.layers=[0,-1]", "n_sampling=2", "analysis.repetition_n=2"]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return parse_analysis_config(compose("analysis", overrides=[*fixed, *overrides]))


RANKS = {f"Effective Rank{end}": [10.0 + i, 20.0 + i] for i, end in enumerate(("", " diff", " diff 2"))}


def measured(logprob: float) -> dict[str, list[float]]:
    return RANKS | {"avg_log_probs": [logprob], "avg_logits_entropy": [0.5]}


PROBLEM = Problem(0, "=1+1", "2", "arithmetic", {}, None)
SAMPLES = [
    StoredSample(0, 0, "Wait, 7 7 8.", 4, False, {}, [7, 7, 8, 2]),
    StoredSample(0, 1, "7 7", 2, True, {}, [7, 7]),
]
SCORES = [
    Verdict(True, True, "exact", "2", 1.0),
    Verdict(False, False, "x", "", 0.0),
]
DISTANCES = {"pairwise_euclidean_dist": 1.0, "pairwise_cosine_sim": 0.9, "dist_to_center": 0.5}


def rows_of(config: AnalysisConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    pairs = zip(SAMPLES, SCORES, (-0.1, -0.2), strict=True)
    responses = [response_row(config, sample, score, PROBLEM, measured(logprob)) for sample, score, logprob in pairs]
    stack = {name: [value + 5 for value in values] for name, values in RANKS.items()}
    found = MeasuredPrompt(0, [measured(-0.1), measured(-0.2)], stack, DISTANCES, [])
    return responses, prompt_row(config, SAMPLES, responses, found)


PLACE = {"run": "a<b", "benchmark": "sums", "temperature": 1.0, "data_source": "arithmetic"}


def tables(config: AnalysisConfig) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Twelve prompts at two steps, a few figures varied."""
    responses, prompts, courses = [], [], []
    for step in (0, 5):
        for prompt in range(12):
            rows, row = rows_of(config)
            place = PLACE | {"step": step, "prompt_id": prompt}
            for j, one in enumerate(rows):
                varied = {"Effective Rank": 20.0 + prompt * (1 + j), "avg_log_probs": -0.1 * (prompt + 1) + step}
                responses.append(place | {"rollout_id": j} | one | varied)
                course = {"tokens": [9, 17, 20], "Effective Rank": [3.0, 5.0 + j, 6.0], "entropy": [0.1, 0.2, 0.3]}
                course |= {"state_speed": [1.0, 1.0, 1.0 + j], "state_dispersion": [2.0, 2.0, 2.0]}
                at = {name: place[name] for name in ("run", "step", "benchmark", "temperature", "prompt_id")}
                at |= {"rollout_id": j, "correctness": one["correctness"]}
                courses.append(pd.DataFrame(at | course))
            prompts.append(place | {"rollout_id": -1} | row | {"exploration_token_jsd": 0.1 * prompt})
    frame = pd.DataFrame(responses)
    pairs = [("Effective Rank", "avg_log_probs")]
    found = correlation_table(frame[frame["step"] == 0], pairs, "response_length", "correctness", 50, 0)
    keys = pd.DataFrame([{k: v for k, v in PLACE.items() if k != "data_source"} | {"step": 0, "of": "response"}] * 3)
    return frame, pd.DataFrame(prompts), pd.concat(courses), pd.concat([keys, found], axis=1)
