"""Requests that resume a response of an earlier request, under the same weights or newer ones.

The prompt of such a request is all tokens so far; ``SamplingParams.extra_args`` says how many at its end belong to the
response. The engine computes them again, so that all hidden states of the response are of the weights that it ends
with, and it counts them: stop strings, outputs and hidden states see one response.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm import SamplingParams

KEY, READ = "resumed_tokens", "read_tokens"
"""Names in ``extra_args``."""


class CutResponse(NamedTuple):
    """A response that was cut."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    """All so far."""
    logprobs: Sequence[Any]
    """vLLM's, of the last of these tokens: those that the cut request sampled."""


def cut(engine: Any) -> list[CutResponse]:
    """Abort every unfinished request of an engine in this process, and release their hidden states.

    Returns:
        Their responses so far, in the order in which the requests were added.
    """
    states = engine.output_processor.request_states
    found = [
        CutResponse(
            state.external_req_id,
            list(state.prompt_token_ids),
            list(state.detokenizer.output_token_ids),
            state.logprobs_processor.logprobs or [],
        )
        for state in states.values()
    ]
    engine.abort_request(list(states), internal=True)
    return found


def resume_args(num_tokens: int, num_read: int | None = None) -> dict[str, int]:
    """Return ``extra_args`` of a request whose prompt ends with ``num_tokens`` tokens of the response.

    ``num_read``: tokens at the end of the prompt, at least as many, whose hidden states are wanted too, in front of the
    response's: those of earlier turns of a conversation; None: of no others.
    """
    return {KEY: num_tokens, READ: num_tokens if num_read is None else num_read}


def num_resumed(params: SamplingParams | None) -> int:
    """Return the number of prompt tokens that belong to the response; 0 for an ordinary request."""
    return 0 if params is None or params.extra_args is None else int(params.extra_args.get(KEY, 0))


def num_read(params: SamplingParams | None) -> int:
    """Return the number of tokens at the end of the prompt whose hidden states are wanted with the response's."""
    return 0 if params is None or params.extra_args is None else int(params.extra_args.get(READ, num_resumed(params)))


def restore_response(state: Any, request: Any, tokenizer: Any) -> None:
    """Restore the response so far in the front end's ``state`` of a new request.

    Relies on the detokenizer holding the response's tokens, its text, and what of it was searched for stop strings.
    """
    num = num_resumed(request.sampling_params)
    if not num:
        return
    prompt, begun = request.prompt_token_ids[:-num], request.prompt_token_ids[-num:]
    whole, request.prompt_token_ids = request.prompt_token_ids, prompt
    try:
        tokenizer = tokenizer if request.sampling_params.detokenize else None
        state.detokenizer = type(state.detokenizer).from_new_request(tokenizer, request)
    finally:
        request.prompt_token_ids = whole
    state.detokenizer.update(begun, False)
    state.prompt_token_ids = prompt
