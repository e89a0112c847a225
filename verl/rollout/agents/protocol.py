"""OpenAI's chat completions protocol: parsing of agents' requests, and replies in the format of OpenAI's API."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.rollout.environments.tools import DEEPEST, Call, nests, read_arguments

Message = dict[str, Any]
"""Message with ``role``, ``content`` as text, and optionally ``tool_calls`` whose arguments are mappings."""

MODEL = "policy"
"""Name of the policy in replies; the name in requests is ignored."""

IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "reasoning_effort",
    "chat_template_kwargs",
    "length_penalty",
    "parallel_tool_calls",
    "verbosity",
    "reasoning",
)
"""Request fields that the run's options override."""

CONSTRAINED = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "structured_outputs",
    "structural_tag",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "logits_processors",
    "use_beam_search",
)
"""Request fields of OpenAI, vLLM and SGLang that change which tokens can be sampled."""

REFUSED = {
    **dict.fromkeys(CONSTRAINED, "constrained decoding would sample another distribution than the policy's"),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs"), "only sampled tokens have log-probabilities; use logprobs"),
    "stop_token_ids": "turns end by the run's tokens; use stop",
    **dict.fromkeys(("chat_template", "documents"), "prompts are written by the run's template"),
    "truncate_prompt_tokens": "the policy reads whole prompts; send a shorter one",
    "continue_final_message": "a chat turn begins after the messages; continue a text with text completions",
}
"""Request fields that are refused unless they are unset, false, zero or empty -> the reason or an alternative."""


class ProtocolError(Exception):
    """Error reply of the protocol.

    Args:
        status: HTTP status.
        code: Value of ``error.code``, such as ``context_length_exceeded``.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the reply."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A validated request for one turn."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    """Maximum number of tokens in this turn, or None to allow the remaining response length."""
    stop: list[str]
    stream: bool
    include_usage: bool
    """Whether the last event of a stream contains the ``usage``."""
    logprobs: bool
    token_ids: bool
    """Whether the reply contains the token ids of the prompt and of the turn, as vLLM's does."""
    ignored: tuple[str, ...]
    """Names of request fields that are ignored in favor of the run's options."""


def read_request(body: Any) -> ChatRequest:
    """Parse and validate the JSON body of a request.

    Raises:
        ProtocolError: If the request is malformed, or requires a distribution that the trainer does not sample from.
    """
    expect(
        isinstance(body, dict) and not nests(body, DEEPEST), "the body", f"a JSON object of {DEEPEST} levels at most"
    )
    messages, tools = body.get("messages"), body.get("tools") or []
    expect(isinstance(messages, list) and messages, "messages", "a list of at least one message")
    expect(isinstance(tools, list), "tools", "a list")
    for tool in tools:
        function: Any = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        expect(named, "tools", "functions with a name, {'type': 'function', 'function': {'name': ...}}")
        parameters = function.get("parameters") or {}
        described = isinstance(parameters, dict) and isinstance(parameters.get("properties") or {}, dict)
        expect(described, "tools", "parameters as a JSON schema, {'type': 'object', 'properties': {...}}")
    if body.get("functions") or body.get("function_call"):
        raise refusal("functions", "use tools")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise refusal("tool_choice", "a call that is forced is not the policy's own; use 'auto' or 'none'")
    max_tokens, stop = read_sampling(body)
    stream_options = body.get("stream_options")
    return ChatRequest(
        messages=[_message(message) for message in messages],
        tools=[] if choice == "none" else tools,
        max_tokens=max_tokens,
        stop=stop,
        stream=body.get("stream") is True,
        include_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        logprobs=body.get("logprobs") is True,
        token_ids=body.get("return_token_ids") is True,
        ignored=ignored_fields(body),
    )


def read_sampling(body: Mapping[str, Any]) -> tuple[int | None, list[str]]:
    """Return the maximum number of tokens of a request's turn, if it has one, and its stop strings.

    Raises:
        ProtocolError: If one of them is malformed, or the request asks for several or for constrained completions.
    """
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise refusal(name, "one completion a request; send the request again for another")
    for name, why in REFUSED.items():
        if body.get(name) or (body.get(name) == {} and name.startswith("guided")):
            raise refusal(name, why)
    if body.get("add_generation_prompt") is False:
        raise refusal("add_generation_prompt", "a turn of the policy begins after the messages; leave it out")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise refusal("response_format", REFUSED["guided_json"])
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    for limit in limits:
        expect(isinstance(limit, int) and not isinstance(limit, bool) and limit > 0, "max_tokens", "a positive number")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    expect(isinstance(stop, list) and all(isinstance(s, str) and s for s in stop) and len(stop) <= 16, "stop", "texts")
    return min(limits, default=None), stop


