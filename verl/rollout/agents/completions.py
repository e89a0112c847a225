"""OpenAI's text completions protocol, in which agents write whole prompts as text or as token ids.

Replies have vLLM's ``token_ids``, with which a client extends a history by its exact tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from verl.rollout.agents.protocol import MODEL, expect, ignored_fields, read_sampling, refusal

UNSUPPORTED = {
    "echo": "the prompt is not repeated; its tokens are in prompt_token_ids",
    "suffix": "the policy writes what follows a prompt",
    "stream": "completions are not streamed; use chat completions",
}
"""Fields that are refused unless they are unset or false -> the reason or an alternative."""


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request to continue a prompt."""

    prompt: str | list[int]
    """Text, or token ids."""
    max_tokens: int | None
    """Maximum number of tokens of this turn, or None to allow the remaining response length."""
    stop: list[str]
    logprobs: bool
    ignored: tuple[str, ...]
    """Names of the request's fields that are ignored because the run's options apply."""


def read_completion_request(body: Any) -> CompletionRequest:
    """Parse and validate the JSON body of a request.

    Raises:
        ProtocolError: If the request is malformed, or asks for more than one completion of sampled tokens.
    """
    expect(isinstance(body, dict), "the body", "a JSON object")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    # The type of true is bool, which is a kind of int.
    is_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    expect(isinstance(prompt, str) or is_ids, "prompt", "text or a list of token ids, one prompt a request")
    for name, why in UNSUPPORTED.items():
        if body.get(name):
            raise refusal(name, why)
    logprobs = body.get("logprobs")
    readable = logprobs is None or (isinstance(logprobs, int) and 0 <= logprobs <= 1)
    expect(readable, "logprobs", "1 or 0; log-probabilities are those of the sampled tokens alone")
    max_tokens, stop = read_sampling(body)
    shows = logprobs is not None and logprobs is not False
    return CompletionRequest(prompt, max_tokens, stop, shows, ignored_fields(body))


def text_completion(
    identity: str,
    text: str,
    finish_reason: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[tuple[str, float]] | None,
) -> dict[str, Any]:
    """Return the body of a text completion.

    Args:
        identity: Unique name of the reply within its session, from which the id is derived.
        text: Text of the turn, without its stop string and special tokens.
        finish_reason: ``stop`` or ``length``.
        prompt: Token ids of the prompt.
        tokens: Token ids of the turn, including a token that ended it.
        logprobs: Text and log-probability of each token in nats, or None if the request does not ask for them.
    """
    shown = None
    if logprobs is not None:
        pieces = [piece for piece, _ in logprobs]
        shown = {
            "tokens": pieces,
            "token_logprobs": [value for _, value in logprobs],
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, pieces), initial=0))[:-1],
        }
    ids = {"token_ids": list(tokens), "prompt_token_ids": list(prompt)}
    return {
        "id": f"cmpl-{identity}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "text": text, "logprobs": shown, "finish_reason": finish_reason, **ids}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
        },
    }
