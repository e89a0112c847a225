"""Assigns hidden states to requests and tokens, regardless of how the scheduler batches or recomputes them.

A state is identified by its request and its position in the sequence. After a prompt of P tokens, response token j is
sampled from the state at position P - 1 + j. A state may be recomputed after a preemption, or because another request
continues the response (:mod:`vllm_patches.resume`). A recomputed state replaces the old state at the same position.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_patches.buffer import NOBODY, RowBuffer
from vllm_patches.options import CaptureOptions

STATES = "states"
PROMPT = "prompt"
REDUCED = "reduced."
"""Keys of a result for the states of response and prompt, and the prefix of keys for the reducer's columns."""

GATHERED_BYTES = 256 << 20
"""Maximum size in bytes of the device copy of buffered states that are reduced or returned at a time. The states of a
single response may exceed this limit."""


@dataclass(frozen=True)
class ForwardStep:
    """One forward pass of an engine over N tokens of R requests. The tokens of a request are adjacent."""

    request_ids: list[str]
    """Internal vLLM ids of the R requests."""
    computed: np.ndarray
    """Number of tokens computed before this step, i.e. the position of each request's first token in it, [R]."""
    scheduled: np.ndarray
    """Number of tokens of each request in this step, [R]."""
    sampled: np.ndarray
    """Whether the token sampled from a request's last state is kept, [R] bool. False for unfinished prompts."""
    last_rows: Tensor | None
    """Row of each request's last token, [R] integers on the device, or None if every request has one token (N = R)."""
    states: Sequence[Tensor]
    """States of each captured layer, [at least N, hidden]."""


@dataclass
class _Request:
    """Request that the engine has started."""

    owner: int
    """Identifier of the request in the buffer."""
    prompt_length: int
    """Length of the prompt, excluding response tokens sampled by earlier requests."""
    read: range
    """Positions of input tokens whose states are kept, in addition to the states from which tokens are sampled."""
    finished: bool = False
    """Whether the engine has finished the request."""
    released: bool = False
    """Whether the request's states have been collected or discarded."""


def reserved_bytes(options: CaptureOptions, num_tokens: int, width: int, itemsize: int) -> int:
    """Return how many bytes of device memory to reserve for the states of responses of up to ``num_tokens`` tokens.

    The memory includes the buffer, the states copied out of it (twice, while gathering), and the reducer's workspace.
    """
    num_layers = len(options.layers)
    gathered = 2 * max(GATHERED_BYTES, num_tokens * num_layers * width * itemsize)
    return options.max_bytes + gathered + options.workspace_bytes(num_tokens, num_layers, width)