def ignored_fields(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a request's fields that the run's options override."""
    return tuple(name for name in IGNORED if body.get(name) is not None)


def expect(condition: object, field: str, expected: str) -> None:
    """Raise ``ProtocolError`` unless ``condition`` holds."""
    if not condition:
        raise ProtocolError(400, "invalid_request", f"{field}: expected {expected}")


def refusal(field: str, why: str) -> ProtocolError:
    """Return the error for a field that a run cannot honour."""
    return ProtocolError(400, "unsupported", f"{field}: {why}")


def no_room(max_tokens: int, why: str) -> ProtocolError:
    """Return the error for a history that is too long, in OpenAI's words, by which clients recognize it."""
    message = f"This model's maximum context length is {max_tokens} tokens: {why}"
    return ProtocolError(400, "context_length_exceeded", message)


def _message(message: Any) -> Message:
    expect(isinstance(message, dict), "messages", "objects")
    role = message.get("role")
    expect(isinstance(role, str) and role, "messages", "a role in each")
    read: Message = {"role": "system" if role == "developer" else role, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        expect(isinstance(calls, list), "tool_calls", "a list")
        read["tool_calls"] = [_call(call) for call in calls]
    # Keep the tool's name, which the template may show, but not call ids, which mean nothing to the policy.
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    return read


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        for part in content:
            is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
            expect(is_text, "content", "text; the policy reads neither images nor sound")
        content = "".join(part["text"] for part in content)
    expect(isinstance(content, str), "content", "text, or a list of parts of text")
    # Half of a surrogate pair, which JSON can write and tokenizers cannot encode, becomes a question mark.
    return str(content).encode(errors="replace").decode()


def _call(call: Any) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    expect(named, "tool_calls", "functions with a name")
    arguments = read_arguments(function.get("arguments") or {})
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def same_message(ours: Message, theirs: Message) -> bool:
    """Return whether two messages are equivalent. Clients may strip whitespace and drop unknown fields.

    ``ours["whole"]`` is the message text including the stop string that ended it, which some clients restore.
    """
    forms = [ours, ours | {"content": ours["whole"]}] if "whole" in ours else [ours]
    return _identity(theirs) in map(_identity, forms)


def _identity(message: Message) -> tuple[Any, ...]:
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], message["content"].strip(), calls


def assistant_message(content: str, calls: Sequence[Call]) -> Message:
    """Return a policy turn as an assistant message."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return message


def completion(
    identity: str,
    message: Message,
    finish_reason: str,
    num_tokens: tuple[int, int],
    logprobs: Sequence[tuple[str, float]] | None,
    token_ids: tuple[Sequence[int], Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return the body of a chat completion.

    Args:
        identity: Unique name of the reply within its session, from which ids are derived.
        finish_reason: ``stop`` or ``length``. For a message with tool calls, ``stop`` becomes ``tool_calls``.
        num_tokens: Number of tokens of the prompt and of the completion.
        logprobs: Text and log-probability of each token in nats, or None if the request does not ask for them.
        token_ids: Token ids of the prompt and of the turn, or None if the request does not ask for them.
    """
    said: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    if calls := message.get("tool_calls"):
        said["content"] = message["content"] or None
        said["tool_calls"] = [
            {
                "id": f"call_{identity}_{i}",
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _as_text(call["function"]["arguments"])},
            }
            for i, call in enumerate(calls)
        ]
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    shown = None
    if logprobs is not None:
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
            for token, value in logprobs
        ]
        shown = {"content": content, "refusal": None}
    prompt, new = num_tokens
    choice = {"index": 0, "message": said, "logprobs": shown, "finish_reason": finish_reason}
    whole = {
        "id": f"chatcmpl-{identity}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
    }
    if token_ids is not None:
        whole["prompt_token_ids"], choice["token_ids"] = map(list, token_ids)
    return whole


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def stream_events(whole: Mapping[str, Any], include_usage: bool) -> list[str]:
    """Return a completion as server-sent event data: the whole message, the end, and ``[DONE]``."""
    choice = whole["choices"][0]
    delta = {name: value for name, value in choice["message"].items() if name != "refusal"}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    said = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    said |= {name: choice[name] for name in ("token_ids",) if name in choice}
    prompt = {name: whole[name] for name in ("prompt_token_ids",) if name in whole}
    end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    events = [head | prompt | {"choices": [said]}, head | {"choices": [end]}]
    if include_usage:
        events.append(head | {"choices": [], "usage": whole["usage"]})
    return [*(json.dumps(event) for event in events), "[DONE]"]
