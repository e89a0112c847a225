"""Conversations through the real queue and loop, with engines whose tokens follow from stream and position alone."""

import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import shipped_config
from tests.single_controller.rounds import in_rounds
from verl.batch import ENVIRONMENT, POLICY, Batch
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.conversations import ConversationSetup, policy_turns
from verl.rollout.environments.pool import Answer, EnvironmentStep
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import ResponseRequests, response_stream
from verl.single_controller import generation
from verl.single_controller.generation import generate_responses

LENGTH, STEPS, END = 55, 4, 2

PROMPTS = [PromptRecord(uid, [7] * (3 + uid), "arithmetic", "7", {}, [], False) for uid in range(5)]

SAMPLING = replace(shipped_config().rollout.train_kwargs, n=3)


def token(stream: int, position: int) -> int:
    """One in eight ends a turn."""
    drawn = random.Random(stream * 1000 + position).randrange(8)
    return END if drawn == 0 else 40 + drawn


class Engines:
    """In place of a worker group and of its exchange of messages."""

    def __init__(self, count: int = 2, slots: int = 4, lost_after: int = 10**9, logprobs: bool = True) -> None:
        self.count, self.slots = count, slots
        self.running: list[dict[int, tuple[Batch, int, int]]] = [{} for _ in range(count)]
        self.replies: dict[int, Any] = {}
        self.messages, self.lost_after, self.logprobs = 0, lost_after, logprobs
        self.sent: list[tuple[int, list[int]]] = []

    def check(self) -> None:
        """Nothing to supervise."""

    def run_living(self, method: str) -> list[Any]:
        if method == "rollout.cut":
            return self.cut()
        return [EngineCapacity(self.slots, self.slots) if method == "start_generation" else None] * self.count

    def cut(self) -> list[Batch | None]:
        parts: list[Batch | None] = []
        for running in self.running:
            rows = [row.fill(request=torch.tensor([place])) for place, (row, _, _) in running.items()]
            parts.append(Batch.join(rows) if rows else None)
            running.clear()
        return parts

    @property
    def busy(self) -> bool:
        return bool(self.replies)

    def send(self, engine: int, requests: ResponseRequests, max_steps: int) -> None:
        assert engine not in self.replies
        self.messages += 1
        self.sent.append((engine, list(requests.rows)))
        if self.messages > self.lost_after and engine == 0:
            self.running[0].clear()
            self.replies[0] = None
            self.lost_after = 10**9
            return
        for i, place in enumerate(requests.rows):
            assert place not in self.running[engine] and requests.partial is not None
            begun = requests.partial[[i]]
            known = ("rollout_logprobs", "version") if self.logprobs else ("version",)
            # The environment's state, which may be large, stays on the driver.
            assert set(begun.names) <= {"tokens", "source", "rollout_logprobs", "version"}
            begun = begun.columns("tokens", "source", *known)
            self.running[engine][place] = (begun, requests.streams[i], requests.version)
        ended: list[Batch] = []
        for place, (row, stream, version) in list(self.running[engine].items()):
            for _ in range(max_steps):
                row = longer(row, token(stream, int(row.lengths)), version)
                stops, cut = int(row.tokens[-1]) == END, int(row.response_lengths) == LENGTH
                if stops or cut:
                    del self.running[engine][place]
                    calls = [{"calls": [], "malformed": False, "prefilled": 1}]
                    whole = row.fill("episode", request=torch.tensor([place]), calls=calls)
                    ended.append(whole.fill(truncated=torch.tensor([cut and not stops])))
                    break
            else:
                self.running[engine][place] = (row, stream, version)
        self.replies[engine] = (Batch.join(ended) if ended else None, 0)

    def receive(self, from_all: bool) -> list[tuple[int, Any]]:
        engines = sorted(self.replies) if from_all else [min(self.replies)]
        return [(engine, self.replies.pop(engine)) for engine in engines]


def longer(row: Batch, new: int, version: int) -> Batch:
    prompt, response = row.tokens[~row.in_response].tolist(), row.response_tokens.tolist()
    grown = Batch.of([prompt], [[*response, new]])
    grown.fill(source=torch.cat([row.source, torch.tensor([POLICY], dtype=torch.uint8)]))
    if "rollout_logprobs" in row:
        grown.fill("response token", rollout_logprobs=torch.cat([row.rollout_logprobs, torch.tensor([-1.0])]))
    if "version" in row:
        grown.fill("response token", version=torch.cat([row.version, torch.tensor([version], dtype=torch.int32)]))
    return grown


class Environment:
    """In place of the pool: three messages, and then the end; ``seconds`` long at most."""

    role, settles = "user", staticmethod(lambda record: False)

    def __init__(self, seconds: float = 0.0, turns: int = 4) -> None:
        self.seconds, self.turns = seconds, turns
        self.threads = ThreadPoolExecutor(4)

    def ask(self, steps: Sequence[EnvironmentStep]) -> list[Future[Answer]]:
        return [self.threads.submit(self.answer, step) for step in steps]

    def answer(self, step: EnvironmentStep) -> Answer:
        time.sleep(random.uniform(0, self.seconds))
        turn = int(step.state or 0) + 1
        done = turn == self.turns
        messages = [] if done else [{"role": "user", "content": f"say {turn}"}]
        return Answer(str(turn), messages, done, 0.5, (1, 0, 0, 0, 0, 0))


