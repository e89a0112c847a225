"""Samples tokens from random number streams, vectorized over all requests of a step.

With vLLM's option for reproducible responses, ``SamplingParams.seed``, each request has a generator, and the sampler
loops over the rows in Python. With streams, one random number determines each token. This number is computed from the
request's stream and the token's position in the sequence. Given equal logits, the result does not depend on batching,
chunking, preemption or prefix caching.

The sampling kernel of vLLM's second model runner already computes random numbers from seed and position. With this
runner, vLLM samples the tokens with the stream as the seed. They therefore differ from the first runner's tokens.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_patches.compat import STREAMS, require
from vllm_patches.draw import draw
from vllm_patches.resume import num_resumed
from vllm_patches.streams import KEY, substream, uniforms
from vllm_patches.temperatures import TemperatureTables, table_of


def asks_for_streams(additional_config: Any) -> bool:
    """Return whether an engine with this ``additional_config`` samples from streams.

    Raises ``ValueError`` if the option is neither true nor false.
    """
    wanted = additional_config.get(STREAMS, False) if isinstance(additional_config, Mapping) else False
    if not isinstance(wanted, bool):
        raise ValueError(f"additional_config['{STREAMS}']={wanted!r}: must be true or false")
    return wanted


def check_streams(config: Any) -> None:
    """Check that an engine's configuration supports streams if it enables them.

    Raises ``ValueError`` if the engine uses speculative decoding, or the option is neither true nor false.
    """
    if asks_for_streams(config.additional_config) and config.speculative_config is not None:
        raise ValueError(f"additional_config['{STREAMS}']: speculative decoding draws in its own way; leave one out")


def stream_of(params: SamplingParams | None) -> int | None:
    """Return the stream that a request specifies, or None if it does not specify one."""
    stream = None if params is None or params.extra_args is None else params.extra_args.get(KEY)
    return None if stream is None else int(stream) % 2**64


def response_start(request: Any) -> int:
    """Return the position of the first response token in a runner's request."""
    return int(request.num_prompt_tokens) - num_resumed(request.sampling_params)


def child_params(original: Callable[..., SamplingParams], self: Any, index: int) -> SamplingParams:
    """Assign a different substream to each of a request's ``n`` samples. All other parameters are shared."""
    params = original(self, index)
    stream = stream_of(self.sampling_params)
    if stream is not None:
        params = copy.copy(params)
        params.extra_args = {**(params.extra_args or {}), KEY: substream(stream, index)}
    return params


def attach_streams(runner: Any) -> None:
    """Make a runner sample the tokens of each request from the request's stream, if it specifies one.

    Raises ``RuntimeError`` if this version of vLLM lacks an attribute that the plugin relies on.
    """
    if runner.vllm_config.use_v2_model_runner:
        _attach_v2(runner)
    else:
        StreamSampler(runner)


@dataclass(frozen=True)
class _Rows:
    """Requests of a step in order. They are cached because most steps have the same requests as the previous step."""

    request_ids: list[str]
    streams: np.ndarray | None
    """Stream of each request, or 0 for requests without one, [B] uint64, or None if no request has a stream."""
    streamless: Tensor | None
    """Mask of the requests without a stream, [B] bool on the device, or None if all requests have a stream."""
    tables: np.ndarray | None
    """Slot of each request's temperature table, [B] int64, or None if no request has a table."""
    starts: np.ndarray
    """Position of each request's first response token, [B] int64, or empty if ``tables`` is None."""


@dataclass(frozen=True)
class _Step:
    """Inputs that determine the sampled tokens of one step."""

    uniforms: Tensor
    """Uniform numbers in [0, 1), [B] float64 on the device."""
    streamless: Tensor | None
    """Copied from :class:`_Rows`."""
    temperatures: Tensor | None
    """Temperatures, [B] float32 on the device, NaN for requests without a table, or None if no request has a table."""


