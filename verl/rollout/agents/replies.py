"""Replies to the requests of agents, made from the turns that the policy sampled."""

from collections.abc import Mapping
from typing import Any

from verl.config.errors import ConfigError
from verl.data.responses import decode_responses, token_pieces
from verl.rollout.agents.completions import CompletionRequest, text_completion
from verl.rollout.agents.histories import Row
from verl.rollout.agents.protocol import ChatRequest, assistant_message, completion
from verl.rollout.environments.conversations import ConversationSetup, read_turn
from verl.rollout.environments.pool import COUNTS

CALLS, MALFORMED = COUNTS.index("calls"), COUNTS.index("malformed")


def reply_to(
    row: Row,
    request: ChatRequest | CompletionRequest,
    identity: str,
    calls: Mapping[str, Any],
    truncated: bool,
    setup: ConversationSetup,
) -> dict[str, Any]:
    """Return the reply with the last turn of ``row``, to which the turn's message and counts of calls are added.

    Args:
        identity: Id of the reply.
        calls: Tool calls that the engine found in the turn, and their counts.
        truncated: Whether the turn was cut off at a limit.

    Raises:
        ConfigError: If the engine cannot parse the tool calls of this model.
    """
    finish_reason = "length" if truncated else "stop"
    prompt, tokens, logprobs = [*row.prompt_ids, *row.tokens[: row.begins]], row.tokens[row.begins :], None
    if request.logprobs and row.rollout_logprobs is not None:
        pieces = token_pieces(tokens, setup.tokenizer)
        logprobs = list(zip(pieces, row.rollout_logprobs[row.begins :], strict=True))
    stop_strings = [*setup.stop_strings, *request.stop]
    if isinstance(request, CompletionRequest):
        (text,) = decode_responses([tokens], setup.tokenizer, stop_strings)
        return text_completion(identity, text, finish_reason, prompt, tokens, logprobs)
    schemas = {tool["function"]["name"]: tool for tool in row.tools}
    turn = read_turn(row, calls, setup.tokenizer, stop_strings, schemas)
    if row.tools and calls["unsupported"]:
        raise ConfigError(calls["unsupported"])
    message = {"role": "assistant", "content": turn.text}
    if row.tools and turn.calls:
        message = assistant_message(turn.text.partition(calls["mark"])[0] if calls["mark"] else "", turn.calls)
        row.counts[CALLS] += len(turn.calls)
    row.counts[MALFORMED] += int(bool(row.tools) and turn.malformed)
    whole = {"whole": decode_responses([turn.tokens], setup.tokenizer)[0]} if request.stop else {}
    row.history.append(message | whole)
    ids = (prompt, tokens) if request.token_ids else None
    return completion(identity, message, finish_reason, (len(prompt), len(tokens)), logprobs, ids)
