"""The tables of an analysis on two literal responses, the release's names and files among them."""

import math

import openpyxl
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from verl.analysis.correlations import correlation_table
from verl.analysis.figures import draw_figures, write_figures
from verl.analysis.page import build_page
from verl.analysis.responses import count_words
from verl.analysis.sheets import (
    ResponseData,
    check_pairs,
    prompt_columns,
    prompt_row,
    response_columns,
    response_row,
    write_tables,
)
from verl.config import ConfigError
from verl.config.analysis import AnalysisConfig, parse_analysis_config
from verl.config.load import CONFIG_DIR
from verl.evaluation.benchmarks import Problem
from verl.evaluation.store import StoredSample
from verl.rollout.requests import MeasuredPrompt

LOG2 = math.log(2)

RELEASE_RESPONSE = """Effective Rank, Effective Rank diff, Effective Rank diff 2, test_score_0, correctness,
avg_log_probs, response_entropy, response_confidence, n_gram_repetition_rate, response_length"""
RELEASE_PROMPT = """test_score_0_avg, correctness_avg, Effective Rank Avg, Effective Rank diff Avg,
Effective Rank diff 2 Avg, Effective Rank Stack, Effective Rank diff Stack, Effective Rank diff 2 Stack,
exploration_token_jsd, pairwise_kl_div, pairwise_euclidean_dist, pairwise_cosine_sim, dist_to_center,
response_entropy_avg, response_confidence_avg, response_entropy_stack, response_confidence_stack, pairwise_rouge_l,
pairwise_rouge_l_text, pairwise_rouge1_token, pairwise_rouge1_text, pairwise_rouge2_token, pairwise_rouge2_text,
n_gram_repetition_rate_avg, n_gram_repetition_rate_stack, response_length_avg, response_length_stack,
avg_log_probs_avg"""


def analysis_config(*overrides: str) -> AnalysisConfig:
    fixed = ["evaluation=embedded", "calculator.layers=[0,-1]", "n_sampling=2", "analysis.repetition_n=2"]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return parse_analysis_config(compose("analysis", overrides=[*fixed, *overrides]))


RANKS = {f"Effective Rank{end}": [10.0 + i, 20.0 + i] for i, end in enumerate(("", " diff", " diff 2"))}


def measured(logprob: float) -> dict[str, list[float]]:
    return RANKS | {"avg_log_probs": [logprob], "avg_logits_entropy": [0.5]}


PROBLEM = Problem(0, "=1+1", "2", "arithmetic", {}, None)
DATA = [
    ResponseData(
        StoredSample(0, 0, "Wait, 7 7 8.", 4, False, {}, [7, 7, 8, 2]),
        {"score": 1.0, "correctness": True, "boxed": True, "reason": "exact", "answer": "2", "reward_extra_info": {}},
    ),
    ResponseData(
        StoredSample(0, 1, "7 7", 2, True, {}, [7, 7]),
        {"score": 0.0, "correctness": False, "boxed": False, "reason": "x", "answer": "", "reward_extra_info": {}},
    ),
]
DISTANCES = {"pairwise_euclidean_dist": 1.0, "pairwise_cosine_sim": 0.9, "dist_to_center": 0.5}


def rows_of(config: AnalysisConfig) -> tuple[list[dict[str, object]], dict[str, object]]:
    responses = [response_row(config, data, PROBLEM, measured(-0.1 * (i + 1))) for i, data in enumerate(DATA)]
    stack = {name: [value + 5 for value in values] for name, values in RANKS.items()}
    found = MeasuredPrompt(0, [measured(-0.1), measured(-0.2)], stack, DISTANCES, [])
    return responses, prompt_row(config, DATA, responses, found)


def test_the_columns_have_the_releases_names():
    config = analysis_config()
    for names, columns in ((RELEASE_RESPONSE, response_columns(config)), (RELEASE_PROMPT, prompt_columns(config))):
        assert {name.strip() for name in names.split(",")} <= set(columns) and len(set(columns)) == len(columns)


