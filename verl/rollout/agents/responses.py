"""Conversion between OpenAI's responses API, the default of openai-agents, and chat completions."""

import time
from collections.abc import Mapping
from typing import Any

from verl.rollout.agents.protocol import IGNORED, MODEL, REFUSED, ProtocolError


def chat_body(body: Any) -> Any:
    """Convert the body of a ``/responses`` request to the body of a chat completion request.

    Raises:
        ProtocolError: If the request needs a stateful server, streaming, or tools that the server runs itself.
    """
    if not isinstance(body, Mapping):
        return body
    for name in ("previous_response_id", "conversation", "background", "prompt", "stream"):
        if body.get(name):
            raise ProtocolError(400, "unsupported", f"{name}: send the whole input with every request, without streams")
    form = body.get("text")
    asked = form.get("format") if isinstance(form, Mapping) else None
    messages: list[Any] = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    items = body.get("input")
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items or []:
        _append(messages, item)
    return {
        "messages": messages,
        "tools": [_tool(tool) for tool in body.get("tools") or []],
        "tool_choice": body.get("tool_choice"),
        "max_tokens": body.get("max_output_tokens"),
        "response_format": asked,
        **{name: body.get(name) for name in (*IGNORED, *REFUSED)},
    }


def _append(messages: list[Any], item: Any) -> None:
    """Append an input item to ``messages``. Tool calls are added to the preceding assistant message."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        last.setdefault("tool_calls", []).append({"type": "function", "function": item})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": item.get("output")})
    else:
        raise ProtocolError(400, "unsupported", f"input: items of type {kind!r:.40} are not read")


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ProtocolError(400, "unsupported", "tools: only functions; the run has no tools of its own")
    return {
        "type": "function",
        "function": {k: v for k, v in tool.items() if k in ("name", "description", "parameters")},
    }


def response_body(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to the body of a response."""
    choice, usage, identity = whole["choices"][0], whole["usage"], whole["id"].removeprefix("chatcmpl-")
    message, cut = choice["message"], choice["finish_reason"] == "length"
    output: list[dict[str, Any]] = []
    if message["content"]:
        said = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        about = {"id": f"msg_{identity}", "role": "assistant", "status": "incomplete" if cut else "completed"}
        output.append({"type": "message", **about, "content": [said]})
    for call in message.get("tool_calls", []):
        ids = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        output.append({"type": "function_call", **ids, **call["function"]})
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
