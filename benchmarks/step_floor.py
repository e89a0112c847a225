"""The time of a training step by phase (bench_step.py), and the least that its matrix products take on this machine."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_report import read_lines, table, timed
from transformers import AutoConfig, AutoModelForCausalLM

from verl.models.onednn import available, product

GENERATION, SCORING, UPDATE, REST = "generation", "old and reference log-probabilities", "update", "rest"
PHASES = {
    GENERATION: ("timing_s/gen",),
    SCORING: ("timing_s/old_log_prob", "timing_s/ref"),
    UPDATE: ("timing_s/update_actor",),
}
"""Phase -> what of our log is its time; the rest of a step is the update's of TRL."""
ROUNDS = 40
"""Of a measured rate, of which the best counts."""


def phases_of(folder: Path, steps: int, updates: int) -> dict[str, float]:
    """Phase -> median seconds of the last ``steps`` steps in the log of the training in ``folder``, ``rest`` included.

    A step of ours is logged after its turn, so that these are one step earlier than those whose whole time is measured.
    TRL's logs each of the ``updates`` optimizer steps of a step.
    """
    ours = folder / "run/metrics.jsonl"
    if ours.exists():
        lines = read_lines(ours)[-steps:]
        entries = [
            {phase: sum(line[key] for key in keys if key in line) for phase, keys in PHASES.items()} for line in lines
        ]
        for entry, line in zip(entries, lines, strict=True):
            entry[REST] = line["timing_s/step"] - sum(entry.values())
    else:
        times = [line["phases"] for line in read_lines(folder / "log.jsonl") if "loss" in line][-steps * updates :]
        entries = [
            {phase: sum(part.get(phase, 0.0) for part in times[first : first + updates]) for phase in PHASES}
            for first in range(0, len(times), updates)
        ]
    names = dict.fromkeys(name for entry in entries for name in entry)
    return {name: statistics.median(entry[name] for entry in entries) for name in names}


def tokens_of(folder: Path, steps: int, prompts: int, samples: int) -> dict[str, float]:
    """Tokens of our steps, of all prompts, of all responses and of the longest: medians of the last ``steps``."""
    lines = read_lines(folder / "run/metrics.jsonl")[-steps:]
    keys = ("prompt_length/mean", "response_length/mean", "response_length/max")
    prompt, response, longest = (statistics.median(line[key] for line in lines) for key in keys)
    return {"prompts": prompts * prompt, "responses": prompts * samples * response, "longest": longest}


def rate(threads: int) -> dict[str, float]:
    """What this machine reaches in float32 with so many threads: operations a second of the faster library's products
    of 1024 rows, and bytes a second of reading what is in no cache."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        states, weight = torch.randn(1024, 1024), torch.randn(1024, 1024)
        products = [torch.nn.functional.linear, *([product] if available() else [])]
        fastest = min(_fastest(partial(f, states, weight)) for f in products)
        large = torch.ones(64 << 20)
        reading = _fastest(large.sum)
    finally:
        torch.set_num_threads(before)
    return {"operations": 2 * 1024**3 / fastest, "bytes": 4 * large.numel() / reading}


def _fastest(call: Callable[[], Any]) -> float:
    return min(timed(call)[0] for _ in range(ROUNDS))


def floor(model: Path, tokens: Mapping[str, float], rates: Mapping[str, float], updates: int) -> dict[str, float]:
    """Phase -> least seconds of its products of weights, if each prompt is read once and the head reads responses.

    Two operations a weight and token in a forward pass, and four more in a backward pass. Generation also reads all
    weights once for each token of the longest response; the longer of both times counts. Old log-probabilities are
    computed for all mini-batches but the first; the reference's, which a KL loss needs, for all.
    """
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = whole.get_output_embeddings().weight.numel()
    embedding = 0 if whole.config.tie_word_embeddings else whole.get_input_embeddings().weight.numel()
    body = sum(weight.numel() for weight in whole.parameters() if weight.dim() == 2) - head - embedding
    forward = 2 * (body * (tokens["prompts"] + tokens["responses"]) + head * tokens["responses"]) / rates["operations"]
    reads = 4 * (body + head) * tokens["longest"] / rates["bytes"]
    times = (max(forward, reads), (1 - 1 / updates + 1) * forward, 3 * forward)
    return dict(zip(PHASES, times, strict=True))


def section(facts: Mapping[str, Any]) -> str:
    """The table of a report that has phases."""
    columns: dict[str, Mapping[str, float]] = {**facts["phases"], "floor": facts["floor"]}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[name, *(f"{column[name]:.2f}" if name in column else "" for column in columns.values())] for name in names]
    rows.append(["all", *(f"{sum(column.values()):.2f}" for column in columns.values())])
    operations, read = (f"{facts['rates'][name] / 1e9:.0f} billion" for name in ("operations", "bytes"))
    prompts, responses = (f"{facts['tokens'][name]:.0f}" for name in ("prompts", "responses"))
    peer = "\nWhat TRL does besides generating and scoring is in its update." if "TRL" in columns else ""
    return f"""
## By phase

Medians in seconds. The floor is the time of the products of weights alone, at the rates that this machine reached
after the last round, {operations} operations and {read} bytes a second. A step has {prompts} tokens of prompts,
each read once, and {responses} of responses. The last line is the sum of these medians.{peer}

{table(["phase", *(f"{name}:" for name in columns)], rows)}"""


def measured(
    model: Path, folders: Mapping[str, Path], steps: int, prompts: int, samples: int, updates: int, threads: int
) -> dict[str, Any]:
    """What a report says of the phases of the trainings in ``folders``, ours and TRL's; GRPO's tokens count."""
    tokens, rates = tokens_of(folders["GRPO"], steps, prompts, samples), rate(threads)
    phases = {name: phases_of(folder, steps, updates) for name, folder in folders.items()}
    return {"phases": phases, "tokens": tokens, "rates": rates, "floor": floor(model, tokens, rates, updates)}