def test_a_response_by_hand():
    config = analysis_config()
    first, second = rows_of(config)[0]
    assert list(first) == [*response_columns(config), "question", "response"]
    # analysis.layer is the last one, the second of calculator.layers.
    assert (first["Effective Rank"], first["layer_1/Effective Rank"], first["Effective Rank diff 2"]) == (20, 10, 22)
    shares = {"response_entropy": 1.5 * LOG2, "avg_response_entropy": 1.5 * LOG2, "response_confidence": 5 / 3 * LOG2}
    assert {name: first[name] for name in shares} == pytest.approx(shares)
    expected = {"n_gram_repetition_rate": 0, "response_length": 4, "reflection_words": 1, "boxed": 1, "truncated": 0}
    expected |= {"test_score_0": 1, "correctness": 1, "avg_log_probs": -0.1, "avg_logits_entropy": 0.5}
    assert {name: first[name] for name in expected} == expected
    assert (second["truncated"], second["boxed"], second["correctness"], second["response_entropy"]) == (1, 0, 0, 0)


def test_a_prompt_by_hand():
    _, row = rows_of(analysis_config())
    # Stacked tokens 7 7 8 2 7 7: shares 2/3, 1/6, 1/6; bigrams 77, 78, 82 and 77 again.
    thirds = {"response_entropy_stack": 2 / 3 * math.log(1.5) + math.log(6) / 3, "response_length_stack": 6}
    thirds["response_confidence_stack"] = (math.log(1.5) + 2 * math.log(6)) / 3
    thirds["n_gram_repetition_rate_stack"] = 0.25
    assert {name: row[name] for name in thirds} == pytest.approx(thirds)
    # The distributions (1/2, 1/4, 1/4) and (1, 0, 0): their mean is (3/4, 1/8, 1/8).
    jsd = (0.5 * math.log(2 / 3) + 0.5 * LOG2 + math.log(4 / 3)) / 2
    kl = (-0.5 * LOG2 + 0.5 * (math.log(0.25) + 20 * math.log(10)) + LOG2) / 2
    pairs = {"exploration_token_jsd": jsd, "pairwise_kl_div": kl, "pairwise_rouge_l": 2 / 3} | DISTANCES
    pairs |= {"pairwise_rouge1_token": 2 / 3, "pairwise_rouge2_token": 0.5, "pairwise_textual_similarity": 0.5}
    # Words "wait 7 7 8" and "7 7".
    pairs |= {"pairwise_rouge1_text": 2 / 3, "pairwise_rouge2_text": 0.5, "pairwise_rouge_l_text": 2 / 3}
    assert {name: row[name] for name in pairs} == pytest.approx(pairs)
    means = {"Effective Rank Avg": 20, "Effective Rank Stack": 25, "layer_1/Effective Rank diff Stack": 16}
    means |= {"correctness_avg": 0.5, "avg_log_probs_avg": -0.15, "response_length_avg": 3, "boxed_avg": 0.5}
    assert {name: row[name] for name in means} == pytest.approx(means)


