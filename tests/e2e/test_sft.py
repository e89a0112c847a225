"""Supervised fine-tuning from start to finish."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.runs import FineTuning, assert_resumes
from verl.checkpoint.folders import verify_checkpoint
from verl.data.arithmetic import ArithmeticTask
from verl.data.conversations import tokenize_conversation
from verl.data.records import SFT_SCHEMA, sft_record, write_parquet

pytestmark = pytest.mark.slow


HELD_OUT = ArithmeticTask().split("sft_val", 5, 0)
"""5 rows on 2 workers by 2: the shares differ, and so would the number of collective forward passes."""


@pytest.fixture(scope="module")
def overrides(tiny_model, tmp_path_factory) -> list[str]:
    """A run of three steps, whose folder the first option names."""
    folder = tmp_path_factory.mktemp("sft")
    for name, problems in {"train": ArithmeticTask().split("sft_train", 8, 0), "val": HELD_OUT}.items():
        write_parquet(folder / f"{name}.parquet", [sft_record(p.question, p.solution) for p in problems], SFT_SCHEMA)
    options = "optim.lr=2e-3 data.train_batch_size=8 data.micro_batch_size_per_gpu=2 trainer.total_training_steps=3 "
    options += "trainer.save_freq=1 trainer.profile_steps=[2] device=cpu"
    files = [f"data.{name}_files={folder}/{name}.parquet" for name in ("train", "val")]
    return [f"trainer.default_local_dir={folder}/run", f"model.path={tiny_model}", *files, *options.split()]


@pytest.fixture(scope="module")
def run(overrides) -> Path:
    """Its folder after the run."""
    folder = Path(overrides[0].partition("=")[2])
    FineTuning.complete(overrides, folder.with_name("log"))
    return folder


def test_short_run_cuts_its_warmup_and_prints_each_step(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["train/lr"] for record in records] == pytest.approx([0.5e-3, 1e-3, 1.5e-3])
    said = run.with_name("log").read_text()
    assert "note: optim.lr_warmup_steps=50: cut to the run's 3 steps" in said
    assert all(f"step {step}/3  loss" in said for step in (1, 2, 3))


def test_held_out_figures_are_those_of_the_exported_model(run, tiny_tokenizer):
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
def test_fine_tuning_resumes_to_the_bit(run, overrides, tmp_path):
    assert_resumes([*overrides, "trainer.async_save=true"], run, 3, 2, tmp_path / "log", FineTuning)
    assert "/global_step_2\n  trainer.async_save: was None, is True\n" in (tmp_path / "log").read_text()
    verify_checkpoint(run / "global_step_3")
