"""The side of the engine that a user holds: finished outputs get their hidden states attached.

Every request carries a ticket, which passes to the output that ends it, whatever ended it: a limit, a stop string or
an abort. Before that output reaches the user the ticket is redeemed for the states, by vLLM's own ``collective_rpc``.
A ticket that nobody holds any more, because its request was given up, lets go of its states by itself.
"""

import functools
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
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_patches.buffer import RowBuffer
from vllm_patches.capture import PROMPT, REDUCED, STATES
from vllm_patches.compat import require
from vllm_patches.options import KEY, CaptureOptions

REDEEM_AT_ONCE = 64
"""``LLM.generate``, which returns everything at its end, redeems this many tickets together, so that a reducer sees
batches."""


class Ticket:
    """The right to one request's states."""

    def __init__(self, request_id: str, dropped: list[str]) -> None:
        self.request_id = request_id
        self.num_tokens = 0
        self.redeemed = False
        self.response: Tensor | dict[str, Tensor] | None = None
        self.prompt: Tensor | None = None
        self._dropped = dropped

    def __del__(self) -> None:
        if not self.redeemed:
            self._dropped.append(self.request_id)


class Redeemer:
    """Attaches hidden states to the outputs of one engine."""

    def __init__(self, engine: Any, options: CaptureOptions) -> None:
        self.in_process = _shares_memory_with_its_worker(engine)
        if options.device == "device" and not self.in_process:
            raise ValueError(
                f"additional_config['{KEY}']['device']='device': the engine runs in another process, which returns "
                "states in host memory; use device='cpu', or set VLLM_ENABLE_V1_MULTIPROCESSING=0 with one worker"
            )
        # Weakly: an engine that nobody holds any more must go at once.
        self._engine = weakref.ref(engine)
        self._dropped: list[str] = []
        self._reduces = options.reducer is not None
        self._waiting: list[RequestOutput] = []
        self._deferring = False

    def issue(self, request_id: str) -> Ticket:
        """A ticket for a new request."""
        return Ticket(request_id, self._dropped)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within, outputs may wait for others; at the end all have their states."""
        self._deferring = True
        try:
            yield
            self._redeem(self._waiting)
        finally:
            self._deferring = False
            self._waiting = []

    def attach(self, outputs: list[RequestOutput]) -> None:
        """Attach states to those of ``outputs`` that ended, now or with the next batch if they may wait."""
        self._waiting += [output for output in outputs if _tickets([output])]
        if self._waiting and (not self._deferring or len(_tickets(self._waiting)) >= REDEEM_AT_ONCE):
            waiting, self._waiting = self._waiting, []
            self._redeem(waiting)

    async def attach_async(self, output: RequestOutput) -> None:
        """The same for one output of an ``AsyncLLM``, at once."""
        tickets = _tickets([output])
        for start in range(0, len(tickets), REDEEM_AT_ONCE):
            some = tickets[start : start + REDEEM_AT_ONCE]
            self._hand_out(some, await self._ask(some))
        _finish([output])

    def let_go(self) -> None:
        """Release the states of requests that were given up."""
        if self._dropped and self._engine() is not None:
            self._ask([])

    async def let_go_async(self) -> None:
        """The same for an ``AsyncLLM``."""
        if self._dropped and self._engine() is not None:
            await self._ask([])

    def _redeem(self, outputs: list[RequestOutput]) -> None:
        tickets = _tickets(outputs)
        for start in range(0, len(tickets), REDEEM_AT_ONCE):
            some = tickets[start : start + REDEEM_AT_ONCE]
            self._hand_out(some, self._ask(some))
        _finish(outputs)

    def _ask(self, tickets: list[Ticket]) -> Any:
        """Redeem the tickets; an ``AsyncLLM``'s answer is to be awaited."""
        engine = self._engine()
        assert engine is not None, "outputs come from an engine"
        dropped = self._dropped[:]
        del self._dropped[: len(dropped)]
        for ticket in tickets:
            ticket.redeemed = True
        requests = [(ticket.request_id, ticket.num_tokens) for ticket in tickets]
        return engine.collective_rpc("take_hidden_states", args=(requests, dropped, not self.in_process))

    def _hand_out(self, tickets: list[Ticket], replies: list[Any]) -> None:
        """``replies`` of all workers: one per ticket from the worker that keeps the states, None from the others."""
        results = next(reply for reply in replies if reply is not None)
        if isinstance(results, str):
            raise RuntimeError(f"hidden states of {len(tickets)} responses: {results}")
        for ticket, result in zip(tickets, results, strict=True):
            result = result if self.in_process else safetensors.torch.load(result)
            ticket.prompt = result.pop(PROMPT, None)
            if self._reduces:
                ticket.response = {name.removeprefix(REDUCED): value for name, value in result.items()}
            else:
                ticket.response = result.get(STATES)


