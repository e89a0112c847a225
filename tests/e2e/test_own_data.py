"""Training of a base model, whose tokenizer has no chat template, on files as other projects write them."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import small_overrides

from tests.data.test_prompts import ABEL, COUNTDOWN, GSM8K, QWEN, simplerl_zoo
from tests.e2e.runs import Run, records
from verl.checkpoint.folders import read_state

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

OWN_CODE = """
class Easiest:
    # Prompts by the share of correct responses so far.
    def __init__(self, dataset, config, seed):
        self.accuracy = [0.0] * len(dataset)

    def __len__(self):
        return len(self.accuracy)

    def __iter__(self):
        return iter(sorted(range(len(self)), key=lambda i: (-self.accuracy[i], i)))

    def update(self, outcome):
        for index, accuracy in zip(outcome.indices, outcome.accuracy):
            self.accuracy[index] = accuracy + outcome.step

    def state_dict(self):
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state):
        self.accuracy = state["accuracy"]


def countdown(data_source, solution_str, ground_truth, extra_info=None):
    right = isinstance(ground_truth, dict) and ground_truth["target"] == 24
    return {"score": float(right), "acc": right}
"""


def test_base_model_learns_from_templated_files(tiny_model, tmp_path, monkeypatch):
    base_model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (base_model / "chat_template.jinja").unlink()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wrong = {"reward_model": {"ground_truth": "987654", "style": "rule"}}  # which no untrained model says
    rows = [entry | wrong for entry in (simplerl_zoo(ABEL), simplerl_zoo("x" * 300), simplerl_zoo(QWEN), GSM8K)]
    rows.append(COUNTDOWN)
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    overrides = [
        *small_overrides(base_model, prompts, folder),
        *("data.max_prompt_length=256", "rollout.max_num_batched_tokens=256", "calculator.layers=[-1]"),
        *("data.template=raw", "data.filter_overlong_prompts=true", "data.train_batch_size=2"),
        *(f"data.sampler.class_path={tmp_path}/own_code.py", "data.sampler.class_name=Easiest"),
        'reward_score.custom_functions=["countdown=own_code:countdown"]',
    ]
    run = Run.complete(overrides, tmp_path / "log")
    assert [record["step"] for record in records(folder)] == [0, 1, 2]
    said = run.log.read_text()
    assert f"the first of 4 training prompts: {ABEL!r}" in said
    assert (
        "warning: training: left out 1 of 5 prompts that are longer than data.max_prompt_length=256, the longest with "
        f"300 tokens (the first: {tmp_path}/prompts.jsonl, row 1)"
    ) in said
    # One pass of two batches: the curriculum was told of all four prompts, and of the Countdown problem that is right.
    assert '"accuracy": [1.0, 1.0, 2.0, 3.0]' in json.dumps(read_state(folder / "global_step_2")["loader"])
    assert records(folder)[1]["train/pass@1"] == 0 and records(folder)[2]["train/pass@1"] == 0.5
