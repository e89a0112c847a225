"""Supervised fine-tuning from start to finish."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


HELD_OUT = ArithmeticTask().split("sft_val", 5, 0)
"""5 rows on 2 workers by 2: the shares differ, and so would the number of collective forward passes."""


@pytest.fixture(scope="module")
def command(tiny_model, tmp_path_factory) -> list[str]:
    """A run of three steps, whose folder the last argument names."""
    folder = tmp_path_factory.mktemp("sft")
    for name, problems in {"train": ArithmeticTask().split("sft_train", 8, 0), "val": HELD_OUT}.items():
        write_parquet(folder / f"{name}.parquet", [sft_record(p.question, p.solution) for p in problems], SFT_SCHEMA)
    return [
        *(sys.executable, "-m", "verl.trainer.main_sft", f"model.path={tiny_model}"),
        *(f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/val.parquet"),
        *(
            "optim.lr=2e-3",
            "data.train_batch_size=8",
            "data.micro_batch_size_per_gpu=2",
            "trainer.total_training_steps=3",
        ),
        *("trainer.save_freq=1", "trainer.profile_steps=[2]", "device=cpu"),
        f"trainer.default_local_dir={folder / 'run'}",
    ]


@pytest.fixture(scope="module")
def run(command) -> Path:
    """Its folder after the run."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return Path(command[-1].partition("=")[2])


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_held_out_figures_are_those_of_the_exported_model(run, tiny_tokenizer):
    records = records_of(run)
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
    for problem in HELD_OUT:
        messages = sft_record(problem.question, problem.solution)["messages"]
        ids, mask = tokenize_conversation(messages, tiny_tokenizer, "here")
        with torch.no_grad():
            distribution = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(dim=-1)
        learned = torch.tensor(mask[1:], dtype=torch.bool)
        logprob += distribution[torch.arange(len(ids) - 1), ids[1:]][learned].sum().item()
        num_tokens += int(learned.sum())
    assert records[2]["val/loss"] == pytest.approx(-logprob / num_tokens, abs=1e-4)


@pytest.mark.nightly
def test_one_step_back_and_forward_again(run, command):
    records = records_of(run)
    shutil.rmtree(run / "global_step_3")
    (run / "summary.json").unlink()
    result = subprocess.run(
        [*command, "trainer.async_save=true"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    assert f"resuming from {run}/global_step_2\n  trainer.async_save: was None, is True\n" in result.stdout
    again = records_of(run)
    for record in (*records, *again):
        for name in [name for name in record if name.startswith(TIMING_PREFIXES)]:
            del record[name]
    assert again == records
    verify_checkpoint(run / "global_step_3")
