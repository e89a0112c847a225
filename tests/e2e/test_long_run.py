"""Fifty steps and SIGINT: the driver's memory, what the log says of speed, and that nothing is left."""

import gzip
import json
import signal

import pytest
from conftest import small_overrides

from tests.e2e.runs import Run

pytestmark = pytest.mark.nightly

STEPS = 50


def test_long_run_keeps_its_memory_and_ends_at_sigint(tiny_model, arithmetic_prompts, tmp_path):
    folder = tmp_path / "run"
    overrides = small_overrides(tiny_model, arithmetic_prompts, folder)
    overrides += ["calculator.layers=[0,1,2,-1]", "data.val_files=[]", "trainer.profile_steps=[2]"]
    overrides += ["trainer.total_training_steps=1000", "trainer.total_epochs=1000", "trainer.save_freq=20"]
    run = Run([*overrides, "trainer.peak_tflops=0.1"], tmp_path / "log")
    run.wait_for_line(f"step {STEPS}/")
    # To the driver alone; Ctrl-C, which every process gets: test_resume.py.
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.log.read_text()
    run.assert_nothing_left(folder)
    output = run.log.read_text()
    assert "interrupted" in output
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)) and len(records) >= STEPS
    memory = [record["perf/memory/driver_gb"] for record in records]
    assert max(memory[10:]) < 1.05 * memory[9], memory

    last = records[-1]
    for phase, name in {"gen": "gen", "old_log_prob": "actor_infer", "ref": "ref", "update_actor": "actor"}.items():
        assert last[f"perf/{phase}_throughput"] > 0 and last[f"perf/memory/{phase}_gb"] > 0.1
        assert last[f"perf/mfu/{name}"] == pytest.approx(10 * last[f"perf/tflops/{phase}"])
    assert last["perf/total_num_tokens"] == 16 * (last["prompt_length/mean"] + last["response_length/mean"])
    assert last["perf/generated_tokens"] == 16 * last["response_length/mean"]

    trace = folder / "profile" / "step_2_rank_0.json.gz"
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]
    assert f"profile of step 2: {trace.parent}" in output
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    for method, operator in {
        "rollout.advance": "aten::_log_softmax",
        "compute_logprobs": "aten::scaled_dot_product_attention",
        "actor.update": "aten::_log_softmax",
    }.items():
        spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == method]
        found = [e for e in events if e["name"] == operator]
        assert any(s["ts"] <= e["ts"] <= s["ts"] + s.get("dur", 0) for e in found for s in spans), method
    # The backward pass runs in a thread of autograd's.
    assert "autograd::engine::evaluate_function: MmBackward0" in {event["name"] for event in events}
