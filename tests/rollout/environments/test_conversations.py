"""Conversations through the real engine: what the policy is asked, what it learns from, and what is measured."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tests.conftest import changed
from tests.single_controller.rounds import in_rounds
from tests.workers.groups import all_prompts, scored, start_group
from verl.batch import ENVIRONMENT, POLICY, RANK, Batch
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.conversations import (
    ConversationSetup,
    policy_turns,
)
from verl.rollout.environments.pool import Answer, EnvironmentStep
from verl.single_controller.generation import generate_responses
from verl.single_controller.worker_group import WorkerGroup

pytestmark = pytest.mark.slow

LENGTH = 150


class Environment:
    """In place of the pool: answers at once, or late, with ``answers[turn]``; None ends the conversation."""

    role, settles = "user", staticmethod(lambda record: False)

    def __init__(self, answers: Callable[[int], str | None], late: bool = False) -> None:
        self.answers, self.late = answers, late

    def ask(self, steps: Sequence[EnvironmentStep]) -> list[Future[Answer]]:
        futures = [Future[Answer]() for _ in steps]
        for future, step in zip(futures, steps, strict=True):
            future.set_result(self.answer(step))
        return futures

    def answer(self, step: EnvironmentStep) -> Answer:
        turn = int(step.state or 0)
        text = self.answers(turn)
        messages = [] if text is None else [{"role": "user", "content": text}]
        return Answer(str(turn + 1), messages, text is None, 0.5, (0, 0, 0, 0, 0, 0))


def says(turns: int, text: str = "go on") -> Environment:
    """So many turns of the policy."""
    return Environment(lambda turn: f"{text} {turn}" if turn + 1 < turns else None)


@pytest.fixture(scope="module")
def config(small_config: PPOConfig) -> PPOConfig:
    return changed(
        small_config,
        data={"max_response_length": LENGTH},
        rollout={
            "multi_turn": {"enable": True, "environment": "verl.rollout.programs:Programs"},
            # Short turns: any of the digits ends one.
            "stop_token_ids": list(range(20, 40)),
            "engine_kwargs": {"block_size": 32},
            "max_num_batched_tokens": 64,
        },
    )


@pytest.fixture(scope="module")
def prompts(config: PPOConfig, tiny_tokenizer: Any) -> list[PromptRecord]:
    return all_prompts(config, tiny_tokenizer)[:3]


def talk(
    group: WorkerGroup, config: PPOConfig, tokenizer: Any, prompts: list[PromptRecord], environment: Environment
) -> Batch:
    setup = ConversationSetup(config.rollout.multi_turn, LENGTH, LENGTH, tokenizer, {}, [], environment)
    sampling = config.rollout.train_kwargs
    return generate_responses(group, 1, prompts, sampling, 3, LENGTH, True, conversations=setup)


@pytest.fixture(scope="module")
def talked(group, config, tiny_tokenizer, prompts) -> Batch:
    return talk(group, config, tiny_tokenizer, prompts, says(4))


def test_the_engines_logprobs_are_the_policys_on_every_turn(talked, group):
    assert talked.turns.max() == 4 and (talked.source == ENVIRONMENT).any()
    difference = (scored(group, talked.columns("tokens", "source")).logprobs - talked.rollout_logprobs).abs()
    assert difference[talked.by_policy].max() < 1e-5
    assert (talked.rollout_logprobs[~talked.by_policy] == 0).all()


def test_a_turn_follows_the_tokens_before_it_and_the_bridge(talked, tiny_tokenizer):
    for row in talked.split(1):
        (turns,) = policy_turns(row)
        assert len(turns) == int(row.turns)
        expected: list[int] = []
        for number, turn in enumerate(turns):
            expected += turn
            if number + 1 < len(turns):
                said = f"<|user|>go on {number}<|im_end|><|assistant|>"
                said = said if turn[-1] == tiny_tokenizer.eos_token_id else f"<|im_end|>{said}"
                expected += tiny_tokenizer(said).input_ids
        assert row.response_tokens.tolist() == expected
        assert int(row.source[-1]) == POLICY


def test_rank_metrics_of_whole_and_turns_are_the_policys(talked, group, config):
    group.run("measure_states", config.calculator)
    expected = scored(group, talked.columns("tokens", "source"))
    group.run("measure_states", None)
    assert set(talked.turn_metrics) == set(talked.rank_metrics) == set(expected.rank_metrics)
    for name, values in talked.rank_metrics.items():
        torch.testing.assert_close(values, expected.rank_metrics[name], rtol=1e-5, atol=1e-5)
    for name, values in talked.turn_metrics.items():
        torch.testing.assert_close(values, expected.turn_metrics[name], rtol=1e-5, atol=1e-5, equal_nan=True)
        there = torch.arange(values.shape[1]) < talked.turns[:, None]
        assert torch.equal(values[..., 0].isfinite(), there)


def test_an_environment_that_ends_at_once_changes_nothing(group, config, tiny_tokenizer, prompts, small_config):
    once = talk(group, config, tiny_tokenizer, prompts, says(1))
    plain = changed(config, rollout={"multi_turn": {"enable": False}})
    other = start_group(plain, 1)
    single = generate_responses(other, 1, prompts, config.rollout.train_kwargs, 3, LENGTH, True)
    other.close()
    assert once.by_policy.all() and (once.turns == 1).all()
    for name in single.names:
        # Measured together at the end, not as they come: the last bit of a float64 may differ.
        rtol = 1e-14 if name.startswith(RANK) else 0
        torch.testing.assert_close(getattr(once, name), getattr(single, name), rtol=rtol, atol=0)


def test_what_is_read_grows_with_the_bridges(group, config, tiny_tokenizer, prompts):
    read = {}
    for turns in (2, 4, 6):
        batch = talk(group, config, tiny_tokenizer, prompts, says(turns, "more"))
        full = batch.turns == turns
        assert full.any()
        read[turns] = batch.call_counts[full, 5].double().mean().item()
    # A further turn costs its bridge, and at most the block that the turn before did not fill.
    per_turn = len(tiny_tokenizer("<|im_end|><|user|>more 0<|im_end|><|assistant|>").input_ids) + 32 + 32
    assert read[6] - read[4] < 2 * per_turn
    assert read[4] - read[2] < 2 * per_turn


def test_conversations_that_are_cut_say_the_same(talked, group, config, tiny_tokenizer, prompts, monkeypatch):
    monkeypatch.setattr("verl.single_controller.generation.STEPS_PER_CALL", 5)
    setup = ConversationSetup(config.rollout.multi_turn, LENGTH, LENGTH, tiny_tokenizer, {}, [], says(4))
    whole = in_rounds(group, prompts, config.rollout.train_kwargs, 3, setup)
    assert whole.version.max() > 3
    assert torch.equal(whole.tokens, talked.tokens) and torch.equal(whole.source, talked.source)
    torch.testing.assert_close(whole.rollout_logprobs, talked.rollout_logprobs, rtol=0, atol=1e-5)
    for name, values in talked.rank_metrics.items():
        torch.testing.assert_close(getattr(whole, f"rank/{name}"), values, rtol=1e-5, atol=1e-5)


def test_tokens_of_an_environment_change_no_gradient(talked, group, config):
    logprobs = scored(group, talked.columns("tokens")).logprobs
    advantages = torch.ones(len(logprobs))
    rows = talked.columns("tokens", "source").fill(learn_mask=talked.by_policy, old_logprobs=logprobs)
    losses = []
    for on_environment in (0.0, 100.0):
        put = torch.where(talked.by_policy, advantages, on_environment)
        batch = rows.columns(*rows.names).fill(advantages=put, ref_logprobs=logprobs - put)
        losses.append(group.run("gradients", batch, int(talked.by_policy.sum()), len(talked))[0])
    for name, gradient in losses[0].items():
        assert torch.equal(gradient, losses[1][name])