class HiddenStateCapture:
    """Storage for the hidden states of one worker's requests until they are collected or discarded."""

    def __init__(self, options: CaptureOptions, buffer: RowBuffer) -> None:
        self.options = options
        self.buffer = buffer
        self._reducer = options.load_reducer()
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count()
        self._batch: tuple[list[str], np.ndarray, np.ndarray, np.ndarray] | None = None

    def begin(self, request_id: str, num_tokens: int, num_resumed: int = 0) -> None:
        """Register a request that is scheduled for the first time or again after a preemption.

        Args:
            num_tokens: Number of tokens that the request starts with.
            num_resumed: Number of these tokens, counted from the end, that belong to the response.
        """
        if request_id not in self._requests:
            prompt_length = num_tokens - num_resumed
            # The first response token was sampled from the last of these states. If that state is recomputed, it must
            # not replace the original one.
            first = 0 if self.options.keeps_prompts else prompt_length - 1
            stop = num_tokens - 1 if self.options.keeps_responses else prompt_length
            self._requests[request_id] = _Request(next(self._numbers), prompt_length, range(first, stop))
            self._batch = None

    def finish(self, request_id: str) -> None:
        """Mark a request as finished by the engine. Its states are kept until they are collected or discarded."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finished = True
            self._forget(request_id, request)

    def record(self, step: ForwardStep) -> None:
        """Store the states of a step that are needed by :meth:`take`."""
        owners, firsts, stops = self._owners_and_reads(step.request_ids)
        last_positions = step.computed + step.scheduled - 1
        wanted = owners != NOBODY
        # A request whose ``read`` is empty needs only the row of its last token in each step.
        reads = wanted & (firsts < stops) & (step.computed < stops) & (last_positions >= firsts)
        if reads.any():
            self._record_all(step, owners, firsts, stops, last_positions)
        elif self.options.keeps_responses and (wanted & step.sampled).any():
            count, last = len(owners), step.last_rows
            rows = [s[:count] if last is None else s.index_select(0, last) for s in step.states]
            self.buffer.append(rows, np.where(step.sampled, owners, NOBODY), last_positions)

    def take(self, requests: Iterable[tuple[str, int]]) -> list[dict[str, Tensor]]:
        """Return the states of requests and discard them from the buffer.

        Args:
            requests: Pairs (request id, n) to get the states of a request's first n response tokens. Asynchronous
                scheduling may have computed more.

        Returns:
            A dictionary per request. Depending on the options, it contains ``states [num_tokens, num_layers, hidden]``
            or the reducer's columns, ``reduced.<name>``, and ``prompt [prompt_length, num_layers, hidden]``. Rows of
            ``prompt`` in the prefix cache are NaN because they were not computed.

        Raises:
            RuntimeError: If a state of a response is missing, which means that states are misaligned.
            TypeError: If the reducer's result is not a dictionary of columns.
        """
        waiting = list(requests)
        results: list[dict[str, Tensor]] = []
        try:
            while waiting:
                at_once = self._num_that_fit(waiting)
                results += self._take(waiting[:at_once])
                for request_id, _ in waiting[:at_once]:
                    self.drop(request_id)
                del waiting[:at_once]
        finally:
            for request_id, _ in waiting:
                self.drop(request_id)
        return results

    def drop(self, request_id: str) -> None:
        """Discard a request's states, including any that the engine computes later."""
        request = self._held(request_id)
        if request is not None:
            request.released = True
            self._batch = None
            self.buffer.release(request.owner)
            self._forget(request_id, request)

    def __len__(self) -> int:
        """Return the number of known requests."""
        return len(self._requests)

    def clear(self) -> None:
        """Reset to the initial state."""
        self._requests.clear()
        self._batch = None
        self.buffer.clear()

    def _num_that_fit(self, requests: list[tuple[str, int]]) -> int:
        """Return how many of the first requests fit into ``GATHERED_BYTES`` together, but at least 1."""
        rows = 0
        for index, (request_id, num_tokens) in enumerate(requests):
            request = self._held(request_id)
            rows += num_tokens + (request.prompt_length if request and self.options.keeps_prompts else 0)
            if index > 0 and rows * self.buffer.row_bytes > GATHERED_BYTES:
                return index
        return len(requests)

    def _take(self, requests: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
        results: list[dict[str, Tensor]] = [{} for _ in requests]
        if self.options.keeps_responses:
            responses = [self._response(request_id, num_tokens) for request_id, num_tokens in requests]
            results = self._reduced(responses)
        if self.options.keeps_prompts:
            held = [(index, self._held(request_id)) for index, (request_id, _) in enumerate(requests)]
            known = {index: request for index, request in held if request is not None}
            prompts = [self.buffer.gather(request.owner, 0, request.prompt_length)[0] for request in known.values()]
            for index, prompt in zip(known, self._returned(prompts), strict=True):
                results[index][PROMPT] = prompt
        return results

    def _held(self, request_id: str) -> _Request | None:
        """Return the request, or None if it has not started or its states have been released."""
        request = self._requests.get(request_id)
        return None if request is None or request.released else request

    def _forget(self, request_id: str, request: _Request) -> None:
        if request.finished and request.released:
            del self._requests[request_id]

    def _owners_and_reads(self, request_ids: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each request's ``owner`` and the bounds of its ``read`` range as three int64 arrays of shape [R].

        The result is cached because most steps have the same requests as the previous step.
        """
        if self._batch is None or self._batch[0] != request_ids:
            requests = [self._held(request_id) for request_id in request_ids]
            rows = [(NOBODY, 0, 0) if r is None else (r.owner, r.read.start, r.read.stop) for r in requests]
            self._batch = (list(request_ids), *np.array(rows, dtype=np.int64).reshape(-1, 3).T)
        return self._batch[1:]

    def _record_all(
        self, step: ForwardStep, owners: np.ndarray, firsts: np.ndarray, stops: np.ndarray, last_positions: np.ndarray
    ) -> None:
        """Store the required states of input tokens and of sampling positions in one slice."""
        # 1. Compute owner and position of each of the N rows.
        lengths = step.scheduled
        row_owners = np.repeat(owners, lengths)
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(len(row_owners)) + np.repeat(step.computed - starts, lengths)
        # 2. Select rows of tokens with which the request started.
        needed = (positions >= np.repeat(firsts, lengths)) & (positions < np.repeat(stops, lengths))
        # 3. Select rows from which a response token was sampled.
        if self.options.keeps_responses:
            needed |= (positions == np.repeat(last_positions, lengths)) & np.repeat(step.sampled, lengths)
        rows = [states[: len(row_owners)] for states in step.states]
        self.buffer.append(rows, np.where(needed, row_owners, NOBODY), positions)

    def _response(self, request_id: str, num_tokens: int) -> Tensor:
        request = self._held(request_id)
        if request is None:
            # The request was aborted before its first step, or taken twice.
            states, found = self.buffer.gather(NOBODY, 0, 0)
        else:
            states, found = self.buffer.gather(request.owner, request.prompt_length - 1, num_tokens)
        if found.sum() != num_tokens:
            raise RuntimeError(
                f"request {request_id}: {int(found.sum())} hidden states for {num_tokens} tokens; the hidden-state "
                "capture does not support this engine configuration, please report it"
            )
        return states

    def _reduced(self, responses: list[Tensor]) -> list[dict[str, Tensor]]:
        """Return the states of each response, or the reducer's columns for the response if there is a reducer."""
        if self._reducer is None:
            return [{STATES: states} for states in self._returned(responses)]
        results: list[dict[str, Tensor]] = [{} for _ in responses]
        filled = [index for index, states in enumerate(responses) if len(states)]
        if not filled:
            return results
        lengths = [len(responses[index]) for index in filled]
        columns = _checked(self._reducer([responses[index] for index in filled]), lengths, self.options.reducer)
        for name, values in zip(columns, self._returned(list(columns.values())), strict=True):
            parts = values.split(1 if len(values) == len(filled) else lengths)
            for index, part in zip(filled, parts, strict=True):
                results[index][REDUCED + name] = part
        return results

    def _returned(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors if self.options.device == "device" else to_host(tensors)


def to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors to host memory, synchronizing with a GPU only once."""
    fetched = [values.to("cpu", non_blocking=True) for values in tensors]
    if not any(values.is_cuda for values in tensors):
        return fetched
    torch.cuda.current_stream().synchronize()
    # Clone, so that the page-locked transfer memory is freed.
    return [values.clone() for values in fetched]


def _checked(columns: object, lengths: list[int], name: str | None) -> dict[str, Tensor]:
    """Return the reducer's columns. Raise ``TypeError`` unless each column has one entry per response or token."""
    sizes = (len(lengths), sum(lengths))
    if not isinstance(columns, dict) or not all(
        isinstance(values, Tensor) and values.dim() and len(values) in sizes for values in columns.values()
    ):
        raise TypeError(
            f"reducer {name}: must return a dict of tensors with one entry for each of {sizes[0]} responses, or for "
            f"each of their {sizes[1]} tokens; got {columns!r:.200}"
        )
    return columns
