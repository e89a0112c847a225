"""Supervised fine-tuning from start to finish."""

import gzip
import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from tests.e2e.runs import TIMING_PREFIXES
from verl.checkpoint.folders import verify_checkpoint
from verl.data.arithmetic import ArithmeticTask
from verl.data.conversations import tokenize_conversation
from verl.data.records import SFT_SCHEMA, sft_record, write_parquet

pytestmark = pytest.mark.slow


def test_held_out_figures_are_those_of_the_exported_model(tiny_model, tiny_tokenizer, tmp_path):
    task = ArithmeticTask()
    files = {"train": (tmp_path / "train.parquet", task.split("sft_train", 8, 0))}
    # 5 rows on 2 workers by 2: the shares differ, and so would the number of collective forward passes.
    files["val"] = (tmp_path / "val.parquet", task.split("sft_val", 5, 0))
    for path, problems in files.values():
        write_parquet(path, [sft_record(p.question, p.solution) for p in problems], SFT_SCHEMA)
    run = tmp_path / "run"
    overrides = [
        *(f"model.path={tiny_model}", f"data.train_files={files['train'][0]}", f"data.val_files={files['val'][0]}"),
        *("data.train_batch_size=8", "data.micro_batch_size_per_gpu=2", "trainer.total_training_steps=3"),
        *("trainer.save_freq=1", "trainer.profile_steps=[2]", f"trainer.default_local_dir={run}", "device=cpu"),
    ]
    command = [sys.executable, "-m", "verl.trainer.main_sft", *overrides]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[2]["train/loss"] < records[0]["train/loss"]
    assert "Loss (supervised)" in (run / "report.html").read_text()
    tokens = records[2]["perf/total_num_tokens"]
    assert records[2]["perf/train_throughput"] == pytest.approx(tokens / records[2]["timing_s/train"] / 2)
    assert records[2]["perf/tflops/train"] > 0 and "perf/mfu/train" not in records[2]
    for rank in range(2):
        with gzip.open(run / "profile" / f"step_2_rank_{rank}.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"train_step", "aten::_log_softmax", "Optimizer.step#AdamW.step"} <= names

    model = AutoModelForCausalLM.from_pretrained(run / "global_step_3" / "actor" / "huggingface")
    logprob, num_tokens = 0.0, 0
    for problem in files["val"][1]:
        messages = sft_record(problem.question, problem.solution)["messages"]
        ids, mask = tokenize_conversation(messages, tiny_tokenizer, "here")
        with torch.no_grad():
            distribution = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(dim=-1)
        learned = torch.tensor(mask[1:], dtype=torch.bool)
        logprob += distribution[torch.arange(len(ids) - 1), ids[1:]][learned].sum().item()
        num_tokens += int(learned.sum())
    assert records[2]["val/loss"] == pytest.approx(-logprob / num_tokens, abs=1e-4)

    # One step back, and forward again.
    shutil.rmtree(run / "global_step_3")
    (run / "summary.json").unlink()
    result = subprocess.run(
        [*command, "trainer.async_save=true"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    assert f"resuming from {run}/global_step_2\n  trainer.async_save: was None, is True\n" in result.stdout
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in (*records, *again):
        for name in [name for name in record if name.startswith(TIMING_PREFIXES)]:
            del record[name]
    assert again == records
    verify_checkpoint(run / "global_step_3")
