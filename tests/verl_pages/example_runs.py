"""Folders of runs for tests of the page: made, not trained."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.evaluation.example_results import HOSTILE
from verl.utils.portable import valid_unicode

ER = "Effective Rank"


def write_run(
    folder: Path,
    steps: int = 6,
    seed: int = 0,
    lr: float = 1e-4,
    num_prompts: int = 4,
    samples: bool = True,
    **row: Any,
) -> Path:
    """A run with metrics of every step, and samples of a training step and a validation at every other one."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "seed": seed,
        "trainer": {"default_local_dir": str(folder), "total_training_steps": steps, "experiment_name": folder.name},
        "actor": {"optim": {"lr": lr}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    write_metrics(folder, [metrics_of(step, seed) for step in range(steps + 1)])
    for step in range(0, steps + 1, 2) if samples else ():
        write_samples(folder, "val", step, [response(uid, step, step > uid, **row) for uid in range(num_prompts)])
        if step:
            write_samples(
                folder, "train", step, [response(uid, step, uid % 2 == 0, **row) for uid in range(num_prompts)]
            )
    return folder


def metrics_of(step: int, seed: int = 0) -> dict[str, Any]:
    """The record of one step."""
    share = round(0.5 + 0.5 * math.tanh(step / 40) + 0.01 * seed, 6)
    both = {"val/pass@1": share} if step % 2 == 0 else {}
    if step == 0:
        return {"step": 0, **both}
    return {
        "step": step,
        "train/pass@1": share,
        "score/mean": share,
        "train/gsm8k/pass@1": share,
        "actor/entropy": 1 / step,
        f"cal/correct/layer_1/{ER}/mean": 30.0 + step,
        f"cal/incorrect/layer_1/{ER}/mean": 31.0,
        f"cal/overall/layer_2/{ER}/mean": 12.0,
        "reward_manager/phi_mean": 0.1,
        "reward_manager/layer_1/beta": 0.7,
        "timing_s/step": 3.0,
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 1.0,
        "my/own": float(step),
        **both,
    }


def write_metrics(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def response(uid: int, step: int, correct: bool, **changes: Any) -> dict[str, Any]:
    """A row of samples."""
    answer = "7" if correct else "8"
    return {
        "uid": uid,
        "sample": 0,
        "data_source": "gsm8k",
        "prompt": f"What is problem {uid}?",
        "response": f"After {step} steps it is \\boxed{{{answer}}}.",
        "ground_truth": '"7"',
        "answer": answer,
        "correct": correct,
        "reason": "exact" if correct else "different",
        "score": float(correct),
        "num_tokens": 10,
        "truncated": False,
        "logprob": -0.25,
        "advantage_0": 1.0,
        "advantage": 1.0 + 0.1 * (uid % 3),
        f"metric/layer_1/{ER}": 20.0 + step,
        **changes,
    }


def of_tokens(tokens: Sequence[str], rows: Sequence[int], ranks: Sequence[float]) -> dict[str, Any]:
    """The columns of tokens of a response."""
    return {
        "response": "".join(tokens),
        "tokens": list(tokens),
        "token_logprobs": [-0.5 * i for i in range(len(tokens))],
        "token_entropies": [0.25 * i for i in range(len(tokens))],
        "prefix_rows": list(rows),
        f"prefix/layer_1/{ER}": list(ranks),
    }


def write_samples(folder: Path, split: str, step: int, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "samples" / f"{split}_{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, compression="zstd")
    return path


def hostile_run(folder: Path) -> Path:
    """A run with hostile texts, as samples are written, in every place that has a text."""
    write_run(folder, samples=False)
    texts = [valid_unicode(text) for text in HOSTILE.values()]
    everywhere = ("prompt", "response", "ground_truth", "answer", "reason", "data_source", "reward_extra_info")
    for step in (0, 1):
        rows = [response(i, step, True, **dict.fromkeys(everywhere, text)) for i, text in enumerate(texts)]
        for row, text in zip(rows, texts, strict=True):
            row.update(of_tokens([text, text], [1], [2.0]))
        write_samples(folder, "val", step, rows)
    text = "</script><script>window.broken = 1</script><img src=x onerror=alert(1)>"
    (folder / "config.yaml").write_text(json.dumps({"seed": 0, text: {text: text}}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, f"my/{text}": 1.0, f"train/{text}/pass@1": 0.5}) + "\n")
    (folder / "summary.json").write_text(json.dumps({text: text}))
    start = {"overrides": [text, f"seed={text}"], "host": text, "started": text, "versions": {"verl": text}}
    (folder / "start.json").write_text(json.dumps(start | {"git_revision": text}))
    return folder
