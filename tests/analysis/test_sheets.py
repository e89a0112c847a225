"""The tables of an analysis on two literal responses, the release's names and files among them."""

import math
from pathlib import Path

import openpyxl
import pandas as pd
import pytest

from tests.analysis.example_tables import DISTANCES, analysis_config, rows_of, tables
from tests.kit import refused
from tests.tables import refusals
from verl.analysis.sheets import check_pairs, prompt_columns, response_columns, write_tables

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


def test_the_columns_have_the_releases_names():
    config = analysis_config()
    for names, columns in ((RELEASE_RESPONSE, response_columns(config)), (RELEASE_PROMPT, prompt_columns(config))):
        assert {name.strip() for name in names.split(",")} <= set(columns) and len(set(columns)) == len(columns)


def test_a_response_by_hand():
    config = analysis_config()
    first, second = rows_of(config)[0]
    assert list(first) == [*response_columns(config), "question", "response"]
    # analysis.layer is the last one, the second of calculator.layers; its metrics come first.
    assert list(first)[2:5] == ["Effective Rank diff 2", "layer_1/Effective Rank", "layer_1/Effective Rank diff"]
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


@pytest.mark.parametrize(("override", "line"), refusals("analysis/refusals.txt", "options"))
def test_invalid_options_are_refused(override: str, line: str):
    check_pairs(analysis_config())
    with refused(line):
        check_pairs(analysis_config(override))


def test_files_are_read_back(tmp_path: Path):
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


HOSTILE_SOURCES = ["=cmd|' /C calc'!A0", "+1+1", "@SUM(1)", "\x00\x1b[31m\x7f", "x" * 40_000, "\u202e=1", "#REF!"]


def test_texts_in_cells_are_texts(tmp_path: Path):
    responses = pd.DataFrame({"data_source": HOSTILE_SOURCES, "Effective Rank": [math.nan, *range(6)]})
    path = write_tables(tmp_path, {"exploit_data (per-rollout)": responses})
    sheet = openpyxl.load_workbook(path)["exploit_data (per-rollout)"]
    cells = [row[0] for row in sheet.iter_rows(min_row=2)]
    assert {cell.data_type for cell in cells} == {"s"}
    assert [cell.value for cell in cells[:3]] == HOSTILE_SOURCES[:3]
    assert cells[3].value == "\ufffd\ufffd[31m\x7f" and len(cells[4].value) == 32_767
    # The parquet file has them as they are.
    assert pd.read_parquet(tmp_path / "responses.parquet")["data_source"].tolist() == HOSTILE_SOURCES


def test_a_table_of_an_earlier_analysis_is_removed(tmp_path: Path):
    responses, prompts, *_ = tables(analysis_config())
    write_tables(tmp_path, {"exploit_data (per-rollout)": responses, "explore_data (per-prompt)": prompts})
    path = write_tables(tmp_path, {"exploit_data (per-rollout)": responses, "explore_data (per-prompt)": prompts[:0]})
    assert {file.name for file in tmp_path.iterdir()} == {"analysis.xlsx", "responses.parquet"}
    assert openpyxl.load_workbook(path).sheetnames == ["exploit_data (per-rollout)"]
