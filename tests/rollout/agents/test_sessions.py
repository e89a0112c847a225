"""Sessions of agents without processes, HTTP or engines: which row a request continues, and what each row holds."""

import time
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit import changed, refused
from verl.batch import ENVIRONMENT, POLICY, RESPONSE_TOKEN, Batch
from verl.config import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.agents import sessions
from verl.rollout.agents.endpoint import Asked, Began, Ended
from verl.rollout.agents.protocol import ProtocolError, read_request
from verl.rollout.agents.sessions import Sessions
from verl.rollout.environments.conversations import ConversationSetup
from verl.rollout.queue import EngineCapacity, RequestQueue
from verl.rollout.requests import ResponseRequests

USER = {"role": "user", "content": "2+3="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Reply(Future):
    """Holds what an agent would receive."""

    @property
    def outcome(self) -> Any:
        return self.result(timeout=0)

    @property
    def message(self) -> dict[str, Any]:
        return self.outcome["choices"][0]["message"]


class Pool:
    """Agents played by a test."""

    role = "user"

    def __init__(self, at_once: int, num_shares: int) -> None:
        self.at_once, self.num_shares, self.closed = at_once, num_shares, list[int]()
        self.endpoint = SimpleNamespace(events=SimpleQueue(), close_session=self.closed.append)

    def play(self, records: list[PromptRecord]) -> list[list[int]]:
        size = -(-len(records) // self.num_shares)
        return [list(range(len(records)))[i : i + size] for i in range(0, len(records), size)]


class Game:
    """Sessions with one scripted engine, which writes "7" in every turn unless told otherwise."""

    def __init__(self, config: PPOConfig, tokenizer: Any, num: int = 1, at_once: int = 99, **agent: Any) -> None:
        turns = {"enable": True, "agent": {"path": "m.py:agent", "timeout_s": 5.0, **agent.pop("agent", {})}, **agent}
        options = changed(config, rollout={"multi_turn": turns}).rollout.multi_turn
        self.tokenizer, self.pool, self.said = tokenizer, Pool(at_once, 1), list[str]()
        setup = ConversationSetup(options, 40, 60, tokenizer, {}, [], self.pool, self.said.append)
        self.records = [PromptRecord(i, [5, 6], "x", None, {}, [USER], False) for i in range(num)]
        self.sessions, self.queue = Sessions(setup, self.records), RequestQueue(0, [EngineCapacity(99, 99)])
        sampling = SamplingConfig(n=1, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
        self.requests = ResponseRequests(range(num), [[5, 6]] * num, list(range(1000, 1000 + num)), sampling)
        self.running: dict[int, tuple[Any, ResponseRequests]] = {}
        self.version = 0

    def ask(self, *messages: dict[str, Any], session: int = 0, **fields: Any) -> Reply:
        """Ask for a turn, as a client would."""
        reply = Reply()
        request = read_request({"messages": list(messages), **fields})
        self.pool.endpoint.events.put(Asked(session, request, reply))
        return reply

    def begin(self, session: int = 0) -> None:
        """Report that an agent runs."""
        self.pool.endpoint.events.put(Began(session))

    def end(self, session: int = 0, reward: float = 0.0, failure: str = "") -> None:
        self.pool.endpoint.events.put(Ended(session, reward, failure))

    def accept(self, deterministic: bool = False, wait: bool = False) -> list[int]:
        """Let the sessions take what happened; returns the places that the engine gets."""
        self.left = self.sessions.resume(self.queue, deterministic, wait, lambda: None)
        places = self.queue.take(0)
        sent = self.sessions.requests(self.requests, places)
        for i, place in enumerate(places):
            self.running[place] = (sent.partial[[i]], sent.of([i]))
        return list(places)

    def part(self, place: int, text: str) -> Batch:
        """What an engine returns of the turn at this place, with ``text`` sampled in this call."""
        before, _ = self.running.pop(place)
        new = self.tokenizer(text).input_ids if text else []
        tokens = [*before.response_tokens.tolist(), *new]
        source = torch.tensor([*before.source.tolist(), *[POLICY] * len(new)], dtype=torch.uint8)
        logprobs = torch.tensor([*before.rollout_logprobs.tolist(), *[-1.0 - self.version] * len(new)])
        prompt = before.tokens[~before.in_response].tolist()
        part = Batch.of([prompt], [tokens]).fill(RESPONSE_TOKEN, source=source, rollout_logprobs=logprobs)
        if "version" in before:
            versions = torch.tensor([*before.version.tolist(), *[self.version] * len(new)], dtype=torch.int32)
            part.fill(RESPONSE_TOKEN, version=versions)
        return part.fill(request=torch.tensor([place]))

    def sample(self, *places: int, text: str = "7", calls: Any = (), truncated: bool = False) -> None:
        """Finish the turns at these places."""
        for place in places:
            part = self.part(place, text).fill(truncated=torch.tensor([truncated]))
            found = {"calls": list(calls), "malformed": False, "mark": None, "unsupported": "", "prefilled": 1}
            self.sessions.take(part.fill(calls=[found]))

    def turn(self, *messages: dict[str, Any], text: str = "7", **fields: Any) -> dict[str, Any]:
        """Ask for one turn and return the policy's message, whichever row it continued."""
        reply = self.ask(*messages, **fields)
        self.sample(*self.accept(), text=text)
        return reply.message

    def over(self) -> Batch:
        """The session's rows after its agent has returned."""
        self.end()
        self.accept()
        rows = self.sessions.over()
        assert rows is not None
        return rows


@pytest.fixture
def game(small_config, tiny_tokenizer) -> Game:
    return Game(small_config, tiny_tokenizer)


def test_an_extended_history_continues_its_row(game, tiny_tokenizer):
    first = game.turn(USER)
    game.turn(USER, first, {"role": "user", "content": "1+1="}, text="2")
    rows = game.over()
    assert rows.further_rows == [[]] and rows.turns.tolist() == [2]
    prompt = rows.tokens[~rows.in_response].tolist()
    assert prompt == tiny_tokenizer("<|user|>2+3=<|im_end|><|assistant|>").input_ids
    said = tiny_tokenizer("7<|im_end|><|user|>1+1=<|im_end|><|assistant|>2").input_ids
    assert rows.response_tokens.tolist() == said
    assert rows.source.tolist() == [POLICY, *[ENVIRONMENT] * (len(said) - 2), POLICY]


@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": " 7\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "7"}], "refusal": None},
        {"role": "assistant", "content": "7", "tool_calls": None, "annotations": [], "audio": None},
    ],
)
def test_clients_may_write_a_reply_in_other_words(game, reply):
    game.turn(USER)
    game.turn(USER, reply, USER)
    assert game.over().further_rows == [[]]


