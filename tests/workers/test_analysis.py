"""The analysis worker against slow formulas over transformers' own forward pass, and the file of what it measured."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.analysis.measure import MeasureFile, measure_missing
from verl.config.analysis import ReadingPolicyConfig
from verl.config.common import FSDPConfig
from verl.single_controller.worker_group import WorkerGroup
from verl.workers.measurements import PromptResponses

pytestmark = pytest.mark.slow

LAYERS, STRIDE, TEMPERATURE = [1, -1], 4, 0.7

PROMPTS = [
    PromptResponses(0, [5, 6, 7, 8], [[10, 11, 12, 13, 14, 15, 16, 2], [9, 2], [20] * 11]),
    PromptResponses(1, [40, 41], [[30, 2], [31, 32, 33, 34, 35, 36, 37], [38, 39, 40, 41, 42, 2]]),
    PromptResponses(2, [50, 51, 52, 53, 54, 55], [[60 + i for i in range(14)], [61, 2], [62]]),
]


@pytest.fixture(scope="module")
def workers(small_config, tiny_model: Path, ray_session: None) -> Iterator[WorkerGroup]:
    fsdp = FSDPConfig(-1, False, False)
    policy = ReadingPolicyConfig("auto", "sdpa", micro_batch_size=2, fsdp=fsdp, logits_chunk_size=64)
    calculator = replace(
        small_config.calculator, layers=LAYERS, diff_stride=STRIDE, keep_prefixes=True, metric_indices=[1]
    )
    model = policy.model_config(str(tiny_model), False, on_cpu=True)
    group = WorkerGroup("verl.workers.analysis:AnalysisWorker", model, (calculator, 1, 2), 1, 2, "cpu", {})
    yield group
    group.close()


def effective_rank(rows: np.ndarray) -> float:
    values = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    shares = values[values > 1e-12 * max(values.max(), 1e-30)] / values.sum() if len(rows) > 1 else np.ones(1)
    return float(np.exp(-(shares * np.log(shares)).sum()))


def velocity_and_acceleration(rows: np.ndarray) -> tuple[float, float]:
    ranks = [effective_rank(rows[:k]) for k in range(STRIDE + 1, len(rows) + 1, STRIDE)]
    deltas = [ranks[j] - np.mean(ranks[:j]) for j in range(1, len(ranks))]
    return float(np.mean(deltas)) if deltas else 0.0, float(np.mean(np.diff(deltas))) if len(deltas) > 1 else 0.0


def read_slowly(model, prompt: list[int], tokens: list[int]) -> tuple[list[float], list[float], list[np.ndarray]]:
    """Log-probability and entropy of each token, and the states of each layer."""
    with torch.no_grad():
        output = model(torch.tensor([[*prompt, *tokens]]), output_hidden_states=True)
    places = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    chances = [torch.softmax(output.logits[0, place].double() / TEMPERATURE, dim=0) for place in places]
    logprobs = [float(p[token].log()) for p, token in zip(chances, tokens, strict=True)]
    entropies = [-float((p * p.log()).sum()) for p in chances]
    states = [output.hidden_states[1:][layer][0, list(places)].double().numpy() for layer in LAYERS]
    return logprobs, entropies, states


def test_measures_match_slow_formulas(workers: WorkerGroup, tiny_model: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with MeasureFile(tmp_path, {}) as file:
        # Three prompts for two workers.
        measure_missing(file, PROMPTS, TEMPERATURE, workers, 2)
        for prompt in PROMPTS:
            found = file.get(prompt)
            read = [read_slowly(model, prompt.prompt_ids, tokens) for tokens in prompt.token_ids]
            for measured, course, (logprobs, entropies, states) in zip(
                found.responses, found.courses, read, strict=True
            ):
                assert measured["avg_log_probs"] == pytest.approx([np.mean(logprobs)], abs=1e-4)
                assert measured["avg_logits_entropy"] == pytest.approx([np.mean(entropies)], abs=1e-4)
                ranks = [effective_rank(rows) for rows in states]
                changes = [velocity_and_acceleration(rows) for rows in states]
                assert measured["Effective Rank"] == pytest.approx(ranks, rel=1e-3)
                assert measured["Effective Rank diff"] == pytest.approx([v for v, _ in changes], abs=5e-3)
                assert measured["Effective Rank diff 2"] == pytest.approx([a for _, a in changes], abs=5e-3)
                # Along the response: after 5, 9, 13, ... tokens, and at its end.
                ends = sorted({*range(STRIDE + 1, len(logprobs) + 1, STRIDE), len(logprobs)})
                assert course.ends == ends
                along = [effective_rank(states[1][:end]) for end in ends]
                assert course.values["Effective Rank"] == pytest.approx(along, rel=1e-3)
                pieces = [np.mean(logprobs[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
                assert course.values["logprob"] == pytest.approx(pieces, abs=1e-4)
                prefixes = [states[1][:end] for end in ends]
                steps = [np.linalg.norm(np.diff(rows, axis=0), axis=1) for rows in prefixes]
                speeds = [norms.mean() if len(norms) else 0.0 for norms in steps]
                assert course.values["state_speed"] == pytest.approx(speeds, rel=1e-4)
                spreads = [np.sqrt(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean()) for rows in prefixes]
                assert course.values["state_dispersion"] == pytest.approx(spreads, rel=1e-4)
            stacked = [np.concatenate([states[place] for *_, states in read]) for place in range(2)]
            assert found.stack["Effective Rank"] == pytest.approx([effective_rank(s) for s in stacked], rel=1e-3)
            changes = [velocity_and_acceleration(rows) for rows in stacked]
            assert found.stack["Effective Rank diff"] == pytest.approx([v for v, _ in changes], abs=5e-3)
            assert found.stack["Effective Rank diff 2"] == pytest.approx([a for _, a in changes], abs=5e-3)
            means = np.stack([states[1].mean(axis=0) for *_, states in read])
            pairs = [(0, 1), (0, 2), (1, 2)]
            distances = [np.linalg.norm(means[i] - means[j]) for i, j in pairs]
            units = means / np.linalg.norm(means, axis=1, keepdims=True)
            centre = np.linalg.norm(means - means.mean(axis=0), axis=1)
            expected = [np.mean(distances), np.mean([units[i] @ units[j] for i, j in pairs]), centre.mean()]
            assert list(found.distances.values()) == pytest.approx(expected, rel=1e-3)


def test_measured_prompts_are_not_measured_again(workers: WorkerGroup, tmp_path: Path):
    with MeasureFile(tmp_path, {"layer": 1}) as file:
        measure_missing(file, PROMPTS[:2], TEMPERATURE, workers, 2)
        first = file.get(PROMPTS[0])
    path = tmp_path / "measures.jsonl"
    with path.open("a") as torn:
        torn.write('{"responses": "')
    with MeasureFile(tmp_path, {"layer": 1}) as file:
        assert file.get(PROMPTS[0]) == first and file.get(PROMPTS[2]) is None
        # Other responses to the same prompt are measured.
        assert file.get(replace(PROMPTS[0], token_ids=PROMPTS[1].token_ids)) is None
        measure_missing(file, PROMPTS, TEMPERATURE, workers, 2)
    keys = [json.loads(line)["measured"]["key"] for line in path.read_text().splitlines()[1:]]
    assert keys == [0, 1, 2]
    with MeasureFile(tmp_path, {"layer": 2}) as file:
        assert file.get(PROMPTS[0]) is None
