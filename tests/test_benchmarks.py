"""The scripts that measure: their arithmetic, and the shipped pages against the shipped data. No time is asserted."""

import bench_async
import bench_carry_over
import bench_hidden_states
import bench_report
import bench_sampler
import bench_spectral
import bench_step
import bench_verdicts
import pytest
import study_page

from tests.kit import ROOT

HIDDEN_STATES = ("hidden_states_cpu", "hidden_states_cpu_compiled", "hidden_states_cpu_tiny")
PAGES = {
    **dict.fromkeys(HIDDEN_STATES, bench_hidden_states.page),
    **dict.fromkeys(("step_cpu", "step_cpu_apart", "step_small", "shaping_cpu"), bench_step.page),
    **dict.fromkeys(("studies/rank_shaping", "studies/pretrained", "studies/recipes"), study_page.page),
    "async": bench_async.page,
    "carry_over": bench_carry_over.page,
    "sampler": bench_sampler.page,
    "spectral": bench_spectral.page,
    "verdicts": bench_verdicts.page,
}


@pytest.mark.parametrize("name", PAGES)
def test_shipped_page_follows_from_the_shipped_data(name: str, tmp_path):
    shipped = ROOT / "benchmarks" / f"{name}.jsonl"
    facts, rows = bench_report.read_report(shipped)
    bench_report.write_report(tmp_path / name, facts, rows, PAGES[name])
    for suffix in (".md", ".jsonl"):
        assert (tmp_path / name).with_suffix(suffix).read_text() == shipped.with_suffix(suffix).read_text()


def test_trainings_are_compared_in_turns_or_apart():
    seconds = [(1.0, 2.0), (3.0, 4.0), (2.0, 10.0)]
    rounds = [{"GRPO": {"seconds": a, "reward": 0.5}, "TRL": {"seconds": b, "reward": 0.25}} for a, b in seconds]
    turns, apart = (bench_step.summarise(rounds, apart)["GRPO"] for apart in (False, True))
    # Of 0.5, 0.75 and 0.2; and 2 of 4.
    assert turns == {"seconds": {"median": 2.0, "ratio": 0.5, "interval": (0.2, 0.75)}, "reward": 0.5}
    assert apart == {"seconds": {"median": 2.0, "ratio": 0.5, "interval": None}, "reward": 0.5}
    # A round in which the machine was slow counts like the others.
    rounds[0]["TRL"]["seconds"] = 100.0
    assert bench_step.summarise(rounds, False)["GRPO"]["seconds"]["ratio"] == 0.2


TEN = [10, 3, 7, 1, 9, 2, 8, 5, 4, 6]
"""The second to the ninth hold the median with probability 1 - 2 (1 + 10) / 1024 = 97.9%."""


@pytest.mark.parametrize(
    ("values", "interval"), [(TEN, (2, 9)), (range(40), (13, 26)), ([5.0, 4.0, 6.0], (4.0, 6.0)), ([5.0], (5.0, 5.0))]
)
def test_interval_of_the_median(values, interval):
    assert bench_step.median_interval(values) == interval
