"""The arithmetic of scripts/bench_shaping.py; the trainers that it drives have tests of their own."""

import runpy
from collections import Counter

import pytest
from conftest import ROOT
from transformers import AutoConfig, AutoTokenizer, GenerationConfig


@pytest.fixture(scope="module")
def bench() -> dict:
    return runpy.run_path(str(ROOT / "scripts" / "bench_shaping.py"))


def test_interval_of_the_median(bench):
    interval = bench["median_interval"]
    # Of ten values the second to the ninth hold the median with probability 1 - 2 (1 + 10) / 1024 = 97.9%.
    assert interval([10, 3, 7, 1, 9, 2, 8, 5, 4, 6]) == (2, 9)
    assert interval(range(40)) == (13, 26)
    assert interval([5.0, 4.0, 6.0]) == (4.0, 6.0)
    assert interval([5.0]) == (5.0, 5.0)


def step(seconds: float, cpu_seconds: float, phases: dict[str, float]) -> dict:
    plugin = {"capture": 0.02 * seconds, "reduce": 0.01 * seconds}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": 640.0, "shortest": 128.0} | {
        "plugin": plugin,
        "phases": phases | {"step": seconds},
    }


def test_the_cost_is_the_median_of_pairs(bench):
    # The machine was twice as slow during the second pair: its ratio counts like the others.
    pairs = [
        {"GRPO": step(a, 2 * a, {"generate": a}), "VERL-GRPO": step(b, 3 * a, {"generate": b, "rank_metrics": 0.5})}
        for a, b in [(10.0, 10.2), (20.0, 20.6), (10.0, 10.4)]
    ]
    figures = bench["summarise"](pairs)
    assert figures["ratio"] == pytest.approx(1.03) and figures["interval"] == pytest.approx((1.02, 1.04))
    assert figures["cpu_ratio"] == 1.5
    assert figures["plugin_share"] == pytest.approx({"capture": 0.02, "reduce": 0.01})
    assert figures["phases"]["rank_metrics"] == {"GRPO": 0.0, "VERL-GRPO": 0.5}
    assert figures["same_tokens"] and figures["shortest"] == 128
    facts = Counter(hardware="two cores", command="python bench", what="Sizes.")
    assert "takes **1.030** times as long" in bench["page"](facts, figures)
    pairs[0]["GRPO"]["tokens"] = 639.0
    assert not bench["summarise"](pairs)["same_tokens"]


def test_the_end_of_a_turn_does_not_end_a_response(bench, tiny_model, tmp_path):
    bench["make_model"]("embedded", tmp_path / "model", tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    end = tokenizer.eos_token_id
    assert tokenizer.decode([end]) == "<|pad|>"
    assert AutoConfig.from_pretrained(tmp_path / "model").eos_token_id == end
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == end