OTHER = {"role": "user", "content": "4-1="}
DROPPED = {"role": "assistant", "content": "8"}


@pytest.mark.parametrize(
    ("second", "fields", "why"),
    [
        ([OTHER], {}, "other"),
        ([USER, DROPPED, USER], {}, "assistant"),
        ([USER], {}, "repeated"),
        ([USER, "reply", DROPPED, USER], {}, "edited"),
        ([USER, "reply", USER], {"tools": [TOOL]}, "tools"),
        ([{**USER, "role": "system"}, USER], {}, "other"),
    ],
)
def test_another_history_opens_a_further_row_with_a_reason(game, second, fields, why):
    reply = game.turn(USER)
    game.turn(*(reply if message == "reply" else message for message in second), text="33", **fields)
    rows = game.over()
    # The row with the last turn stands for the session.
    assert rows.response_tokens.tolist() == game.tokenizer("33").input_ids and rows.turns.tolist() == [2]
    ((further,),) = rows.further_rows
    assert further["tokens"] == game.tokenizer("7").input_ids and further["source"] == [POLICY]
    assert rows.opened_by == [why] and further["why"] == ""


def test_rows_draw_from_streams_of_their_own(game):
    streams = {}
    for name, messages in {"first": [USER], "again": [USER], "third": [USER], "other": [OTHER]}.items():
        game.ask(*messages)
        (place,) = game.accept()
        streams[name] = game.running[place][1].streams[0]
        game.sample(place)
    assert streams["first"] == 1000 and len(set(streams.values())) == 4