@pytest.fixture
def converse(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Batch]:
    monkeypatch.setattr(generation, "STEPS_PER_CALL", STEPS)
    monkeypatch.setattr(generation, "EngineCalls", lambda workers, method, copies: workers)

    def talk(
        engines: Engines | None = None,
        environment: Environment | None = None,
        deterministic: bool = True,
        max_length: float = math.inf,
        **options: int,
    ) -> Batch:
        turns = replace(
            shipped_config().rollout.multi_turn, enable=True, environment="verl.rollout.programs:Programs", **options
        )
        environment = environment or Environment()
        setup = ConversationSetup(turns, LENGTH, LENGTH, tiny_tokenizer, {}, [], environment, max_length=max_length)
        return generate_responses(
            engines or Engines(), 1, PROMPTS, SAMPLING, 3, LENGTH, deterministic, conversations=setup
        )

    return talk


def test_turns_bridges_and_draws(converse, tiny_tokenizer):
    batch = converse()
    assert batch.turns.max() == 4 and batch.truncated.any() and not batch.truncated.all()
    for i, row in enumerate(batch.split(1)):
        stream, start = response_stream(3, PROMPTS[i // 3].uid, i % 3), int(row.prompt_lengths)
        for place, (number, source) in enumerate(zip(row.response_tokens.tolist(), row.source.tolist(), strict=True)):
            # A token's draw depends on the stream and its position alone, wherever the turns begin.
            assert source == ENVIRONMENT or number == token(stream, start + place)
        said = tiny_tokenizer.decode(row.response_tokens[row.source == ENVIRONMENT].tolist())
        assert said == "".join(f"<|user|>say {n}<|im_end|><|assistant|>" for n in range(1, int(row.turns)))
        assert int(row.source[-1]) == POLICY and len(policy_turns(row)[0]) == int(row.turns)
    whole = batch.turns == 4
    assert (batch.environment_rewards[whole & ~batch.truncated] == 2.0).all()
    assert (batch.call_counts[:, 5] == batch.turns).all()


@pytest.mark.parametrize(
    ("options", "most"), [({"max_assistant_turns": 2}, 2), ({"max_user_turns": 1}, 2), ({"max_user_turns": 2}, 3)]
)
def test_turns_are_limited(converse, options: dict[str, int], most: int):
    batch = converse(**options)
    assert batch.turns.max() == most
    assert not batch.truncated[batch.turns == most].all()


class Settling(Environment):
    """Gives its reward once, at the end of a conversation."""

    settles = staticmethod(lambda record: True)

    def answer(self, step: EnvironmentStep) -> Answer:
        if step.turn.ends:
            return Answer(step.state, [], True, 10.0, (0, 0, 0, 0, 0, 0))
        answer = super().answer(step)
        return answer._replace(reward=10.0 if answer.done else 0.0)


@pytest.mark.parametrize("options", [{}, {"max_length": 30}, {"max_assistant_turns": 2}])
def test_reward_is_asked_for_once_at_any_end(converse, options: dict[str, int]):
    batch = converse(environment=Settling(), **options)
    assert batch.environment_rewards.tolist() == [10.0] * len(batch)
    same(batch.fill(environment_rewards=batch.turns), converse(**options).fill(environment_rewards=batch.turns))
    assert bool(batch.truncated.any()) == ("max_assistant_turns" not in options)


def test_no_turn_begins_where_the_model_has_no_room_for_it(converse):
    batch, free = converse(max_length=30), converse()
    begun = [int(row.lengths) - len(policy_turns(row)[0][-1]) for row in batch.split(1)]
    assert max(begun) < 30 and (batch.truncated & ~free.truncated).any()
    assert int(batch.turns.sum()) < int(free.turns.sum())


def same(one: Batch, two: Batch) -> None:
    for name in ("tokens", "source", "turns", "environment_rewards", "truncated"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


@pytest.mark.parametrize("deterministic", [True, False])
def test_slow_environments_change_no_result(converse, deterministic: bool):
    expected, sent = converse(), []
    for seed in range(3):
        random.seed(seed)
        engines = Engines(slots=2)
        same(converse(engines, Environment(0.02), deterministic), expected)
        sent.append(engines.sent)
    assert not deterministic or sent[0] == sent[1] == sent[2]


class Patient(Environment):
    """Answers once the engine has worked on, unless it has nothing to work on."""

    def __init__(self, engines: Engines) -> None:
        super().__init__()
        self.engines = engines

    def answer(self, step: EnvironmentStep) -> Answer:
        before, started = self.engines.messages, time.monotonic()
        while self.engines.messages == before and any(self.engines.running):
            assert time.monotonic() < started + 60, "the engine waits for an environment while it has work"
            time.sleep(0.001)
        return super().answer(step)


def test_an_engine_works_on_while_environments_answer(converse):
    engines = Engines(count=1, slots=9)
    same(converse(engines, Patient(engines), deterministic=False), converse())


def test_an_evaluation_asks_for_no_logprobs(converse):
    batch = converse(Engines(logprobs=False))
    same(batch, converse())
    assert "rollout_logprobs" not in batch


@pytest.mark.parametrize("after", [1, 4, 9])
def test_conversations_of_a_lost_engine_go_on_elsewhere(converse, after: int):
    engines = Engines(3, lost_after=after)
    same(converse(engines, Environment(0.01), False), converse())


def test_conversations_that_are_cut_are_those_in_one(converse, tiny_tokenizer):
    expected = converse()
    turns = replace(shipped_config().rollout.multi_turn, enable=True, environment="verl.rollout.programs:Programs")
    setup = ConversationSetup(turns, LENGTH, LENGTH, tiny_tokenizer, {}, [], Environment())
    whole = in_rounds(Engines(slots=9), PROMPTS, SAMPLING, 3, setup)
    same(whole, expected)
    # A round had at most four tokens of each.
    assert whole.version.max() > 5