class StreamSampler:
    """Sampler for the first model runner, ``v1/worker/gpu_model_runner.py``, and its subclasses.

    This assumes that ``_sample`` calls the sampler once, with one row per request of ``input_batch`` in order.
    ``input_batch`` must describe the step whose tokens are sampled.
    """

    def __init__(self, runner: Any) -> None:
        """Wrap the runner's ``_sample``, and replace the sampler's methods that apply temperatures and draw tokens."""
        require(runner, "_sample", "sampler", "requests", "input_batch", "query_start_loc")
        require(runner.sampler, "topk_topp_sampler", "apply_temperature")
        require(runner.input_batch, "req_ids", "num_reqs", "num_computed_tokens_cpu")
        self._runner = runner
        sampler = runner.sampler.topk_topp_sampler
        self._logprobs_mode = sampler.logprobs_mode
        self._draw_natively = sampler.forward
        self._rows: _Rows | None = None
        self._step: _Step | None = None
        self._tables = TemperatureTables()
        self._scale = runner.sampler.apply_temperature
        runner.sampler.apply_temperature = self.apply_temperature
        runner._sample = self._in_step(runner._sample)
        sampler.forward = self.forward

    def _in_step(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(sample)
        def sample_step(*args: Any, **kwargs: Any) -> Any:
            # Dummy runs, whose rows belong to no request, bypass `_sample`.
            self._step = self._read_step()
            try:
                return sample(*args, **kwargs)
            finally:
                self._step = None

        return sample_step

    def _read_step(self) -> _Step | None:
        """Return the inputs for the step to be sampled, or None if no request has a stream."""
        batch = self._runner.input_batch
        if self._rows is None or self._rows.request_ids != batch.req_ids:
            self._rows = self._read_rows(batch.req_ids)
        if self._rows.streams is None:
            return None
        count = batch.num_reqs
        # The position of a token is the number of tokens before it, so it stays the same if the token is resampled
        # after a preemption or the prompt is chunked differently.
        positions = batch.num_computed_tokens_cpu[:count] + np.diff(self._runner.query_start_loc.np[: count + 1])
        temperatures = None
        if self._rows.tables is not None:
            temperatures = self._upload(self._tables.at(self._rows.tables, positions - self._rows.starts))
        return _Step(self._upload(uniforms(self._rows.streams, positions)), self._rows.streamless, temperatures)

    def _read_rows(self, request_ids: list[str]) -> _Rows:
        requests = [self._runner.requests[request_id] for request_id in request_ids]
        named = [stream_of(request.sampling_params) for request in requests]
        missing = [stream is None for stream in named]
        tables = [table_of(request.sampling_params) for request in requests]
        has_tables = any(table is not None for table in tables)
        return _Rows(
            list(request_ids),
            None if all(missing) else np.array([stream or 0 for stream in named], dtype=np.uint64),
            self._upload(np.array(missing)) if any(missing) else None,
            self._tables.slots(request_ids, tables) if has_tables else None,
            np.array(list(map(response_start, requests)) if has_tables else [], dtype=np.int64),
        )

    def _upload(self, values: np.ndarray) -> Tensor:
        host, device = torch.from_numpy(values), self._runner.device
        # A copy from pinned memory does not wait for the device.
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

    def apply_temperature(self, logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
        """Replace ``Sampler.apply_temperature``. Divide ``logits`` [B, V] by ``temp`` [B] or table entries."""
        if self._step is not None and self._step.temperatures is not None:
            table = self._step.temperatures
            temp = torch.where(table.isnan(), temp, table)
        return self._scale(logits, temp, all_random)  # type: ignore[no-any-return]

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Replace ``TopKTopPSampler.forward``. Return tokens [B] and the values [B, V] selected by ``logprobs_mode``.

        ``logits`` [B, V] float32 are processed except for top-k and top-p. vLLM's interface allows overwriting them.
        """
        step, mode = self._step, self._logprobs_mode
        if step is None:
            return self._draw_natively(logits, generators, k, p)  # type: ignore[no-any-return]
        logits = apply_top_k_top_p(logits, k, p)
        natively: Tensor | None = None
        returned: Tensor | None = None
        if step.streamless is not None:
            natively, returned = self._draw_natively(logits, generators, None, None)
        elif mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        elif mode == "processed_logits":
            returned = logits
        # Allocating memory for a distribution costs more than computing it.
        if returned is None:
            weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
        elif mode == "processed_logits":
            weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
        else:
            weights = torch.exp(returned, out=logits)
        tokens = draw(weights, step.uniforms)
        if natively is not None and step.streamless is not None:
            tokens = torch.where(step.streamless, natively.long(), tokens)
        return tokens, returned


def _attach_v2(runner: Any) -> None:
    """Patch ``v1/worker/gpu/model_runner.py``, where sampling uses ``sampling_states.seeds`` and positions."""
    sampler = getattr(runner, "sampler", None)
    if sampler is None:
        return  # another rank of the pipeline samples
    require(sampler, "sampling_states")
    states = sampler.sampling_states
    require(states, "add_request", "seeds", "seeds_set")
    add_request = states.add_request

    @functools.wraps(add_request)
    def add_with_stream(req_idx: int, sampling_params: SamplingParams) -> Any:
        if table_of(sampling_params) is not None:
            raise ValueError("temperatures by position need vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        result = add_request(req_idx, sampling_params)
        stream = stream_of(sampling_params)
        if stream is not None:
            states.seeds.np[req_idx] = np.uint64(stream).astype(np.int64)
            states.seeds_set[req_idx] = True
        return result

    states.add_request = add_with_stream