def test_streams_of_further_rows_follow_from_their_content(small_config, tiny_tokenizer):
    def streams(*order: dict[str, Any]) -> dict[str, int]:
        game, found = Game(small_config, tiny_tokenizer), {}
        game.turn(USER)
        for message in order:
            game.ask(message)
            (place,) = game.accept()
            found[message["content"]] = game.running[place][1].streams[0]
            game.sample(place)
        return found

    assert streams(OTHER, {**OTHER, "content": "9"}) == streams({**OTHER, "content": "9"}, OTHER)


def test_a_request_while_its_row_is_sampled_opens_another(game):
    first, second = game.ask(USER), game.ask(USER)
    places = game.accept()
    assert places == [0, 1]
    game.sample(*places)
    assert first.message["content"] == second.message["content"] == "7"
    rows = game.over()
    ((further,),) = rows.further_rows
    assert {further["why"], *rows.opened_by} == {"", "parallel"}


def test_limits_of_turn_and_stop_strings_reach_the_engine(game):
    game.ask(USER, max_tokens=9, max_completion_tokens=4, stop="x")
    (place,) = game.accept()
    _, request = game.running[place]
    assert request.max_tokens == [4] and request.stop == [["x"]]
    game.sample(place, truncated=True)
    # The turn was cut, but the row has room.
    rows = game.over()
    assert not rows.truncated.any()


def test_token_ids_are_returned_on_request(game, tiny_tokenizer):
    reply = game.ask(USER, return_token_ids=True)
    game.sample(*game.accept())
    row = game.over()
    assert reply.outcome["prompt_token_ids"] == row.tokens[~row.in_response].tolist()
    assert reply.outcome["choices"][0]["token_ids"] == tiny_tokenizer("7").input_ids == row.response_tokens.tolist()


def test_a_client_may_put_the_stop_string_back(game):
    assert game.turn(USER, text="7x", stop=["x"])["content"] == "7"
    game.turn(USER, {"role": "assistant", "content": "7x"}, USER)
    assert game.over().further_rows == [[]]


def test_calls_reach_the_client_in_its_form(game):
    reply = game.ask(USER, tools=[TOOL])
    game.sample(*game.accept(), text="7", calls=[("add", {"a": 1})])
    (call,) = reply.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and call["id"].startswith("call_")
    assert reply.outcome["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    game.turn(USER, reply.message, result, tools=[TOOL])
    rows = game.over()
    assert rows.further_rows == [[]] and rows.call_counts[0, 0] == 1


def test_a_turn_beyond_the_budget_is_refused_and_truncates(game):
    reply = game.turn(USER, text="7" * 40)
    with refused("...data.max_response_length=60 leaves no token...", ProtocolError):
        game.turn(USER, reply, {"role": "user", "content": "1" * 30})
    rows = game.over()
    assert rows.truncated.tolist() == [True] and rows.response_lengths.tolist() == [40]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_assistant_turns": 1}, "...max_assistant_turns=1..."),
        ({"agent": {"max_rows": 1}}, "...max_rows=1...extends none..."),
    ],
)
def test_turns_and_histories_of_a_session_are_limited(small_config, tiny_tokenizer, options, error):
    game = Game(small_config, tiny_tokenizer, **options)
    game.turn(USER)
    with refused(error, ProtocolError):
        game.turn(OTHER)
    assert game.over().turns.tolist() == [1]


def test_messages_that_are_too_long_are_refused_untokenized(game):
    with refused("This model's maximum context length is 40 tokens: the messages have more", ProtocolError):
        game.turn({"role": "user", "content": "1" * 10_000_000})
    with refused("This model's maximum context length is 40 tokens: the history begins with ... tokens", ProtocolError):
        game.turn({"role": "user", "content": "1" * 60})


def test_an_agent_that_never_asks_has_one_token_and_no_turn(small_config, tiny_tokenizer):
    game = Game(small_config, tiny_tokenizer, num=2)
    game.ask(USER, session=1)
    game.end(0, failure="ValueError: no")
    assert game.accept() == [0, 1]
    assert game.running[0][1].max_tokens == [1] and game.running[0][1].prompt_ids == [[5, 6]]
    game.sample(0, 1)
    game.end(1, reward=2.0)
    game.accept()
    rows = game.sessions.over()
    rows = rows[rows.request.argsort()]
    assert rows.turns.tolist() == [0, 1] and rows.environment_rewards.tolist() == [0.0, 2.0]
    assert rows.call_counts[:, 2].tolist() == [1, 0]


