"""The hybrid worker with its real engines: Ray, FSDP2 over gloo, vLLM."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_tokenizer import make_tiny_tokenizer
from transformers import AutoModelForCausalLM

from tests.kit import changed
from tests.workers.groups import all_prompts, sample, scored, start_group
from verl.checkpoint.shards import CheckpointWorker
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rollout.engines import end_tokens
from verl.rollout.queue import EngineCapacity
from verl.single_controller.worker_group import WorkerGroup
from verl.workers.hybrid import HybridWorker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(small_config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    """One worker, whose weights no test changes."""
    group = start_group(small_config, 1)
    yield group
    group.close()


@pytest.fixture(scope="module")
def two(small_config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    """Two workers, whose weights no test changes."""
    group = start_group(small_config, 2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def prompts(small_config: PPOConfig, tiny_tokenizer) -> list[PromptRecord]:
    return all_prompts(small_config, tiny_tokenizer)


def test_engine_sleeps_while_checkpoints_are_written(tmp_path, monkeypatch):
    calls = []
    for name in ("save", "load"):
        monkeypatch.setattr(CheckpointWorker, name, lambda *_, name=name: calls.append(name))
    worker = HybridWorker.__new__(HybridWorker)
    worker.has_engine, worker.rollout = True, SimpleNamespace(sleep=lambda: calls.append("sleep"))
    worker.save(tmp_path, False, True)
    worker.load(tmp_path, 3)
    assert calls == ["sleep", "save", "sleep", "load"]


def test_end_tokens_of_prompt_templates(small_config):
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["</s>", "<|endoftext|>"])
    # The model cannot sample these.
    assert end_tokens(changed(small_config, data={"template": "abel"}), tokenizer) == [2]
    small_config = replace(small_config, model=replace(small_config.model, override_config={"vocab_size": 264}))
    # The model's own end is 2, "</s>" is 262 and "<|endoftext|>" 263.
    expected = {"chat": [2], "raw": [2], "abel": [2, 262, 263], "qwen-boxed": [2, 263], "mistral": [2, 262]}
    for name, ids in expected.items():
        assert end_tokens(changed(small_config, data={"template": name}), tokenizer) == ids
    more = changed(small_config, data={"template": "mistral"}, rollout={"stop_token_ids": [7]})
    assert end_tokens(more, tokenizer) == [2, 7, 262]
    # No text shows a special token, so that a string to stop at would never be found.
    asked = changed(small_config, rollout={"stop": ["<|endoftext|>", "\nQuestion:"]})
    assert end_tokens(asked, tokenizer) == [2, 263]


def test_responses_do_not_depend_on_the_sampling_worker(one, two, prompts, small_config, monkeypatch):
    sampling = small_config.rollout.train_kwargs
    alone = sample(one, prompts, sampling, 7)
    shared = sample(two, prompts, sampling, 7)
    other_seed = sample(one, prompts, sampling, 8)
    assert torch.equal(alone.tokens, shared.tokens)
    assert alone.tokens.tolist() != other_seed.tokens.tolist()
    # Responses of one prompt are draws of their own.
    assert len({tuple(row.tokens.tolist()) for row in alone[: sampling.n].split(1)}) == sampling.n
    # Engines that take a few responses at a time from the queue, and return what has ended after a few steps.
    call, parts = two.run, []
    few = {"start_generation": [EngineCapacity(3, 9)] * 2}
    monkeypatch.setattr(two, "run", lambda method, *arguments: few.get(method) or call(method, *arguments))
    monkeypatch.setattr("verl.single_controller.generation.STEPS_PER_CALL", 5)
    for deterministic in (True, False):
        dealt = sample(two, prompts, sampling, 7, deterministic=deterministic, on_finished=parts.append)
        assert torch.equal(alone.tokens, dealt.tokens)
    assert len(parts) > 20
    assert sorted(row for part in parts for row in part.request.tolist()) == sorted(2 * list(range(len(alone))))


def test_rank_metrics_match_hidden_states(one, two, prompts, small_config, tiny_model):
    rollout = sample(two, prompts, small_config.rollout.train_kwargs, 3)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    calculator = RepresentationMetricsCalculator(small_config.calculator)
    assert small_config.calculator.layers == [0, -1]
    # What leaves a worker knows of hidden states only metrics and means.
    ranks = {f"rank/{name}" for name in small_config.calculator.metric_names}
    assert set(rollout.names) == {"tokens", "rollout_logprobs", "truncated", "mean_states"} | ranks
    for row in (0, 17, 63):
        episode = rollout[[row]]
        length = episode.longest_response
        with torch.no_grad():
            states = model(episode.tokens[None], output_hidden_states=True).hidden_states
        used = torch.stack([states[1][0], states[-1][0]], dim=1)[None, -length - 1 : -1]
        for layer, expected in enumerate(calculator(used, torch.ones(1, length)).values()):
            for name, value in expected.items():
                measured = rollout.rank_metrics[name][row, layer]
                assert abs(measured - value.item()) < 1e-3 * max(1, abs(value.item())), (row, layer, name)
        torch.testing.assert_close(rollout.mean_states[row], used[0].mean(dim=0), atol=1e-4, rtol=0)
    # The policy measures what the engine measures.
    plain = scored(one, rollout)
    assert not plain.rank_metrics
    for group in (one, two):
        group.run("measure_states", small_config.calculator)
        again = scored(group, rollout)
        group.run("measure_states", None)
        torch.testing.assert_close(again.logprobs, plain.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(again.entropy, plain.entropy, atol=1e-5, rtol=0)
        assert list(again.rank_metrics) == list(rollout.rank_metrics)
        torch.testing.assert_close(again.rank_metrics, rollout.rank_metrics, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again.mean_states, rollout.mean_states, atol=1e-5, rtol=0)
