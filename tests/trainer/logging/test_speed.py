"""Speeds and memory by phase, against numbers worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from verl.cluster.failures import OutOfMemory
from verl.config.common import ModelConfig
from verl.single_controller.profiling import MemoryPeak
from verl.trainer.logging import speed
from verl.trainer.logging.speed import (
    FORWARD,
    UPDATE,
    UPDATE_LORA,
    ModelCost,
    PhaseTimer,
    StepMetrics,
    StepRecord,
    Work,
    peak_tflops,
)

LAYERS = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
HEADS = {"num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_7B = Qwen2Config(**LAYERS, **HEADS, vocab_size=152064)


@pytest.fixture
def model_config(small_config, tmp_path: Path) -> ModelConfig:
    return replace(small_config.model, path=str(tmp_path))


def test_qwen_7b_as_published(model_config):
    QWEN_7B.save_pretrained(model_config.path)
    cost = ModelCost.of(model_config)
    # 7,615,616,512 parameters in all, less an embedding of 152064 x 3584.
    assert cost == ModelCost(7_070_619_136, 28 * 28 * 128)
    assert cost.without_head(model_config) == ModelCost(7_070_619_136 - 152063 * 3584, 28 * 28 * 128)


def test_tied_head_counts_once_and_idle_experts_do_not(model_config, tiny_model):
    # 4 layers of (4 x 128 x 128 + 3 biases, 3 x 128 x 384, 2 norms), the last norm, 262 rows of the head.
    layer = 4 * 128 * 128 + 3 * 128 + 3 * 128 * 384 + 2 * 128
    assert ModelCost.of(replace(model_config, path=str(tiny_model))) == ModelCost(4 * layer + 128 + 262 * 128, 512)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    Qwen3MoeConfig(**shape, **experts, vocab_size=100).save_pretrained(model_config.path)
    attention = 64 * 32 * (4 + 2 + 2 + 4) + 2 * 32
    active = 2 * (attention + 2 * 64 + 8 * 64 + 2 * 3 * 64 * 32) + 64 + 100 * 64
    assert ModelCost.of(model_config) == ModelCost(active, 2 * 4 * 32)


def test_flops_of_a_token():
    # PaLM: 6 N + 12 L H Q T for forward and backward; here a sequence of T = 10 tokens.
    assert ModelCost(100.0, 7).flops(10, 100, UPDATE) == 10 * (6 * 100 + 12 * 7 * 10)
    assert ModelCost(100.0, 7).flops(10, 100, FORWARD) == 10 * (2 * 100 + 4 * 7 * 10)
    # Frozen weights save their gradients, and nothing of attention, which has none.
    assert ModelCost(100.0, 7).flops(10, 100, UPDATE_LORA) == 10 * (4 * 100 + 12 * 7 * 10)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        *(("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835)),
        *(("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10", 125), ("NVIDIA L40S", 362)),
        *(("NVIDIA L40", 181), ("NVIDIA RTX A1000", None), ("", None)),
    ],
)
def test_peak_speed_by_name(name, peak):
    assert peak_tflops(0.0, name, "bfloat16") == peak
    assert peak_tflops(0.0, name, "float32") is None
    assert peak_tflops(3.5, name, "float32") == 3.5


RECORD = StepRecord(
    seconds={"gen": 2.0, "old_log_prob": 1.0, "reward": 0.5, "update_actor": 4.5},
    work={name: Work(160, 1600) for name in ("batch", "old_log_prob", "update_actor")} | {"gen": Work(100, 0)},
    peaks={"gen": MemoryPeak(2 * 10**9, 3 * 10**9), "update_actor": MemoryPeak(10**9, 10**9)},
    background={},
)


def test_step_in_the_log():
    cost = ModelCost(1e9, 10**6)
    passes = {"gen": (cost, FORWARD), "old_log_prob": (cost, FORWARD), "update_actor": (cost, UPDATE)}
    metrics = StepMetrics(2, passes, peak=0.5)(RECORD)
    driver = metrics.pop("perf/memory/driver_gb")
    assert 0.05 < driver < 50
    # 160 tokens of 2e9 operations, and 4e6 for each of 1600 pairs of tokens, on two workers.
    logprobs = (160 * 2e9 + 1600 * 4e6) / 1e12 / 2
    seconds = {"gen": 2.0, "old_log_prob": 1.0, "reward": 0.5, "update_actor": 4.5, "step": 8.0}
    speeds = {"time_per_step": 8.0, "total_num_tokens": 160, "throughput": 10.0}
    speeds |= {"gen_throughput": 25.0, "old_log_prob_throughput": 80.0, "update_actor_throughput": 160 / 9}
    speeds |= {"tflops/gen": 0.05, "tflops/old_log_prob": logprobs, "tflops/update_actor": 3 * logprobs / 4.5}
    speeds |= {"mfu/gen": 0.1, "mfu/actor_infer": 2 * logprobs, "mfu/actor": 6 * logprobs / 4.5}
    speeds |= {"memory/gen_gb": 2.0, "memory/gen_reserved_gb": 3.0, "memory/update_actor_gb": 1.0}
    expected = {f"timing_s/{name}": value for name, value in seconds.items()}
    assert metrics == pytest.approx(expected | {f"perf/{name}": value for name, value in speeds.items()})


def test_unknown_speeds_are_not_logged():
    metrics = StepMetrics(1, {"update_actor": (ModelCost(1e9, 1), UPDATE)}, peak=None)(RECORD)
    assert "perf/tflops/update_actor" in metrics and "perf/tflops/old_log_prob" not in metrics
    assert not [name for name in metrics if "mfu" in name]
    assert not [name for name in metrics if "perf/batch" in name]
    # A validation alone reads no training batch.
    metrics = StepMetrics(1, {}, None)(StepRecord({"testing": 2.0}, {}, {}, {}))
    assert "perf/throughput" not in metrics and metrics["timing_s/step"] == 2.0


def test_background_work_is_not_part_of_step_time():
    timer = PhaseTimer(lambda name: None)
    timer.add_background(StepRecord({"gen": 3.0}, {"gen": Work(90, 0)}, {"gen": MemoryPeak(10**9, 10**9)}, {}))
    timer.count("batch", Work(160, 0))
    record = timer.take_step()
    record.seconds["update_actor"] = 4.0
    metrics = StepMetrics(1, {}, None, pool_size=3)(record)
    assert (metrics["timing_s/step"], metrics["timing_s/gen"]) == (4.0, 3.0) and not timer.totals
    # 90 tokens in 3 s on three engines; 160 in 4 s on these and the trainer's worker.
    assert (metrics["perf/gen_throughput"], metrics["perf/throughput"]) == (10.0, 10.0)
    assert metrics["perf/memory/gen_gb"] == 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in the list's only element."""
    now = [100.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    return now


def test_phases_add_up_by_step_and_in_total(clock: list[float]):
    entered: list[str] = []
    timer = PhaseTimer(entered.append)
    for name, seconds in [("generate", 2.0), ("update", 1.0), ("generate", 0.5)]:
        with timer.phase(name):
            clock[0] += seconds
        clock[0] += 10.0  # between phases nothing is counted
    assert entered == ["generate", "update", "generate"]
    assert timer.take_step().seconds == {"generate": 2.5, "update": 1.0}
    with timer.phase("update"):
        clock[0] += 4.0
    assert timer.take_step().seconds == {"update": 4.0}
    assert timer.take_step() == ({}, {}, {}, {})
    assert timer.totals == {"generate": 2.5, "update": 5.0}


def test_failed_phase_is_timed_and_its_error_raised(clock: list[float]):
    timer = PhaseTimer(lambda name: None)
    with pytest.raises(ZeroDivisionError), timer.phase("save"):
        clock[0] += 3.0
        raise ZeroDivisionError
    assert timer.totals == {"save": 3.0}
    with pytest.raises(OutOfMemory, match="^adv: the driver ran out of host memory"), timer.phase("adv"):
        raise MemoryError


def test_work_is_summed_by_phase():
    timer = PhaseTimer(lambda name: None)
    timer.count("update", Work.of(torch.tensor([3, 5])))
    timer.count("update", Work.of(torch.tensor([2])))
    # Of 6 tokens the first 4 were there already, of 3 the first.
    timer.count("generate", Work.of(torch.tensor([6, 3]), torch.tensor([4, 1])))
    assert timer.take_step().work == {"update": Work(10.0, 38.0), "generate": Work(4.0, 28.0)}


def test_phase_has_the_largest_peak_of_its_own_calls():
    peaks = [MemoryPeak(9, 9)]  # of a call before the first phase

    def take() -> MemoryPeak | None:
        taken = peaks[0] if peaks else None
        peaks.clear()
        return taken

    timer = PhaseTimer(lambda name: None, take)
    for name, peak in [("generate", MemoryPeak(5, 7)), ("verify", None), ("generate", MemoryPeak(4, 8))]:
        with timer.phase(name):
            peaks += [] if peak is None else [peak]
    assert timer.take_step().peaks == {"generate": MemoryPeak(5, 8)}
