"""Attaches hidden states to an engine's finished outputs in the user's process.

Every request has a :class:`StateHandle`. It is passed to the final output, whether the request ends at a limit, at a
stop string or by an abort. Before the user receives the final output, the states are collected through vLLM's
``collective_rpc``. The states of an abandoned request are released when its handle is garbage-collected.
"""

import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from vllm import LLM
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_patches.buffer import RowBuffer
from vllm_patches.capture import PROMPT, REDUCED, STATES
from vllm_patches.compat import patch, require
from vllm_patches.options import KEY, CaptureOptions
from vllm_patches.resume import num_read, num_resumed, restore_response
from vllm_patches.sampler import check_streams, child_params

COLLECTED_AT_ONCE = 64
"""Maximum number of deferred responses whose states are collected in one batch. Reducers receive these batches."""


class StateHandle:
    """Reference to a request's hidden states in the workers."""

    def __init__(self, request_id: str, abandoned: list[str]) -> None:
        """Create a handle for a request. If its states are never collected, its id is appended to ``abandoned``."""
        self.request_id = request_id
        self.num_tokens = self.num_earlier = 0
        self.collected = False
        self.response: Tensor | dict[str, Tensor] | None = None
        self.prompt: Tensor | None = None
        self._abandoned = abandoned

    def __del__(self) -> None:
        if not self.collected:
            self._abandoned.append(self.request_id)


class StateCollector:
    """Collector that fetches the hidden states of one engine's requests and attaches them to the engine's outputs."""

    def __init__(self, engine: Any, options: CaptureOptions) -> None:
        self.in_process = _worker_is_in_process(engine)
        if options.device == "device" and not self.in_process:
            raise ValueError(
                f"additional_config['{KEY}']['device']='device': the engine runs in another process, which returns "
                "states in host memory; use device='cpu', or set VLLM_ENABLE_V1_MULTIPROCESSING=0 with one worker"
            )
        # Use a weak reference so that the engine is freed as soon as its user drops it.
        self._engine = weakref.ref(engine)
        self._abandoned: list[str] = []
        self._reduces = options.reducer is not None
        # Used only while deferring: outputs without states, and the handles still to be collected for them.
        self._deferring = False
        self._waiting: list[RequestOutput] = []
        self._uncollected: list[StateHandle] = []

    def new_handle(self, request_id: str) -> StateHandle:
        """Create the handle of a new request."""
        return StateHandle(request_id, self._abandoned)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer outputs inside the block to collect their states in batches, and attach all states at the end.

        The composition of batches depends only on the steps in which responses finish, not on timing.
        """
        self._deferring = True
        try:
            yield
            self._collect(self._uncollected)
            _attach_states(self._waiting)
        finally:
            self._deferring = False
            self._waiting, self._uncollected = [], []

    def attach(self, outputs: list[RequestOutput]) -> None:
        """Attach states to the finished ``outputs``, either immediately or at the end of a :meth:`deferring` block."""
        finished = [output for output in outputs if _handles([output])]
        if not self._deferring:
            self._collect(_handles(finished))
            _attach_states(finished)
            return
        self._waiting += finished
        self._uncollected += _handles(finished)
        while len(self._uncollected) >= COLLECTED_AT_ONCE:
            self._collect(self._uncollected[:COLLECTED_AT_ONCE])
            del self._uncollected[:COLLECTED_AT_ONCE]

    async def attach_async(self, output: RequestOutput) -> None:
        """Attach states to one output of an ``AsyncLLM``."""
        handles = _handles([output])
        for start in range(0, len(handles), COLLECTED_AT_ONCE):
            some = handles[start : start + COLLECTED_AT_ONCE]
            self._receive(some, await self._take(some))
        _attach_states([output])

    def release_abandoned(self) -> None:
        """Release the states of abandoned requests on all workers."""
        if self._abandoned and self._engine() is not None:
            self._take([])

    async def release_abandoned_async(self) -> None:
        """Release the states of abandoned requests of an ``AsyncLLM``."""
        if self._abandoned and self._engine() is not None:
            await self._take([])

    def _collect(self, handles: list[StateHandle]) -> None:
        for start in range(0, len(handles), COLLECTED_AT_ONCE):
            some = handles[start : start + COLLECTED_AT_ONCE]
            self._receive(some, self._take(some))

    def _take(self, handles: list[StateHandle]) -> Any:
        """Call ``take_hidden_states`` on all workers and return the replies (for an ``AsyncLLM``, an awaitable)."""
        engine = self._engine()
        assert engine is not None, "outputs come from an engine"
        abandoned = self._abandoned[:]
        del self._abandoned[: len(abandoned)]
        for handle in handles:
            handle.collected = True
        requests = [(handle.request_id, handle.num_tokens) for handle in handles]
        return engine.collective_rpc("take_hidden_states", args=(requests, abandoned, not self.in_process))

    def _receive(self, handles: list[StateHandle], replies: list[Any]) -> None:
        """Store the states in their handles. Workers that do not keep states reply with None.

        If ``ranks`` is ``first``, all workers of an engine may reply with None.
        """
        results = next((reply for reply in replies if reply is not None), None)
        if results is None:
            return
        if isinstance(results, str):
            raise RuntimeError(f"hidden states of {len(handles)} responses: {results}")
        for handle, result in zip(handles, results, strict=True):
            result = result if self.in_process else safetensors.torch.load(result)
            handle.prompt = result.pop(PROMPT, None)
            if self._reduces:
                handle.response = {name.removeprefix(REDUCED): value for name, value in result.items()}
            else:
                handle.response = result.get(STATES)


def _handle(completion: CompletionOutput) -> StateHandle | None:
    return getattr(completion, "hidden_states_handle", None)


def _handles(outputs: Iterable[RequestOutput]) -> list[StateHandle]:
    completions = (completion for output in outputs for completion in output.outputs)
    return [handle for completion in completions if (handle := _handle(completion)) is not None]


def _attach_states(outputs: Iterable[Any]) -> None:
    """Replace the handles in ``RequestOutput`` objects by states. (vLLM does not declare these fields, hence Any.)"""
    for output in outputs:
        prompts = []
        for completion in output.outputs:
            handle = _handle(completion)
            if handle is not None:
                del completion.hidden_states_handle
                completion.hidden_states = handle.response
                prompts += [] if handle.prompt is None else [handle.prompt]
        output.prompt_hidden_states = _merge_prompts(prompts)


def _merge_prompts(prompts: list[Tensor]) -> Tensor | None:
    """Merge several samples' prompt states, filling in rows that are NaN because of prefix caching."""
    if not prompts:
        return None
    merged, *others = prompts
    for other in others:
        merged = torch.where(merged.isnan(), other, merged)
    return merged


