"""Text completions of agents: prompts as token ids, and the rows that they continue."""

from typing import Any

import pytest

from tests.kit import refused
from tests.rollout.agents.test_sessions import USER, Game, Reply
from verl.batch import ENVIRONMENT, POLICY
from verl.rollout.agents.completions import read_completion_request
from verl.rollout.agents.endpoint import Asked
from verl.rollout.agents.protocol import ProtocolError


@pytest.fixture
def game(small_config, tiny_tokenizer) -> Game:
    return Game(small_config, tiny_tokenizer)


def ask(game: Game, prompt: Any, **fields: Any) -> Reply:
    reply = Reply()
    request = read_completion_request({"prompt": prompt, **fields})
    game.pool.endpoint.events.put(Asked(0, request, reply))
    return reply


def complete(game: Game, prompt: Any, text: str = "7", **fields: Any) -> dict[str, Any]:
    """Ask for one turn and return the choice, whichever row it continued."""
    reply = ask(game, prompt, **fields)
    game.sample(*game.accept(), text=text)
    return reply.outcome["choices"][0]


def test_exact_tokens_continue_their_row(game):
    first = complete(game, [5, 6])
    assert first["prompt_token_ids"] == [5, 6] and first["token_ids"] == game.tokenizer("7").input_ids
    said = [*first["prompt_token_ids"], *first["token_ids"]]
    second = complete(game, [*said, 8, 9], text="33")
    assert second["prompt_token_ids"] == [*said, 8, 9] and second["text"] == "33"
    # Without new tokens, the policy continues its turn.
    third = complete(game, [*second["prompt_token_ids"], *second["token_ids"]], text="2")
    assert third["text"] == "2"
    rows = game.over()
    seven, threes, two = (game.tokenizer(text).input_ids for text in ("7", "33", "2"))
    assert (
        rows.tokens[~rows.in_response].tolist() == [5, 6] and rows.further_rows == [[]] and rows.turns.tolist() == [3]
    )
    assert rows.response_tokens.tolist() == [*seven, 8, 9, *threes, *two]
    policy = [POLICY] * (len(threes) + len(two))
    assert rows.source.tolist() == [*[POLICY] * len(seven), ENVIRONMENT, ENVIRONMENT, *policy]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ([5, 6], "repeated"),
        ([5], "repeated"),
        ([6, 5, 7], "other"),
        ([5, 6, "reply", 8, "reply", 1], "edited"),
        ([5, 6, 1, 1], "assistant"),
    ],
)
def test_other_tokens_open_a_further_row(game, second, why):
    (reply,) = complete(game, [5, 6])["token_ids"]
    complete(game, [5, 6, reply, 9])
    complete(game, [reply if token == "reply" else token for token in second], text="33")
    rows = game.over()
    assert rows.opened_by == [why] and rows.response_tokens.tolist() == game.tokenizer("33").input_ids
    assert len(rows.further_rows[0]) == 1


def test_the_longest_row_is_continued(game):
    first = complete(game, [5, 6])["token_ids"]
    complete(game, [5, 6, 1], text="8")
    whole = [5, 6, 1, *complete(game, [5, 6, 1], text="9")["token_ids"]]
    complete(game, [*whole, 4])
    (further,) = ({row["why"] for row in rows} for rows in game.over().further_rows)
    assert further == {"", "assistant"} and first


def test_a_row_is_continued_while_one_with_its_tokens_is_sampled(game):
    (token,) = complete(game, [5, 6])["token_ids"]
    complete(game, [5, 6])
    for prompt in ([5, 6, token, 8], [5, 6, token, 8]):
        ask(game, prompt)
    game.sample(*game.accept())
    rows = game.over()
    assert [row["tokens"] for row in rows.further_rows[0]] == [[token, 8, token]] == [rows.response_tokens.tolist()]


def test_text_is_tokenized_and_chats_stay_apart(game, tiny_tokenizer):
    choice = complete(game, "2+3=")
    assert choice["prompt_token_ids"] == tiny_tokenizer("2+3=").input_ids
    message = game.turn(USER)
    chat = tiny_tokenizer("<|user|>2+3=<|im_end|><|assistant|>7").input_ids
    complete(game, [*chat, 8])
    # Its tokens are no messages any more.
    game.turn(USER, message, USER)
    rows = game.over()
    assert rows.opened_by == ["other"] and [row["why"] for row in rows.further_rows[0]] == ["", "other"]
    assert rows.further_rows[0][1]["tokens"] == [*tiny_tokenizer("7").input_ids, 8, *tiny_tokenizer("7").input_ids]


def test_replies_have_usage_stops_and_logprobs(game):
    reply = ask(game, [5, 6], logprobs=1, stop=";", max_tokens=9)
    (place,) = game.accept()
    _, request = game.running[place]
    assert request.max_tokens == [9] and request.stop == [[";"]]
    game.sample(place, text="12;", truncated=True)
    (choice,), tokens = reply.outcome["choices"], game.tokenizer("12;").input_ids
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("12", "length", tokens)
    assert choice["logprobs"]["token_logprobs"] == [-1.0] * len(tokens)
    assert "".join(choice["logprobs"]["tokens"]) == "12;" and choice["logprobs"]["text_offset"][0] == 0
    assert reply.outcome["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": len(tokens),
        "total_tokens": 2 + len(tokens),
    }
    assert complete(game, [1])["logprobs"] is None


def test_tokens_that_do_not_fit_are_refused(game):
    size = len(game.tokenizer)
    for prompt, message in (
        ([size], f"prompt: expected at least one token, with ids below {size}"),
        ("", f"prompt: expected at least one token, with ids below {size}"),
        ([1] * 41, "This model's maximum context length is 40 tokens: the history begins with 41 tokens"),
        ([1] * 101, "This model's maximum context length is 100 tokens: the prompt has more"),
        ("1" * 7000, "This model's maximum context length is 100 tokens: the prompt has more"),
    ):
        reply = ask(game, prompt)
        assert game.accept() == []
        with refused(message, ProtocolError):
            _ = reply.outcome
    first = complete(game, [1] * 40)["token_ids"]
    reply = ask(game, [*[1] * 40, *first, *[2] * 59])
    assert game.accept() == []
    with refused("...data.max_response_length=60 leaves no token for a further turn", ProtocolError):
        _ = reply.outcome


def test_one_prompt_may_be_in_a_list():
    assert [read_completion_request({"prompt": [prompt]}).prompt for prompt in ("a", [1, 2])] == ["a", [1, 2]]
