"""The scripts that measure: their arithmetic, and the shipped pages against the shipped data. No time is asserted."""

import re
import sys
from pathlib import Path
from typing import Any

import bench_async
import bench_carry_over
import bench_hidden_states
import bench_report
import bench_sampler
import bench_spectral
import bench_step
import bench_verdicts
import measure_spectral_accuracy as accuracy
import pytest
import shapes
import study_page
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from turns import Player

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


def test_report_says_how_it_was_made(tmp_path):
    facts = bench_report.provenance("bench_spectral.py", ["--out", "a b"])
    assert facts["command"] == "python benchmarks/bench_spectral.py --out 'a b'"
    assert re.fullmatch(r".+, [1-9]\d* cores", facts["hardware"])
    row = {"seconds": 1234567.8, "count": 1234567, "peak": None, "inner": [{"share": 1 / 3}]}
    bench_report.write_report(tmp_path / "sub" / "new", facts, [row], lambda *read: f"{read}\n")
    trimmed = {"seconds": 1234570.0, "count": 1234567, "inner": [{"share": 0.333333}]}
    assert bench_report.read_report(tmp_path / "sub" / "new.jsonl") == (facts, [trimmed])
    assert (tmp_path / "sub" / "new.md").read_text() == f"{(facts, [trimmed])}\n"
    assert bench_report.table(["a", "b:"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |\n"


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


PROGRAM = """
import sys, time
from turns import wait_for_turn
for step in range(3):
    wait_for_turn()
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2])
    while time.process_time() < 0.1 * (step + 2):
        pass
print("out of steps", file=sys.stderr)
sys.exit(3)
"""


def player(tmp_path: Path, name: str, program: str = PROGRAM) -> Player:
    command = [sys.executable, "-c", program, str(tmp_path / "done"), name]
    return Player(command, tmp_path / name, {"PYTHONPATH": str(ROOT / "benchmarks")}, timeout_s=60)


@pytest.mark.slow
def test_players_work_in_turns(tmp_path: Path):
    players = {name: player(tmp_path, name) for name in "ab"}
    assert not (tmp_path / "done").exists()
    before = players["a"].cpu_seconds()
    for name in "abba":
        assert players[name].step() > 0
    assert (tmp_path / "done").read_text() == "abba"
    assert 0.1 < players["a"].cpu_seconds() - before < 10
    with pytest.raises(RuntimeError, match=r"ended: out of steps\n"):
        players["a"].step()
    for one in players.values():
        one.end()
        assert one.process.returncode is not None
    slow = player(tmp_path, "slow", PROGRAM.replace("with open", "time.sleep(60)\n    with open"))
    slow.timeout_s = 0.2
    with pytest.raises(TimeoutError, match=r"took more than 0\.2 s"):
        slow.step()
    slow.end()


def test_benchmark_model_ends_responses_at_padding(tiny_model, tmp_path):
    shapes.make_model("embedded", tmp_path / "model", tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    end = tokenizer.eos_token_id
    assert tokenizer.decode([end]) == "<|pad|>"
    assert AutoConfig.from_pretrained(tmp_path / "model").eos_token_id == end
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == end


@pytest.mark.parametrize("name", ["power law 2, at least 1e-5", "hidden-like, bfloat16"])
def test_float32_gram_matrix_is_inaccurate(name: str):
    condition, *nested, coarse_rank, _ = accuracy.errors(accuracy.SPECTRA[name])
    assert condition < 1e6
    assert len(nested) == 5 and max(nested) < 1e-6 < 1e-4 < coarse_rank
    shifts = accuracy.float32_shift_errors(1.5)
    assert len(shifts) == 8 and max(shifts) == shifts[0] > 1e-6


TINY = "--batch 2 1 --rows 24 16 --width 8 --strides 4 --device cpu --repeats 1".split()
SHAPES = [(batch, rows, 8) for rows in (16, 24) for batch in (1, 2)]


def test_spectral_methods_are_measured_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # On a busy machine it would wait seconds before every shape.
    monkeypatch.setattr(bench_spectral, "settle", lambda device: None)

    def run(*args: str) -> list[dict[str, Any]]:
        bench_spectral.main(["--out", str(tmp_path / "spectral"), *TINY, *args])
        _, records = bench_report.read_report(tmp_path / "spectral.jsonl")
        assert [(record["batch"], record["rows"], record["width"]) for record in records] == SHAPES
        return records

    for record in run("--limit", "60"):
        assert {result["status"] for result in record["methods"].values()} == {"measured"}
        # Errors are against the SVD, of single responses only.
        errors = {name: result.get("max_relative_error") for name, result in record["methods"].items()}
        if record["batch"] > 1:
            assert set(errors.values()) == {None}
        else:
            assert errors["svd"] == 0 < errors["nested"] < 1e-6
            assert errors["eigvalsh"] < 1e-10 and 0 < errors["float32_loop"] < 0.1
    first, *others = run("--limit", "1e-9")
    assert {result["status"] for result in first["methods"].values()} == {"measured"}
    assert {result["status"] for record in others for result in record["methods"].values()} == {"> limit"}
    records = run("--memory-gib", "0.001", "--methods", "nested", "svd")
    assert {result["status"] for record in records for result in record["methods"].values()} == {"> memory"}


def test_ways_of_sampling_are_measured_and_counted(tmp_path: Path):
    bench_sampler.main(["--out", str(tmp_path / "sampler"), "--rows", "4", "--vocab", "600", "--turns", "2"])
    _, cases = bench_report.read_report(tmp_path / "sampler.jsonl")
    assert [case["rows"] for case in cases] == [4, 4, 1]
    for case in cases:
        by_way = {way: {found[way] for found in case["operations"].values()} for way in ("streams", "seeded")}
        assert len(by_way["streams"]) == 1 and max(by_way["seeded"]) - min(by_way["seeded"]) >= 248
