"""Requests that continue the response of an earlier request, with the same or newer weights.

A resumed request's prompt consists of all tokens so far. ``SamplingParams.extra_args`` contains the number of tokens at
its end that belong to the response. The engine recomputes these tokens, so all hidden states of the response come from
the same weights. Recomputed tokens are response tokens, so stop strings, outputs and states cover the whole response.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm import SamplingParams

KEY, READ = "resumed_tokens", "read_tokens"
"""Keys in ``SamplingParams.extra_args``."""


class CutResponse(NamedTuple):
    """Partial response of an aborted request."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    """All response tokens so far."""
    logprobs: Sequence[Any]
    """vLLM's log-probabilities of the tokens sampled by the aborted request, which are at the end of ``token_ids``."""


def cut(engine: Any) -> list[CutResponse]:
    """Abort all unfinished requests of an engine in this process, and release their hidden states.

    Returns:
        The partial responses, in the order in which the requests were added.
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
    """Return the ``extra_args`` of a request whose prompt ends with ``num_tokens`` tokens of the response.

    ``num_read`` is the number of tokens at the end of the prompt whose hidden states are needed. The default is
    ``num_tokens``. Larger values include earlier turns of a conversation.
    """
    return {KEY: num_tokens, READ: num_tokens if num_read is None else num_read}


def num_resumed(params: SamplingParams | None) -> int:
    """Return the number of prompt tokens that belong to the response, or 0 for an ordinary request."""
    return 0 if params is None or params.extra_args is None else int(params.extra_args.get(KEY, 0))


def num_read(params: SamplingParams | None) -> int:
    """Return the number of tokens at the end of the prompt whose hidden states are requested."""
    return 0 if params is None or params.extra_args is None else int(params.extra_args.get(READ, num_resumed(params)))


def restore_response(state: Any, request: Any, tokenizer: Any) -> None:
    """Restore the partial response of a new request in its ``state`` in the front end.

    This assumes that the detokenizer stores the response's tokens, its text, and how far stop strings were searched.
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