def _worker_is_in_process(engine: Any) -> bool:
    """Return whether engine core and worker run in this process, so that tensors can be passed without a copy."""
    client = engine.engine_core
    return isinstance(client, InprocClient) and isinstance(client.engine_core.model_executor, UniProcExecutor)


def check_engine(config: Any) -> CaptureOptions | None:
    """Return the options of an engine that is about to start, or None if it does not capture hidden states.

    Raises ``ValueError`` if an option is invalid or hidden states cannot be captured in this configuration.
    """
    options = CaptureOptions.parse(config.additional_config)
    if options is None:
        return None
    model = config.model_config
    num_layers = len(options.resolve_layers(model.get_total_num_hidden_layers()))
    RowBuffer(num_layers, model.get_hidden_size(), options.resolve_dtype(model.dtype), "cpu", options.max_bytes)
    parallel = config.parallel_config
    external = parallel.distributed_executor_backend == "external_launcher"
    unsupported = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "data_parallel_size > 1 within one engine": parallel.data_parallel_size > 1 and not external,
        "prefill_context_parallel_size > 1": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "kv_sharing_fast_prefill (only with phase='decode')": config.cache_config.kv_sharing_fast_prefill
        and options.keeps_prompts,
        f"runner={model.runner_type!r}": model.runner_type != "generate",
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise ValueError(f"additional_config['{KEY}']: hidden states cannot be captured with {feature}")
    return options


def check() -> None:
    """Check that this version of vLLM has all methods that :func:`install` patches.

    Raises ``RuntimeError`` if a class or method is missing. The message names it.
    """
    for owner, name, _ in PATCHES:
        require(owner, name)
    for engine_class in (LLMEngine, AsyncLLM):
        require(engine_class, "collective_rpc")


