"""Requests and replies of OpenAI's chat completions."""

import json

import pytest

from tests.kit import refused
from tests.tables import refusals
from verl.rollout.agents.completions import read_completion_request
from verl.rollout.agents.protocol import ProtocolError, completion, read_request, same_message, stream_events
from verl.rollout.agents.responses import chat_body, response_body


def nested(levels: int) -> dict:
    return {"a": nested(levels - 1)} if levels else {}


HELLO = {"role": "user", "content": "hello"}


READERS = {
    "chat": lambda fields: read_request({"messages": [HELLO]} | fields),
    "completion": read_completion_request,
    "response": lambda fields: read_request(chat_body({"input": "hello"} | fields)),
}


@pytest.mark.parametrize(("protocol", "fields", "line"), refusals("rollout/refusals.txt", "requests"))
def test_request_that_cannot_be_answered_is_refused(protocol: str, fields: str, line: str):
    with refused(line, ProtocolError):
        READERS[protocol](eval(fields, {"nested": nested}))


def test_clients_may_send_defaults_and_sampling_options():
    defaults = {"logit_bias": {}, "min_tokens": 0, "ignore_eos": False, "guided_json": None, "top_logprobs": 0, "n": 1}
    request = read_request({"messages": [HELLO], "temperature": 0.1, "repetition_penalty": 1.1} | defaults)
    assert request.ignored == ("temperature", "repetition_penalty")


def test_arguments_of_any_kind_are_read():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}
    assert read_request({"messages": [call]}).messages[0]["tool_calls"][0]["function"]["arguments"] == "5"


def test_forms_of_one_message_are_the_same():
    message = read_request({"messages": [{"role": "developer", "content": [{"type": "text", "text": "a\ud800"}]}]})
    assert message.messages == [{"role": "system", "content": "a?"}]
    arguments = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": 1, "b": 2}', '{"b":2,"a":1}')]
    calls = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in arguments]
    first, second = read_request({"messages": calls}).messages
    assert same_message(first, second)
    assert not same_message(first, first | {"tool_calls": []})


def test_a_stream_holds_the_whole_reply():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": "so", "tool_calls": [call]}
    whole = completion("0-1", message, "stop", (3, 2), [("so", -1.0)], ([5, 6, 7], [8, 9]))
    said, end, usage, done = stream_events(whole, include_usage=True)
    delta = json.loads(said)["choices"][0]["delta"]
    assert json.loads(said)["prompt_token_ids"] == [5, 6, 7] and json.loads(said)["choices"][0]["token_ids"] == [8, 9]
    assert delta["content"] == "so" and delta["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert json.loads(end)["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(usage)["usage"]["total_tokens"] == 5 and done == "[DONE]"


def test_responses_are_chat_completions_in_other_words():
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": '{"a": 1}'} for i in range(2)]
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "hello"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            *calls,
            {"type": "function_call_output", "call_id": "c0", "output": "5"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        "max_output_tokens": 7,
    }
    request = read_request(chat_body(body))
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool"]
    assert len(request.messages[2]["tool_calls"]) == 2 and request.max_tokens == 7
    assert request.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    message = {"role": "assistant", "content": "so", "tool_calls": request.messages[2]["tool_calls"][:1]}
    response = response_body(completion("0-1", message, "stop", (3, 2), None))
    said, call = response["output"]
    assert said["content"][0]["text"] == "so" and call["arguments"] == '{"a": 1}' and response["status"] == "completed"
    # What a client sends back is what the row holds.
    again = read_request(chat_body({"input": [*body["input"][:1], said, call]}))
    assert same_message(again.messages[1], message)
