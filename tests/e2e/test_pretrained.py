"""A pretrained model with the preset and the data made for it."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_greedy_answers_are_those_of_transformers(smollm2: Path, tmp_path: Path):
    """Of the model, and of the exported one after a step."""
    folder = tmp_path / "run"
    sizes = "data.train_batch_size=2 actor.ppo_mini_batch_size=2 data.val_sample_size=8 trainer.n_gpus_per_node=1"
    steps = "trainer.total_training_steps=1 trainer.test_freq=1 trainer.save_freq=0 model.param_dtype=float32"
    overrides = ["preset=small", "data=word_problems", f"model.path={smollm2}", *sizes.split(), *steps.split()]
    Run.complete([*overrides, "device=cpu", f"trainer.default_local_dir={folder}"], tmp_path / "log", timeout_s=900)
    for step, path in enumerate((smollm2, folder / "global_step_1" / "actor" / "huggingface")):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        rows = pq.read_table(folder / "samples" / f"val_{step:06d}.parquet").to_pylist()
        assert len(rows) == 8
        for row in rows:
            prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
            answer = model.generate(**prompt, max_new_tokens=128, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            assert tokenizer.decode(answer, skip_special_tokens=True) == row["response"]