def test_a_run_whose_agents_all_fail_at_once_ends(game):
    game.end(failure="ImportError: no module")
    game.sample(*game.accept())
    with refused("rollout.multi_turn.agent: every agent failed before it asked for a turn: ImportError..."):
        game.sessions.over()


def test_rounds_wait_for_every_agent_that_runs(small_config, tiny_tokenizer):
    game = Game(small_config, tiny_tokenizer, num=3, at_once=2)
    game.ask(USER, session=1)
    game.ask(USER, session=0)
    # Session 2 starts when another ends, so the round does not wait for it.
    assert game.accept(deterministic=True, wait=True) == [0, 1]
    game.sample(0, 1)
    game.end(1)
    game.ask(USER, session=2)
    game.end(0)
    assert game.accept(deterministic=True, wait=True) == [2]
    game.sample(2)
    game.end(2)
    assert game.accept(deterministic=True, wait=True) == [] and not game.left
    assert sorted(game.sessions.over().request.tolist()) == [0, 1, 2]


def test_a_silent_agent_ends_by_its_time_limit(small_config, tiny_tokenizer):
    game = Game(small_config, tiny_tokenizer, num=2, agent={"timeout_s": 0.2})
    game.begin(1)
    game.ask(USER, session=0)
    assert game.accept(deterministic=True, wait=True) == [0, 1]
    assert game.pool.closed == [1] and "not reproducible" in game.said[0]
    game.sample(0, 1)
    game.end(0)
    game.accept()
    rows = game.sessions.over()
    rows = rows[rows.request.argsort()]
    assert rows.call_counts[:, 3].tolist() == [0, 1] and rows.turns.tolist() == [1, 0]


def test_an_agent_that_repeats_refused_requests_ends(small_config, tiny_tokenizer):
    game = Game(small_config, tiny_tokenizer, agent={"timeout_s": 0.3}, max_assistant_turns=1)
    game.turn(USER)
    limit = time.monotonic() + 10
    while not game.pool.closed and time.monotonic() < limit:
        game.ask(OTHER)
        game.accept()
        time.sleep(0.01)
    rows = game.sessions.over()
    assert rows is not None and rows.call_counts[0, [2, 3]].tolist() == [0, 1] and rows.turns.tolist() == [1]


def test_agents_that_wait_for_each_other_are_sampled(small_config, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(sessions, "PATIENCE_S", 0.2)
    game = Game(small_config, tiny_tokenizer, num=2)
    game.ask(USER, session=0)
    # Session 1 asks once session 0 has its turn.
    assert game.accept(deterministic=True, wait=True) == [0]
    assert "the run is not reproducible" in game.said[0]


def test_a_request_that_fails_costs_itself_alone(game, monkeypatch):
    monkeypatch.setattr(sessions, "render_chat", lambda *_: [][0])
    with refused("IndexError: ...", ProtocolError):
        game.turn(USER)
    monkeypatch.undo()
    assert game.turn(USER)["content"] == "7" and "warning: a request" in game.said[0]


def test_the_run_is_checked_while_it_waits(game):
    def check() -> None:
        raise KeyboardInterrupt

    game.begin()
    with pytest.raises(KeyboardInterrupt):
        game.sessions.resume(game.queue, True, True, check)


def test_fields_that_the_run_replaces_are_noted_once(game):
    game.turn(USER, temperature=0.3, seed=1)
    game.turn(OTHER, temperature=0.3, seed=1)
    assert game.said == ["note: agents set temperature, seed; the run's own options apply"]


def test_rank_metrics_are_those_of_the_rows_last_asked(game):
    game.turn(USER)
    game.turn(OTHER)
    game.over()
    measured = Batch.of([[1]] * 2, [[1]] * 2).fill(request=torch.tensor([0, 1]), turns=torch.tensor([10, 11]))
    chosen = game.sessions.measured(measured)
    assert chosen.request.tolist() == [0] and chosen.turns.tolist() == [11]