@pytest.mark.parametrize(
    ("text", "count"),
    [("Wait, wait. Awaiting", 2), ("Let me check again", 1), ("let me\ncheck", 0), ("RE-CHECK", 1), ("", 0)],
)
def test_reflection_words_are_whole(text: str, count: int):
    assert count_words(text, ["wait", "check again", "let me check again", "re-check", "check"]) == count + (
        text == "let me\ncheck"
    )
    assert count_words(text, []) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("analysis.response_pairs=[[Efective Rank,correctness]]", "did you mean 'Effective Rank'?"),
        ("analysis.prompt_pairs=[[correctness_avg,pairwise_rouge]]", "did you mean 'pairwise_rouge_l'?"),
    ],
)
def test_a_pair_of_unknown_metrics_is_named(override: str, message: str):
    check_pairs(analysis_config())
    with pytest.raises(ConfigError, match="is not measured") as caught:
        check_pairs(analysis_config(override))
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("analysis.layer=3", "analysis.layer=3: must be one of calculator.layers="),
        ("n_sampling=1", "n_sampling=1: pairs of responses need several"),
        ("calculator.enable=false", "calculator.enable=False: the analysis is of rank metrics"),
        ("analysis.kl_floor=0", "analysis.kl_floor=0.0: must be above 0"),
        ("analysis.outcome=luck", "analysis.outcome='luck': must be one of correctness, test_score_0"),
        ("analysis.response_pairs=[[a]]", "analysis.response_pairs=['a']: a pair is two metrics"),
        ("analysis.prompt_files=[a/x.parquet,b/x.json]", "two files have the same name"),
        ("analysis.prompt_files=[a/arithmetic.parquet]", "a file is named like a benchmark"),
    ],
)
def test_what_cannot_be_analysed_is_refused(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        analysis_config(override)
    assert message in str(caught.value)


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
                course = {"tokens": [8, 16, 20], "Effective Rank": [3.0, 5.0 + j, 6.0], "entropy": [0.1, 0.2, 0.3]}
                at = {name: place[name] for name in ("run", "step", "benchmark", "temperature", "prompt_id")}
                at |= {"rollout_id": j, "correctness": one["correctness"]}
                courses.append(pd.DataFrame(at | course))
            prompts.append(place | {"rollout_id": -1} | row | {"exploration_token_jsd": 0.1 * prompt})
    frame = pd.DataFrame(responses)
    pairs = [("Effective Rank", "avg_log_probs")]
    found = correlation_table(frame[frame["step"] == 0], pairs, "response_length", "correctness", 50, 0)
    keys = pd.DataFrame([{k: v for k, v in PLACE.items() if k != "data_source"} | {"step": 0, "of": "response"}] * 3)
    return frame, pd.DataFrame(prompts), pd.concat(courses), pd.concat([keys, found], axis=1)


def test_files_are_read_back(tmp_path):
    responses, prompts, _, correlations = tables(analysis_config())
    sheets = {"exploit_data (per-rollout)": responses, "explore_data (per-prompt)": prompts}
    path = write_tables(tmp_path, sheets | {"correlations": correlations})
    found = pd.read_excel(path, sheet_name=None)
    assert list(found) == [*sheets, "correlations"]
    pd.testing.assert_frame_equal(
        found["exploit_data (per-rollout)"], responses.drop(columns=["question", "response"]), check_dtype=False
    )
    # A question that a spreadsheet would calculate stays out of the workbook.
    cells = openpyxl.load_workbook(path)["exploit_data (per-rollout)"]
    assert not any(str(cell.value).startswith("=") for row in cells.iter_rows() for cell in row)
    assert pd.read_parquet(tmp_path / "responses.parquet")["question"][0] == "=1+1"
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "correlations.parquet"), correlations)


@pytest.mark.slow
def test_figures_and_the_page(tmp_path):
    pairs = ["[[Effective Rank,avg_log_probs]]", "[[exploration_token_jsd,correctness_avg]]"]
    config = analysis_config(f"analysis.response_pairs={pairs[0]}", f"analysis.prompt_pairs={pairs[1]}")
    responses, prompts, courses, correlations = tables(config)
    (tmp_path / "old.svg").write_text("")
    figures = write_figures(tmp_path, draw_figures(config, responses, prompts, courses, correlations))
    names = [name for name, _ in figures]
    one = [f"{kind}_a%3Cb@{{}}_sums_T1" for kind in ("scatter_responses", "scatter_prompts", "correctness", "along")]
    one.append("layers_a%3Cb@{}_sums_T1")
    assert names == [*(name.format(0) for name in one), *(name.format(5) for name in one), "checkpoints"]
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {f"{name}.{end}" for name in names for end in ("svg", "png")}
    scatter = (tmp_path / f"{names[0]}.svg").read_text()
    row = correlations.iloc[0]
    assert f"r = {row['pearson']:.2f} [{row['pearson_low']:.2f}, {row['pearson_high']:.2f}]" in scatter
    assert "Effective Rank  (exploration)" in scatter and "correct responses" in scatter
    page = build_page("<i>Title</i>", ["one & all"], tmp_path, figures, correlations)
    assert page.count("<img ") == 11 and "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "&lt;i&gt;Title" in page and "a&lt;b@0 on sums" in page and "<i>" not in page and "a<b" not in page
    assert f"{row['pearson']:.2f}<br>[{row['pearson_low']:.2f}, {row['pearson_high']:.2f}]" in page