def _ticket(completion: CompletionOutput) -> Ticket | None:
    return getattr(completion, "hidden_states_ticket", None)


def _tickets(outputs: Iterable[RequestOutput]) -> list[Ticket]:
    completions = (completion for output in outputs for completion in output.outputs)
    return [ticket for completion in completions if (ticket := _ticket(completion)) is not None]


def _finish(outputs: list[RequestOutput]) -> None:
    """Replace redeemed tickets by what they were redeemed for."""
    for output in outputs:
        prompts = []
        for completion in output.outputs:
            ticket = _ticket(completion)
            if ticket is not None:
                del completion.hidden_states_ticket
                completion.hidden_states = ticket.response
                prompts += [] if ticket.prompt is None else [ticket.prompt]
        output.prompt_hidden_states = _united(prompts)


def _united(prompts: list[Tensor]) -> Tensor | None:
    """The states of one prompt from those that its samples computed, each what the others had cached."""
    if not prompts:
        return None
    united, *others = prompts
    for other in others:
        united = torch.where(united.isnan(), other, united)
    return united


def _shares_memory_with_its_worker(engine: Any) -> bool:
    """Whether engine core and worker are objects of this process, so that tensors pass as they are."""
    client = engine.engine_core
    return isinstance(client, InprocClient) and isinstance(client.engine_core.model_executor, UniProcExecutor)


def check_engine(config: Any) -> CaptureOptions | None:
    """Read the options of an engine that is about to start; None if it does not ask for hidden states.

    Raises:
        ValueError: for an option that is wrong, or a configuration in which states cannot be captured.
    """
    options = CaptureOptions.parse(config.additional_config)
    if options is None:
        return None
    model = config.model_config
    num_layers = len(options.resolve_layers(model.get_total_num_hidden_layers()))
    RowBuffer(num_layers, model.get_hidden_size(), options.resolve_dtype(model.dtype), "cpu", options.max_bytes)
    parallel = config.parallel_config
    external = parallel.distributed_executor_backend == "external_launcher"
    obstacles = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "data_parallel_size > 1 within one engine": parallel.data_parallel_size > 1 and not external,
        "prefill_context_parallel_size > 1": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "kv_sharing_fast_prefill (phase='decode' can)": config.cache_config.kv_sharing_fast_prefill
        and options.keeps_prompts,
        f"runner={model.runner_type!r}": model.runner_type != "generate",
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ValueError(f"additional_config['{KEY}']: hidden states cannot be captured with {obstacle}")
    return options


def check() -> None:
    """Look for what :func:`install` patches.

    Raises:
        RuntimeError: naming what is missing.
    """
    require(RequestState, "_new_completion_output")
    require(OutputProcessor, "add_request")
    require(RequestOutput, "add")
    require(LLM, "_run_engine")
    require(LLMEngine, "step", "abort_request", "collective_rpc")
    require(AsyncLLM, "generate", "collective_rpc")


