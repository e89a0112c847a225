"""Sampling with a vLLM engine of this process, in training and evaluation: requests in, responses out."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.batch import POLICY, Batch
from verl.config.rollout import EngineConfig, SamplingConfig
from verl.rollout.base import EngineReply
from verl.rollout.environments.turns import PartialResponse, Turns, trailing_policy_tokens
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import ResponseRequests
from verl.rollout.vllm_engine import engine_room, from_stream, num_waiting, rank_columns, run_steps
from verl.utils.distributed import WorkerPlace
from vllm_patches import begun
from vllm_patches.temperatures import KEY as TEMPERATURES

PER_TOKEN = {"rollout_logprobs": torch.float32, "version": torch.int32, "source": torch.uint8}
"""Columns that an engine may fill for each token."""


class VLLMSampler:
    """Samples responses, and returns the rank metrics that the engine measures of them.

    The ``rollout.tensor_parallel_size`` workers of one engine are neighbours in rank. Each has its own scheduler; given
    the same prompts, all make the same decisions and sample the same responses.
    """

    def __init__(
        self,
        engine: LLM,
        config: EngineConfig,
        place: WorkerPlace,
        max_response_length: int,
        end_tokens: list[int],
        stop_strings: list[str],
        measures: bool,
        turns: Turns | None,
        logprobs: bool,
    ) -> None:
        """Prepare to sample with ``engine``.

        Args:
            end_tokens, stop_strings: that end a response, besides the model's own.
            measures: the engine captures hidden states.
            turns: of conversations; None: a response has one turn.
            logprobs: return ``rollout_logprobs``.
        """
        self.engine = engine
        self.max_response_length = max_response_length
        self.end_tokens, self.stop_strings = end_tokens, stop_strings
        self.measures, self.turns, self.logprobs = measures, turns, logprobs
        self.is_first = place.rank % config.tensor_parallel_size == 0
        self.seeded = config.seeded
        self._partial: dict[str, PartialResponse] = {}
        self._version = -1
        """Of the weights; negative where no response is cut."""

    @property
    def room(self) -> EngineRoom:
        """As many responses as ``rollout.max_num_seqs``, and as the KV cache has tokens for."""
        return engine_room(self.engine.llm_engine)

    def advance(self, requests: ResponseRequests, max_steps: int) -> EngineReply:
        """Take further requests, decode at most ``max_steps`` tokens of each, and return what has ended."""
        engine = self.engine.llm_engine
        if requests.partial is not None:
            self._version = requests.version
        for i, (row, prompt_ids) in enumerate(zip(requests.rows, requests.prompt_ids, strict=True)):
            partial = None if requests.partial is None else self._resume(str(row), requests.partial[[i]])
            prompt: Any = {"prompt_token_ids": prompt_ids + ([] if partial is None else partial.tokens)}
            params = self._sampling_params(requests.sampling_of(i), requests.streams[i], partial)
            if requests.temperatures is not None:
                params.extra_args = {**(params.extra_args or {}), TEMPERATURES: requests.temperatures}
            engine.add_request(str(row), prompt, params)
        return EngineReply(self._finished(run_steps(engine, max_steps)), num_waiting(engine))

    def cut(self) -> Batch | None:
        """Return the partial responses, with ``version``; None if there are none."""
        left = [(r.request_id, r.prompt_ids, r.token_ids, r.logprobs) for r in begun.cut(self.engine.llm_engine)]
        if self.turns is not None:
            self.turns.forget([request_id for request_id, *_ in left])
        return self._episodes(left) if left and self.is_first else None

    def measured(self) -> Batch | None:
        """Return the rank metrics of the conversations whose states are held, and forget these."""
        return None if self.turns is None else self.turns.measured()

    def _resume(self, request_id: str, response: Batch) -> PartialResponse:
        """Record the response so far, B = 1."""
        tokens: list[int] = response.response_tokens.tolist()
        of_turn = read = len(tokens) if "source" not in response else trailing_policy_tokens(response.source)
        if self.measures and self.turns is not None and not self.turns.holds(request_id):
            read = len(tokens)
        partial = self._partial[request_id] = PartialResponse(response, tokens, of_turn, read)
        return partial

    def _sampling_params(
        self, sampling: SamplingConfig, stream: int, partial: PartialResponse | None
    ) -> SamplingParams:
        extra = from_stream(stream) if self.seeded else {}
        reads_again = partial is not None and partial.read > 0
        if partial is not None and reads_again:
            extra |= begun.going_on(partial.of_turn, partial.read)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=self.max_response_length - (0 if partial is None else len(partial.tokens)),
            stop_token_ids=self.end_tokens,
            stop=self.stop_strings,
            logprobs=0 if self.logprobs else None,
            extra_args=extra or None,
            # Prefix-cache hits skip the forward pass, so their hidden states would never be captured.
            skip_reading_prefix_cache=True if reads_again and self.measures else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # Text is needed only to find stop strings in.
            detokenize=bool(self.stop_strings),
        )

    def _finished(self, outputs: list[RequestOutput]) -> Batch | None:
        """Return the responses that have ended; the workers of an engine have sampled the same."""
        if self.turns is not None:
            for output in outputs:
                states = getattr(output.outputs[0], "hidden_states", None)
                self.turns.keep(output.request_id, self._partial[output.request_id], states)
        if not (outputs and self.is_first):
            return None
        completions = [output.outputs[0] for output in outputs]
        pairs = zip(outputs, completions, strict=True)
        batch = self._episodes(
            [(o.request_id, o.prompt_token_ids or [], c.token_ids, cast(Any, c.logprobs)) for o, c in pairs]
        )
        batch.fill(truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]))
        if self.turns is not None:
            calls = [self.turns.calls(list(completion.token_ids)) for completion in completions]
            read = [len(o.prompt_token_ids or []) - (o.num_cached_tokens or 0) for o in outputs]
            return batch.fill(calls=[c | {"prefilled": num} for c, num in zip(calls, read, strict=True)])
        return batch.fill(**rank_columns(completions)) if self.measures else batch

    def _episodes(self, responses: Sequence[tuple[str, Sequence[int], Sequence[int], Sequence[Any]]]) -> Batch:
        """Return responses, given request, prompt, tokens of the last turn, and their log-probabilities.

        vLLM's log-probabilities are of the tokens that this request sampled.
        """
        known = {"rollout_logprobs": self.logprobs, "version": self._version >= 0, "source": self.turns is not None}
        columns: dict[str, list[Any]] = {name: [] for name in PER_TOKEN if known[name]}
        prompts, whole = list[Sequence[int]](), list[list[int]]()
        for request_id, prompt, tokens, sampled in responses:
            partial = self._partial.pop(request_id, None)
            new = tokens if partial is None else tokens[partial.of_turn :]
            before = None if partial is None else partial.response
            prompts.append(prompt if before is None else before.tokens[: int(before.prompt_lengths)].tolist())
            whole.append([*([] if partial is None else partial.tokens), *new])
            of_new = {"version": [self._version] * len(new), "source": [POLICY] * len(new)}
            if self.logprobs:
                pairs = zip(new, sampled, strict=True)
                of_new["rollout_logprobs"] = [place[token].logprob for token, place in pairs]
            for name, values in columns.items():
                values += of_new[name] if before is None else getattr(before, name).tolist() + of_new[name]
        filled = {name: torch.tensor(values, dtype=PER_TOKEN[name]) for name, values in columns.items()}
        request = torch.tensor([int(request_id) for request_id, *_ in responses])
        return Batch.of(prompts, whole, **filled).fill(request=request)
