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
    **dict.fromkeys(
        [f"studies/{name}" for name in ("hidden_states", "pretrained", "rank_shaping", "recipes")], study_page.page
    ),
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
