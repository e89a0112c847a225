"""AUC of metrics of prefixes, against loops over pairs of responses, and on courses with known outcomes."""

import itertools

import numpy as np
import pandas as pd
import pytest

from tests.analysis.example_tables import analysis_config
from verl.analysis.early import auc_figures, early_table, prefix_metrics

STRIDE = 2
CONFIG = ("calculator.diff_stride=2", "analysis.draws=200")


def course(prompt: int, rollout: int, correct: bool, length: int, slope: float = 1.0) -> pd.DataFrame:
    """A response whose effective rank is ``slope`` times the squared length of a prefix."""
    ends = np.array(sorted({*range(STRIDE + 1, length + 1, STRIDE), length}))
    place = {"run": "r", "step": 0, "benchmark": "b", "temperature": 1.0, "prompt_id": prompt, "rollout_id": rollout}
    along = {"tokens": ends, "Effective Rank": slope * ends**2.0, "logprob": 0.0, "entropy": 1.0 * ends}
    return pd.DataFrame(
        place | {"correctness": float(correct)} | along | {"state_speed": -slope, "state_dispersion": 1.0}
    )


def by_loops(values, correct, prompts, same: bool) -> float:
    pairs = [
        (values[i] > values[j]) + 0.5 * (values[i] == values[j])
        for i, j in itertools.product(np.flatnonzero(correct), np.flatnonzero(~correct))
        if not same or prompts[i] == prompts[j]
    ]
    return float(np.mean(pairs))


def test_auc_matches_loops_over_pairs():
    generator = np.random.default_rng(0)
    prompts = np.repeat(np.arange(0, 60, 2), 6)
    correct = generator.random(180) < 0.4
    # Few values, so that many pairs are tied.
    values = generator.integers(0, 6, size=180) + 2.0 * correct
    found = auc_figures(values, correct, prompts, 400, 0)
    pooled, within = (by_loops(values, correct, prompts, same) for same in (False, True))
    assert found["auc"] == pytest.approx(pooled) and found["within"] == pytest.approx(within)
    assert found["auc_low"] < pooled < found["auc_high"] and found["within_low"] < within < found["within_high"]
    assert found["mixed_prompts"] == sum(0 < correct[prompts == p].sum() < 6 for p in set(prompts))


def test_intervals_are_over_prompts():
    # Twenty copies of each response add no information: only prompts are drawn.
    generator = np.random.default_rng(1)
    prompts, correct = np.arange(40), np.arange(40) % 2 == 0
    values = generator.normal(size=40) + correct
    once, copied = (auc_figures(*(np.repeat(c, n) for c in (values, correct, prompts)), 300, 0) for n in (1, 20))
    assert [copied[f"auc{end}"] for end in ("", "_low", "_high")] == pytest.approx(
        [once[f"auc{end}"] for end in ("", "_low", "_high")]
    )
    assert once["mixed_prompts"] == 0 and np.isnan(once["within"]) and np.isnan(once["within_low"])
    single = auc_figures(values, correct, np.zeros(40), 300, 0)
    assert single["auc"] == once["auc"] and np.isnan(single["auc_low"])


def test_hard_prompts_are_not_wrong_responses():
    # The metric tells prompts apart and nothing within a prompt; nine of ten responses to the first half are correct.
    prompts = np.repeat(np.arange(20), 10)
    correct = np.where(prompts < 10, np.arange(200) % 10 > 0, np.arange(200) % 10 == 0)
    found = auc_figures((prompts < 10).astype(float), correct, prompts, 100, 0)
    assert found["auc"] == pytest.approx(0.9) and found["within"] == 0.5 and found["mixed_prompts"] == 20


def test_values_are_of_whole_prefixes():
    config = analysis_config(*CONFIG).calculator
    responses, found = prefix_metrics(config, pd.concat([course(0, 0, True, 8), course(1, 0, False, 3)]))
    assert responses["response_length"].tolist() == [8, 3] and responses["correctness"].tolist() == [1.0, 0.0]
    # Prefixes of 3, 5 and 7 tokens and the end; entropy is 3 over three tokens, 5 over two, 7 over two and 8 over one.
    nan = np.nan
    expected = {
        "Effective Rank": [[9, 25, 49, 64], [9, nan, nan, 9]],
        # Differences from the mean of the prefixes before: 25 - 9 = 16 and 49 - 17 = 32.
        "Effective Rank diff": [[nan, 16, 24, 24], [nan] * 4],
        "Effective Rank diff 2": [[nan, nan, 16, 16], [nan] * 4],
        "entropy": [[3, 19 / 5, 33 / 7, 41 / 8], [3, nan, nan, 3]],
        "response_length": [[8] * 4, [3] * 4],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, err_msg=name)


def test_points_count_the_responses_that_have_them():
    # Each prompt has a correct response of 20 tokens with the higher rank and a wrong one of 12; some are short.
    parts = [course(p, j, j == 0, 20 - 8 * j, slope=2.0 - j) for p in range(12) for j in range(2)]
    parts += [course(p, 2, False, 2) for p in range(12)]
    table = early_table(analysis_config(*CONFIG), pd.concat(parts))
    ranks = table[table["metric"] == "Effective Rank"].set_index(["by", "at"])
    # At positions of 2, 4 and 8 tokens only the longer responses run, and at 16 no wrong one.
    assert [at for by, at in ranks.index if by == "position"] == [2, 4, 8]
    at = ranks.loc["position", 2]
    assert (at["responses"], at["correct"], at["prompts"], at["mixed_prompts"], at["mean_length"]) == (
        24,
        12,
        12,
        12,
        16,
    )
    assert at["auc"] == at["within"] == at["auc_low"] == 1.0
    # A tenth of the tokens has no prefix, 0.3 of them prefixes of 5 and of 3 tokens, and all of them every response.
    assert [at for by, at in ranks.index if by == "share"] == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert ranks.loc[("share", 1.0), "responses"] == 36
    speed = table[(table["metric"] == "state_speed") & (table["by"] == "position")]
    assert speed["auc"].tolist() == [0.0] * 3
    velocity = table[(table["metric"] == "Effective Rank diff") & (table["by"] == "position")]
    assert velocity["at"].tolist() == [4, 8]
    lengths = table[table["metric"] == "response_length"]
    assert set(lengths["by"]) == {"share"} and set(lengths["auc"]) == {1.0}


def test_too_short_responses_are_compared_at_their_ends():
    parts = [course(p, j, j == 0, 2) for p in range(12) for j in range(2)]
    table = early_table(analysis_config(*CONFIG), pd.concat(parts))
    assert set(table["at"]) == {1.0} and set(table["by"]) == {"share"}
    assert "Effective Rank diff" not in set(table["metric"])


@pytest.mark.parametrize("option", ["calculator.compute_diff=false", "calculator.max_seq_len=8"])
def test_no_prefixes_from_the_first_token(option: str):
    parts = [course(p, j, j == 0, 20) for p in range(12) for j in range(2)]
    assert len(early_table(analysis_config(*CONFIG), pd.concat(parts))) > 0
    assert len(early_table(analysis_config(*CONFIG, option), pd.concat(parts))) == 0