def install() -> None:
    """Patch the front-end classes in this process."""
    for owner, name, replacement in PATCHES:
        patch(owner, name, replacement)
    completion: Any = CompletionOutput  # Any, because vLLM does not declare the fields
    output: Any = RequestOutput
    completion.hidden_states = output.prompt_hidden_states = None


def _init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    options = check_engine(config)
    check_streams(config)
    original(self, *args, **kwargs)
    if options is not None:
        self.output_processor.state_collector = self.state_collector = StateCollector(self, options)


def _add_request(original: Callable[..., None], self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Attach a handle to every new request. This assumes that ``request_states`` is keyed by internal request ids."""
    collector = getattr(self, "state_collector", None)
    if collector is not None and getattr(request, "resumable", False):
        raise ValueError("streaming inputs: hidden states can be captured of complete prompts only")
    original(self, request, *args, **kwargs)
    restore_response(self.request_states[request.request_id], request, self.tokenizer)
    if collector is not None:
        handle = collector.new_handle(request.request_id)
        handle.num_earlier = num_read(request.sampling_params) - num_resumed(request.sampling_params)
        self.request_states[request.request_id].hidden_states_handle = handle


def _new_completion_output(
    original: Callable[..., Any], self: Any, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any
) -> Any:
    """Pass the handle to a request's final output. This assumes that the detokenizer counts the tokens so far."""
    output = original(self, token_ids, finish_reason, *args, **kwargs)
    handle = getattr(self, "hidden_states_handle", None)
    if handle is not None and finish_reason is not None:
        handle.num_tokens = handle.num_earlier + self.detokenizer.num_output_tokens()
        output.hidden_states_handle = handle
    return output


def _add_output(original: Callable[..., None], self: Any, next_output: Any, *args: Any, **kwargs: Any) -> None:
    """Keep the last handle when vLLM merges outputs that have accumulated because of a slow reader."""
    original(self, next_output, *args, **kwargs)
    handles = {completion.index: _handle(completion) for completion in next_output.outputs}
    for completion in self.outputs:
        if handles.get(completion.index) is not None:
            completion.hidden_states_handle = handles[completion.index]


def _step(original: Callable[..., list[Any]], self: Any) -> list[Any]:
    outputs = original(self)
    collector = getattr(self, "state_collector", None)
    if collector is not None:
        collector.attach(outputs)
    return outputs


def _abort_request(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Release the states of aborted requests.

    vLLM would otherwise keep parent requests, and thus outputs, of samples that finished before the abort.
    """
    original(self, *args, **kwargs)
    collector = getattr(self, "state_collector", None)
    if collector is not None:
        processor = self.output_processor
        for parent_id, parent in list(processor.parent_requests.items()):
            if not any(child in processor.request_states for child in parent.child_requests):
                del processor.parent_requests[parent_id]
        collector.release_abandoned()


def _run_engine(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Defer outputs in ``_run_engine``, which is assumed to step the engine until all requests are finished."""
    collector = getattr(self.llm_engine, "state_collector", None)
    if collector is None:
        return original(self, *args, **kwargs)
    try:
        with collector.deferring():
            return original(self, *args, **kwargs)
    except BaseException:
        # Otherwise, the next call would return the remaining outputs of this one.
        engine = self.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        raise


def _generate(
    original: Callable[..., AsyncGenerator[Any, None]], self: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any, None]:
    stream = original(self, *args, **kwargs)
    collector = getattr(self, "state_collector", None)
    return stream if collector is None else _with_states(stream, collector)


async def _with_states(stream: AsyncGenerator[Any, None], collector: StateCollector) -> AsyncGenerator[Any, None]:
    try:
        async for output in stream:
            await collector.attach_async(output)
            yield output
    finally:
        await stream.aclose()
        await collector.release_abandoned_async()


PATCHES: list[tuple[type, str, Callable[..., Any]]] = [
    (LLMEngine, "__init__", _init),
    (AsyncLLM, "__init__", _init),
    (OutputProcessor, "add_request", _add_request),
    (ParentRequest, "_get_child_sampling_params", child_params),
    (RequestState, "_new_completion_output", _new_completion_output),
    (RequestOutput, "add", _add_output),
    (LLMEngine, "step", _step),
    (LLMEngine, "abort_request", _abort_request),
    (LLM, "_run_engine", _run_engine),
    (AsyncLLM, "generate", _generate),
]
"""vLLM class, name of its method, and replacement, which receives the original method as its first argument."""
