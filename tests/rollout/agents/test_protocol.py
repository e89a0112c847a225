"""Requests and replies of OpenAI's chat completions."""

import json

import pytest

from tests.kit import refused
from verl.rollout.agents.completions import read_completion_request
from verl.rollout.agents.protocol import ProtocolError, completion, read_request, same_message, stream_events
from verl.rollout.agents.responses import chat_body, response_body


def nested(levels: int) -> dict:
    return {"a": nested(levels - 1)} if levels else {}


HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"messages": []}, "messages: expected a list of at least one message"),
        ({"messages": ["hello"]}, "messages: expected objects"),
        ({"messages": [{"content": "hello"}]}, "messages: expected a role in each"),
        ({"messages": [{"role": "user", "content": 5}]}, "content: expected text..."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content: expected text; the policy reads neither images nor sound",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls: expected functions with a name"),
        ({"n": 2}, "n: one completion a request..."),
        ({"response_format": {"type": "json_object"}}, "response_format: constrained decoding..."),
        ({"logit_bias": {"7": -100}}, "logit_bias: constrained decoding..."),
        ({"guided_json": {}}, "guided_json: constrained decoding..."),
        ({"guided_choice": ["yes", "no"]}, "guided_choice: constrained decoding..."),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "structured_outputs: constrained decoding..."),
        ({"min_tokens": 5}, "min_tokens: constrained decoding..."),
        ({"regex": "[0-9]+"}, "regex: constrained decoding..."),
        ({"stop_token_ids": [5]}, "stop_token_ids: turns end by the run's tokens..."),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens: the policy reads whole prompts..."),
        ({"chat_template": "{{ messages }}"}, "chat_template: prompts are written by the run's template"),
        ({"add_generation_prompt": False}, "add_generation_prompt: a turn of the policy begins after the messages..."),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs: only sampled tokens..."),
        ({"continue_final_message": True}, "continue_final_message: a chat turn begins..."),
        ({"tool_choice": "required"}, "tool_choice: a call that is forced is not the policy's own..."),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice: ..."),
        ({"functions": [{}]}, "functions: use tools"),
        ({"max_tokens": 0}, "max_tokens: expected a positive number"),
        ({"max_tokens": True}, "max_tokens: expected a positive number"),
        ({"stop": [""]}, "stop: expected texts"),
        ({"tools": [{"type": "function"}]}, "tools: expected functions with a name..."),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": ["a"]}}]},
            "tools: expected parameters...",
        ),
        ({"tools": [nested(90)]}, "the body: expected a JSON object of 64 levels at most"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(fields, error):
    with refused(error, ProtocolError):
        read_request({"messages": [HELLO]} | fields)


def test_every_protocol_refuses_constrained_decoding():
    fields = {"guided_regex": "[0-9]+"}
    for read in (
        lambda: read_request(chat_body({"input": "hello"} | fields)),
        lambda: read_completion_request({"prompt": "hello"} | fields),
    ):
        with refused("guided_regex: constrained decoding...", ProtocolError):
            read()


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
    for item in (
        {"previous_response_id": "x"},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "reasoning"}]},
    ):
        with refused("...: ...", ProtocolError):
            chat_body({"input": "hello"} | item)