def install() -> None:
    """Patch the front ends of this process."""
    for engine_class in (LLMEngine, AsyncLLM):
        engine_class.__init__ = _checked_init(engine_class.__init__)
    OutputProcessor.add_request = _issuing(OutputProcessor.add_request)
    RequestState._new_completion_output = _with_ticket(RequestState._new_completion_output)
    RequestOutput.add = _keeping_tickets(RequestOutput.add)
    LLMEngine.step = _attaching(LLMEngine.step)
    LLMEngine.abort_request = _letting_go(LLMEngine.abort_request)
    LLM._run_engine = _deferring(LLM._run_engine)
    AsyncLLM.generate = _attaching_async(AsyncLLM.generate)
    CompletionOutput.hidden_states = None
    RequestOutput.prompt_hidden_states = None


def _checked_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        options = check_engine(config)
        original(self, *args, **kwargs)
        if options is not None:
            self.output_processor.hidden_states = self.hidden_states = Redeemer(self, options)

    return init


def _issuing(original: Callable[..., None]) -> Callable[..., None]:
    """Give every request that is added a ticket; relies on ``request_states`` holding it by its internal id."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        redeemer = getattr(self, "hidden_states", None)
        if redeemer is not None and getattr(request, "resumable", False):
            raise ValueError("streaming inputs: hidden states can be captured of prompts that are complete")
        original(self, request, *args, **kwargs)
        if redeemer is not None:
            self.request_states[request.request_id].hidden_states_ticket = redeemer.issue(request.request_id)

    return add_request


def _with_ticket(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the ticket to the output that ends a request; relies on the detokenizer counting the tokens so far."""

    @functools.wraps(original)
    def new_completion_output(self: Any, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, token_ids, finish_reason, *args, **kwargs)
        ticket = getattr(self, "hidden_states_ticket", None)
        if ticket is not None and finish_reason is not None:
            ticket.num_tokens = self.detokenizer.num_output_tokens()
            output.hidden_states_ticket = ticket
        return output

    return new_completion_output


def _keeping_tickets(original: Callable[..., None]) -> Callable[..., None]:
    """Outputs that a slow reader lets pile up are merged: the last one's ticket is the merged one's."""

    @functools.wraps(original)
    def add(self: Any, next_output: Any, *args: Any, **kwargs: Any) -> None:
        original(self, next_output, *args, **kwargs)
        tickets = {completion.index: _ticket(completion) for completion in next_output.outputs}
        for completion in self.outputs:
            if tickets.get(completion.index) is not None:
                completion.hidden_states_ticket = tickets[completion.index]

    return add


def _attaching(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def step(self: Any) -> list[Any]:
        outputs = original(self)
        redeemer = getattr(self, "hidden_states", None)
        if redeemer is not None:
            redeemer.attach(outputs)
        return outputs

    return step


def _letting_go(original: Callable[..., None]) -> Callable[..., None]:
    """After an abort, release the states of the requests that it ended.

    vLLM forgets to forget the parent of several samples of which some had finished: with it their outputs would stay.
    """

    @functools.wraps(original)
    def abort_request(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        redeemer = getattr(self, "hidden_states", None)
        if redeemer is not None:
            processor = self.output_processor
            for parent_id, parent in list(processor.parent_requests.items()):
                if not any(child in processor.request_states for child in parent.child_requests):
                    del processor.parent_requests[parent_id]
            redeemer.let_go()

    return abort_request


def _deferring(original: Callable[..., Any]) -> Callable[..., Any]:
    """Relies on ``_run_engine`` stepping the engine until all its requests are finished."""

    @functools.wraps(original)
    def run_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        redeemer = getattr(self.llm_engine, "hidden_states", None)
        if redeemer is None:
            return original(self, *args, **kwargs)
        try:
            with redeemer.deferring():
                return original(self, *args, **kwargs)
        except BaseException:
            # The next call must not find, and return, what is left of this one.
            engine = self.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    return run_engine


def _attaching_async(original: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        stream = original(self, *args, **kwargs)
        redeemer = getattr(self, "hidden_states", None)
        return stream if redeemer is None else _with_states(stream, redeemer)

    return generate


async def _with_states(stream: AsyncGenerator[Any, None], redeemer: Redeemer) -> AsyncGenerator[Any, None]:
    try:
        async for output in stream:
            await redeemer.attach_async(output)
            yield output
    finally:
        await stream.aclose()
        await redeemer.let_go_async()
