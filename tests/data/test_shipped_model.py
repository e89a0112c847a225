"""The models in data/: small, without traces of the machine that made them, and made again by their commands."""

import json
import runpy
import shlex
from pathlib import Path

import make_tiny_model
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from tiny_tokenizer import make_tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.rewards import compute_score

MODELS = {
    "tiny_model": ["--out", "data/tiny_model", "--data", "data/arithmetic"],
    "tiny_tool_model": "--out data/tiny_tool_model --data data/arithmetic_tools --tools --target 0.25".split(),
    "tiny_teacher": (
        "--out data/tiny_teacher --data data/arithmetic --layers 6 --target 0.75 --dtype bfloat16 "
        "trainer.n_gpus_per_node=1 optim.lr=1e-3"
    ).split(),
}
"""Folder in data/ -> the arguments that made it."""


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / make_tiny_model.METRICS).read_text().splitlines()]


def score(folder: Path) -> float:
    """Sequence probability on held-out problems after the last step."""
    return metrics(folder)[-1]["val/sequence_probability"]


@pytest.mark.parametrize(
    ("name", "parameters", "lowest", "highest"),
    [
        ("tiny_model", 888_192, 0.36, 0.46),
        ("tiny_tool_model", 889_344, 0.25, 0.35),
        ("tiny_teacher", 1_315_456, 0.75, 0.85),
    ],
)
def test_shipped_models(name: str, parameters: int, lowest: float, highest: float):
    folder = ROOT / "data" / name
    files = {path.name: path for path in folder.iterdir()}
    assert sum(path.stat().st_size for path in files.values()) < 4e6
    texts = "".join(path.read_text() for name, path in files.items() if name != "model.safetensors")
    assert not any(trace in texts for trace in ("_name_or_path", "/home/", "/root/", "/tmp/"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    vocabulary = make_tiny_tokenizer(tools="--tools" in MODELS[name]).get_vocab()
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == vocabulary
    assert lowest < score(folder) < highest
    command = shlex.join(["python", "scripts/make_tiny_model.py", *MODELS[name]])
    data, step = MODELS[name][3], metrics(folder)[-1]["step"]
    card = make_tiny_model.CARD.format(
        command=command, data=data, step=step, score=score(folder), parameters=parameters / 1e6
    )
    assert files["README.md"].read_text() == card


def test_tool_model_calls_the_calculator_and_copies_its_answer():
    folder, data = ROOT / "data" / "tiny_tool_model", ROOT / "data" / "arithmetic_tools"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    multiply = runpy.run_path(str(data / "calculator.py"))["multiply"]

    def says(text: str) -> str:
        ids = tokenizer(text, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(tokens).removesuffix(tokenizer.eos_token)

    called, right = {True: [], False: []}, []
    for row in pq.read_table(data / "test.parquet").to_pylist()[:24]:
        question, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        chat = f"<|user|>{question}<|im_end|><|assistant|>"
        turn = says(chat)
        called[int(question.split()[2]) < 300].append(turn.startswith("<tool_call>"))
        if turn.startswith("<tool_call>"):
            call = json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            turn = says(f"{chat}{turn}<|im_end|><|tool|>{multiply(**call['arguments'])}<|im_end|><|assistant|>")
            right.append(compute_score(row["data_source"], turn, truth, {})["acc"])
    assert called == {True: [True] * 2, False: [False] * 22} and right == [True] * 2
