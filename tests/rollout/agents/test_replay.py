"""Sessions that are carried over to further calls of the engines, where their agents run again from the first turn."""

import json
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from tests.rollout.agents.test_sessions import OTHER, USER, Game, Reply
from verl.batch import POLICY, Batch
from verl.batch.state import batch_from_state, batch_state
from verl.rollout.agents.sessions import Sessions
from verl.rollout.queue import EngineCapacity, RequestQueue
from verl.trainer.ppo.open_groups import OpenGroups
from verl.trainer.ppo.partial_rollouts import restore_columns
from verl.utils.json_state import from_json, to_json

MORE = {"role": "user", "content": "1+1="}
SAID = {"role": "assistant", "content": "7"}


class Carried(Game):
    """Sessions in several calls of the engines."""

    def __init__(self, *arguments: Any, num: int = 1, **options: Any) -> None:
        super().__init__(*arguments, num=num, **options)
        groups = OpenGroups(1, num, 1)
        groups.admit(self.records, 1, 17, True)
        assert groups.open is not None
        self.begin_call(groups.open)

    def begin_call(self, before: Batch) -> None:
        self.before, self.pool.endpoint.events = before, SimpleQueue()
        self.stopped = list[tuple[Any, Any]]()
        self.pool.endpoint.stop = lambda *stopped: self.stopped.append(stopped)
        self.sessions = Sessions(self.sessions.setup, before.records, before)
        self.queue = RequestQueue(0, [EngineCapacity(99, 99)])
        streams = before.stream.tolist()
        self.requests = replace(
            self.requests, rows=range(len(before)), streams=streams, prompt_ids=[[5, 6]] * len(streams)
        )

    def carry_over(self, *numbers: int, text: str = "") -> list[Reply]:
        """End the call, with ``text`` of each turn that is being sampled; continue from a checkpoint of its rows.

        Returns the replies that the sessions ``numbers`` still waited for.
        """
        for place in list(self.running):
            self.sessions.update(self.part(place, text))
        rows = restore_columns([self.sessions.rows(numbers or [0])], self.before)
        ((closed, replies),) = self.stopped
        assert rows is not None and list(closed) == [*(numbers or [0])]
        state = json.loads(json.dumps(to_json(batch_state(rows.without("request"), self.records))))
        self.version += 1
        self.begin_call(batch_from_state(from_json(state), self.records))
        return replies

    def replayed(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Ask for a turn that must be answered without an engine."""
        reply = self.ask(*messages, **fields)
        assert self.accept() == []
        return reply.message


@pytest.fixture
def carried(small_config, tiny_tokenizer) -> Carried:
    return Carried(small_config, tiny_tokenizer)


@pytest.fixture
def unbroken(small_config, tiny_tokenizer) -> Game:
    """The same session in a single call."""
    return Game(small_config, tiny_tokenizer)


def assert_same(rows: Batch, expected: Batch) -> None:
    """The rows of a session, whatever the versions that sampled them."""
    for name in ("tokens", "source", "truncated", "turns", "call_counts", "opened_by"):
        ours, theirs = getattr(rows, name), getattr(expected, name)
        assert ours == theirs if isinstance(ours, list) else ours.equal(theirs), name
    drop = [
        [{n: v for n, v in row.items() if n != "rollout_logprobs"} for row in part.further_rows[0]]
        for part in (rows, expected)
    ]
    assert drop[0] == drop[1]


def test_recorded_turns_answer_an_agent_that_runs_again(carried, unbroken):
    first = unbroken.turn(USER)
    unbroken.turn(USER, first, MORE, text="78", max_tokens=3)
    expected = unbroken.over()
    # The second turn has been requested, and nothing of it was sampled.
    assert carried.turn(USER) == first
    asked = carried.ask(USER, first, MORE, max_tokens=3)
    carried.accept()
    assert carried.carry_over() == [asked]
    assert carried.before.response_tokens.tolist() == carried.sessions._sessions[0].recorded[None].tokens
    # The first turn is answered by the record, and half of the second is sampled.
    assert carried.replayed(USER) == first
    carried.ask(USER, first, MORE, max_tokens=3)
    assert carried.accept() == [0] and carried.running[0][1].max_tokens == [3]
    carried.carry_over(text="7")
    # The second turn continues in the third call.
    assert carried.replayed(USER, logprobs=True) == first
    carried.ask(USER, first, MORE, max_tokens=3)
    assert carried.accept() == [0] and carried.running[0][1].max_tokens == [2]
    carried.sample(0, text="8")
    rows = carried.over()
    assert_same(rows, expected)
    of_policy = rows.source == POLICY
    assert rows.version[of_policy].tolist() == [0, 1, 2]
    assert rows.rollout_logprobs[of_policy].tolist() == [-1.0, -2.0, -3.0]
    assert not carried.said


def test_further_histories_are_carried_over(carried, unbroken):
    for either in (unbroken, carried):
        either.turn(USER)
        either.turn(OTHER, text="33")
        either.turn(OTHER)
    unbroken.turn(USER, SAID, MORE, text="2")
    streams = [carried.sessions._rows[place].stream(5) for place in range(3)]
    carried.ask(USER, SAID, MORE)
    carried.accept()
    carried.carry_over()
    for messages, text in (([USER], "7"), ([OTHER], "33"), ([OTHER], "7")):
        assert carried.replayed(*messages)["content"] == text
    assert [carried.sessions._rows[place].stream(5) for place in range(3)] == streams
    carried.turn(USER, SAID, MORE, text="2")
    assert_same(carried.over(), unbroken.over())
    assert not carried.said


def test_parallel_histories_keep_order_ids_and_reasons(carried, unbroken):
    def ask(game: Game) -> list[Reply]:
        return [game.ask(USER), game.ask(USER), game.ask(OTHER)]

    for either in (unbroken, carried):
        first = ask(either)
        places = either.accept()
        either.sample(*reversed(places))
    ids = [reply.outcome["id"] for reply in first]
    carried.carry_over()
    again = ask(carried)
    assert carried.accept() == [] and [reply.outcome["id"] for reply in again] == ids
    expected = unbroken.over()
    carried.end()
    # The history that was answered last still stands for the session.
    assert carried.accept() == [0]
    carried.sample(0)
    rows = carried.sessions.over()
    assert rows is not None
    assert_same(rows, expected)
    assert [row["why"] for row in rows.further_rows[0]] == ["parallel", "other"]


@pytest.mark.parametrize(
    ("messages", "fields", "what"),
    [
        ([USER, SAID, {**MORE, "content": "1*1="}], {}, "a request has '*1=<|im_end|><|assistant|>' where it had '+1="),
        ([USER, SAID, MORE], {"max_tokens": 4}, "a request has another max_tokens or stop"),
        ([MORE], {}, "a request has '1+1="),
    ],
)
def test_a_different_request_ends_the_replay(carried, messages, fields, what):
    carried.turn(USER)
    carried.turn(USER, SAID, MORE, text="2")
    carried.turn(USER, SAID, MORE, {"role": "assistant", "content": "2"}, MORE, text="5")
    carried.carry_over()
    if len(messages) > 1:
        carried.replayed(USER)
    assert carried.turn(*messages, text="9", **fields)["content"] == "9"
    # Nothing that was recorded answers from there on.
    carried.ask(*messages, {"role": "assistant", "content": "9"}, MORE)
    assert len(carried.accept()) == 1
    assert carried.said[0].startswith(f"note: m.py:agent: a session of prompt 0 was played again and differed: {what}")


def test_differences_are_counted_in_every_call(carried):
    for call in range(3):
        carried.ask({**USER, "content": f"{call}"})
        (place,) = carried.accept()
        if call < 2:
            carried.carry_over(text="7")
    carried.sample(place)
    rows = carried.over()
    assert rows.call_counts[0, 4] == 2 and rows.turns.tolist() == [1] and rows.version.tolist() == [2]
    assert len(carried.said) == 1


def test_a_session_that_ends_earlier_is_read_again(carried):
    carried.turn(USER, text="78")
    carried.ask(USER, {"role": "assistant", "content": "78"}, MORE)
    carried.accept()
    carried.carry_over(text="5")
    carried.replayed(USER)
    carried.end(reward=2.0)
    # An engine reads the history without its last token, whose own state predicts nothing.
    assert carried.accept() == [0]
    sent, request = carried.running[0]
    seventy_eight = carried.tokenizer("78").input_ids
    assert sent.response_tokens.tolist() == seventy_eight[:-1] and request.max_tokens == [1]
    carried.sample(0, text="3")
    rows = carried.sessions.over()
    assert rows.response_tokens.tolist() == seventy_eight and rows.environment_rewards.tolist() == [2.0]
    assert rows.version.tolist() == [0, 0] and rows.turns.tolist() == [1] and rows.call_counts[0, 4] == 1
    assert "differed: a recorded request was not repeated" in carried.said[0]


def test_a_record_outlives_calls_in_which_its_agent_is_silent(carried):
    carried.turn(USER)
    carried.turn(OTHER, text="33")
    carried.carry_over()
    carried.carry_over()
    assert carried.replayed(USER)["content"] == "7"
    carried.carry_over()
    assert carried.replayed(USER)["content"] == "7" and carried.replayed(OTHER)["content"] == "33"


def test_rounds_wait_for_agents_that_are_replayed(small_config, tiny_tokenizer):
    game = Carried(small_config, tiny_tokenizer, num=2)
    game.turn(USER, session=1)
    game.turn(USER, SAID, MORE, session=1)
    game.ask(USER, SAID, MORE, SAID, MORE, session=1)
    game.ask(USER, session=0)
    game.accept()
    game.carry_over(0, 1)
    asked = [[USER, SAID, MORE, SAID, MORE], [USER, SAID, MORE], [USER]]

    def go_on(_: object = None) -> None:
        if asked:
            game.ask(*asked.pop(), session=1).add_done_callback(go_on)

    go_on()
    game.ask(USER, session=0)
    assert game.accept(deterministic=True, wait=True) == [0, 1] and not asked
    assert not game.left  # an engine has all there is to do


def test_agents_that_fail_in_a_replay_end_no_run(carried):
    carried.turn(USER)
    carried.carry_over()
    carried.end(failure="ConnectionError: the agent's own server")
    carried.sample(*carried.accept())
    rows = carried.sessions.over()
    assert rows.turns.tolist() == [0] and rows.call_counts[0, [2, 4]].tolist() == [1, 1]
