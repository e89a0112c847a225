"""Samples with a vLLM engine in this process, for training and evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.batch import POLICY, Batch
from verl.config.rollout import EngineConfig
from verl.rollout.environments.turns import Turns
from verl.rollout.partial import PartialResponse, from_batch, to_batch
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import ResponseRequests
from verl.rollout.vllm_engine import engine_capacity, from_stream, num_waiting, rank_columns, run_steps
from verl.utils.distributed import WorkerPlace
from vllm_patches import resume
from vllm_patches.temperatures import KEY as TEMPERATURES


@dataclass(eq=False)
class VLLMSampler:
    """Sampler that returns responses and the rank metrics that the engine measures.

    The ``rollout.tensor_parallel_size`` workers of one engine have consecutive ranks. Each worker runs a scheduler.
    Workers that receive the same prompts make the same scheduling decisions and sample the same responses.
    """

    engine: LLM
    config: EngineConfig
    place: WorkerPlace
    max_response_length: int
    end_tokens: list[int]
    """Tokens that end a response, in addition to those of the model."""
    stop_strings: list[str]
    """Strings that end a response, in addition to those of the model."""
    measures: bool
    """Whether the engine captures hidden states."""
    turns: Turns | None
    """State of multi-turn conversations, or None if each response has a single turn."""
    trains: bool
    """Whether to return ``rollout_logprobs`` and ``mean_states``."""

    def __post_init__(self) -> None:
        self.is_first = self.place.rank % self.config.tensor_parallel_size == 0
        self._partial: dict[str, PartialResponse] = {}
        self._version = -1
        """Version of the current weights, or a negative number if responses are never interrupted."""

    @property
    def capacity(self) -> EngineCapacity:
        """Capacity determined by ``rollout.max_num_seqs`` and the size of the KV cache."""
        return engine_capacity(self.engine.llm_engine)

    def begin(self) -> None:
        """Empty the prefix cache, which validation may have filled, unless responses are still running.

        A run that resumes at this step also starts with an empty cache.
        """
        if not self._partial:
            self.engine.reset_prefix_cache()

    def advance(self, requests: ResponseRequests, max_steps: int) -> tuple[Batch | None, int]:
        """Add requests, run at most ``max_steps`` steps, and return finished responses and the number still waiting."""
        engine = self.engine.llm_engine
        self._version = requests.version
        partial = requests.partial
        responses = map(PartialResponse, requests.prompt_ids) if partial is None else from_batch(partial)
        for i, (row, response) in enumerate(zip(requests.rows, responses, strict=True)):
            self._partial[str(row)] = response
            prompt: Any = {"prompt_token_ids": response.prompt_ids + response.tokens}
            engine.add_request(str(row), prompt, self._sampling_params(requests, i, response))
        return self._finished(run_steps(engine, max_steps)), num_waiting(engine)

    def cut(self) -> Batch | None:
        """Stop all running responses and return them with their ``version``, or None if there are none."""
        left = resume.cut(self.engine.llm_engine)
        names = [cut.request_id for cut in left]
        if self.turns is not None:
            self.turns.forget(names)
        responses = [self._partial.pop(name) for name in names]
        if not (left and self.is_first):
            return None
        for response, cut in zip(responses, left, strict=True):
            self._append(response, cut.token_ids, cut.logprobs)
        return self._to_batch(names, responses)

    def take_rank_metrics(self) -> Batch | None:
        """Return the rank metrics of conversations whose states are stored, and discard the states."""
        return None if self.turns is None else self.turns.take_rank_metrics()

    def _num_read(self, request_id: str, response: PartialResponse) -> int:
        """Return the number of trailing prompt tokens whose hidden states must be recomputed for a request."""
        if self.measures and self.turns is not None and not self.turns.holds(request_id):
            return len(response.tokens)
        return response.open_tokens

    def _sampling_params(self, requests: ResponseRequests, i: int, response: PartialResponse) -> SamplingParams:
        sampling, num_read = requests.sampling_of(i), self._num_read(str(requests.rows[i]), response)
        longest, limit = requests.max_response_length, (requests.max_tokens or {i: None})[i]
        room = (longest or self.max_response_length) - len(response.tokens)
        stop = [*(() if longest else self.stop_strings), *((requests.stop or {i: []})[i])]
        extra: dict[str, Any] = from_stream(requests.streams[i]) if self.config.seeded else {}
        if num_read:
            extra |= resume.resume_args(response.open_tokens, num_read)
        if requests.temperatures is not None:
            extra[TEMPERATURES] = requests.temperatures
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=room if limit is None else min(room, limit),
            stop_token_ids=self.end_tokens,
            stop=stop,
            logprobs=0 if self.trains else None,
            extra_args=extra or None,
            # Prefix-cache hits skip the forward pass, so their hidden states would never be captured.
            skip_reading_prefix_cache=True if num_read and self.measures else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # Text is needed only to search for stop strings.
            detokenize=bool(stop),
        )

    def _finished(self, outputs: list[RequestOutput]) -> Batch | None:
        """Return the finished responses, if any, on an engine's first worker, and None on all other workers."""
        names, completions = [output.request_id for output in outputs], [output.outputs[0] for output in outputs]
        responses = [self._partial.pop(name) for name in names]
        if self.turns is not None:
            for name, response, completion in zip(names, responses, completions, strict=True):
                states = getattr(completion, "hidden_states", None)
                self.turns.keep(name, response, self._num_read(name, response), states)
        if not (outputs and self.is_first):
            return None
        for response, completion in zip(responses, completions, strict=True):
            self._append(response, completion.token_ids, cast(Any, completion.logprobs))
        batch = self._to_batch(names, responses)
        batch.fill(truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]))
        if self.turns is not None:
            calls = [self.turns.calls(list(completion.token_ids)) for completion in completions]
            read = [len(o.prompt_token_ids or []) - (o.num_cached_tokens or 0) for o in outputs]
            return batch.fill(calls=[c | {"prefilled": num} for c, num in zip(calls, read, strict=True)])
        if self.measures:
            batch.fill(**rank_columns(completions))
        return batch if self.trains else batch.without("mean_states")

    def _append(self, response: PartialResponse, tokens: Sequence[int], logprobs: Sequence[Any]) -> None:
        """Append the newly sampled tokens to a response.

        Args:
            tokens: Tokens of the turn, including those sampled by an earlier request.
            logprobs: vLLM's log-probabilities of the newly sampled tokens.
        """
        new = tokens[response.open_tokens :]
        of_new = None
        if self.trains:
            of_new = [by_token[token].logprob for token, by_token in zip(new, logprobs, strict=True)]
        response.append(new, POLICY, of_new, self._version if self._version >= 0 else None)

    def _to_batch(self, request_ids: Sequence[str], responses: Sequence[PartialResponse]) -> Batch:
        batch = to_batch(responses).fill(request=torch.tensor([int(request_id) for request_id in request_ids]))
        return batch if self.turns is not None else batch.without("source")
