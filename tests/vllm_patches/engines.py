"""What tests ask of real engines, in processes of their own: an engine leaves its traces in a process."""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM

from verl.rollout.weight_sync import reload_weights
from verl.utils.process import freeze_objects
from vllm_patches import resume as response_cuts
from vllm_patches import streams

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
}
"""Engine options of every test."""

TIGHT: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": 32,
    "num_gpu_blocks_override": 10,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}
"""Engine options under which prompts are chunked, shared and, for lack of memory, preempted and computed again."""


@dataclass
class Response:
    """One completion."""

    tokens: list[int]
    states: Any
    finish_reason: str | None


@dataclass
class Answer:
    """What came back for one prompt."""

    prompt: list[int]
    prompt_states: Tensor | None
    num_cached: int | None
    responses: list[Response]


@dataclass
class Outcome:
    """What an engine did."""

    answers: list[Answer]
    facts: dict[str, Any] = field(default_factory=dict)
    """Whatever else a test wants to know."""


def settings(path: Path, capture: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Options of an engine on the model in ``path``."""
    asked = {} if capture is None else {"additional_config": {"hidden_states": capture}}
    return {"model": str(path)} | OPTIONS | asked | options


@contextmanager
def engine(path: Path, capture: dict[str, Any] | None, **options: Any) -> Iterator[LLM]:
    """An engine, stopped at the end so thoroughly that this process can start the next one."""
    freeze_objects()  # as verl/rollout/vllm_engine.py does
    llm = LLM(**settings(path, capture, **options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        # What is left of it must not be collected, and take the process group along, when the next one has begun.
        vars(llm).clear()
        gc.collect()
        cleanup_dist_env_and_memory()


def answer_of(output: Any) -> Answer:
    """Plain data of an output of vLLM."""
    responses = [
        Response(list(c.token_ids), getattr(c, "hidden_states", None), c.finish_reason) for c in output.outputs
    ]
    prompt_states = getattr(output, "prompt_hidden_states", None)
    return Answer(list(output.prompt_token_ids), prompt_states, output.num_cached_tokens, responses)


def sampling(**options: Any) -> SamplingParams:
    """24 tokens a response unless ``options`` say otherwise."""
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "detokenize": False} | options)


def ask(llm: LLM, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """Generate with :func:`sampling` options."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [answer_of(output) for output in llm.generate(asked, sampling(**options), use_tqdm=False)]


def memory(llm: LLM) -> dict[str, int]:
    """What captured states take."""
    (held,) = [reply for reply in llm.collective_rpc("hidden_states_memory") if reply is not None]
    return held


@contextmanager
def preemptions() -> Iterator[list[str]]:
    """The requests that this process's engines preempt within the block."""
    preempted: list[str] = []
    original = Scheduler._preempt_request

    def preempt(self: Scheduler, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(self, request, *args, **kwargs)

    Scheduler._preempt_request = preempt  # type: ignore[method-assign]
    try:
        yield preempted
    finally:
        Scheduler._preempt_request = original  # type: ignore[method-assign]


def in_tight_quarters(path: Path, capture: dict[str, Any] | None, prompts: list[list[int]], **options: Any) -> Outcome:
    """Four responses a prompt under ``TIGHT`` conditions."""
    with preemptions() as preempted, engine(path, capture, **TIGHT | options) as llm:
        # Not one seed a request: with that, vLLM cannot chunk prompts on CPU.
        answers = ask(llm, prompts, n=4, temperature=1.0)
        held = memory(llm) if capture is not None else {}
        mode = llm.llm_engine.vllm_config.compilation_config.mode
    return Outcome(answers, {"preempted": len(preempted), "compiled": mode > 0} | held)


def twice(path: Path, capture: dict[str, Any], prompts: list[list[int]]) -> list[list[Answer]]:
    """The same prompts again, when their beginnings are in the prefix cache; the third time not read from there."""
    with engine(path, capture, **TIGHT | {"num_gpu_blocks_override": 64}) as llm:
        return [ask(llm, prompts), ask(llm, prompts), ask(llm, prompts, skip_reading_prefix_cache=True)]


def with_new_weights(path: Path, weights: dict[str, Tensor], capture: dict[str, Any], prompt: list[int]) -> Outcome:
    """Generate, replace the weights, generate again; also what ``device="device"`` returns."""
    with engine(path, capture | {"device": "device"}, skip_tokenizer_init=True) as llm:
        answers = ask(llm, [prompt])
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.reload_weights(weights_iterator=iter(weights.items()))
        assert llm.reset_prefix_cache()
        answers += ask(llm, [prompt])
        differentiable = answers[0].responses[0].states.clone().requires_grad_().square().sum()
        differentiable.backward()
        return Outcome(answers, {"in_process": llm.llm_engine.state_collector.in_process})


def before_and_after_sleep(path: Path, capture: dict[str, Any], prompts: list[list[int]], **options: Any) -> Outcome:
    """The same prompts, and a sleep in between in which weights wait on the host and the KV cache is gone."""
    with engine(path, capture, skip_tokenizer_init=True, enable_sleep_mode=True, **options) as llm:
        answers = ask(llm, prompts)
        llm.sleep(level=1)
        (held,) = llm.collective_rpc("hidden_states_memory")
        llm.wake_up()
        return Outcome(answers + ask(llm, prompts), {"bytes_asleep": held["device_bytes"]})


def step_by_step(path: Path, capture: dict[str, Any], prompts: list[list[int]]) -> Outcome:
    """Drive the engine by hand; the first request is aborted midway, and the last ones when some samples have ended."""
    with engine(path, capture, skip_tokenizer_init=True) as llm:
        core = llm.llm_engine
        worker = core.model_executor.driver_worker.worker
        worker.hidden_state_capture.begin("a request of the warm-up", 1)
        worker.compile_or_warm_up_model()
        warm = memory(llm)["num_requests"]
        for index, prompt in enumerate(prompts):
            core.add_request(str(index), {"prompt_token_ids": prompt}, sampling(n=2, max_tokens=6 + 6 * index))
        for seed in range(40):
            # Some of these samples end early, some groups in part.
            group = sampling(n=2, seed=seed, temperature=1.0, max_tokens=100, stop_token_ids=list(range(30)))
            core.add_request("last", {"prompt_token_ids": prompts[0]}, group)
        answers, steps = [], 0
        while core.has_unfinished_requests():
            steps += 1
            if steps == 4:
                core.abort_request(["0"])
                held = memory(llm)
            if steps == 12:
                # One sample of this group has ended, at its stop token; the other has not.
                core.abort_request(["last"])
            outputs = core.step()
            answers += [answer_of(output) for output in outputs if output.finished and output.request_id != "last"]
        del outputs
        return Outcome(answers, memory(llm) | {"rows_after_abort": held["num_rows"], "requests_after_warm_up": warm})


class _NoStream:
    """Stands for a CUDA stream or event: on a CPU everything has happened as soon as it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self


def scheduled_ahead(function: Callable[..., Outcome], *arguments: Any, **options: Any) -> Outcome:
    """``function(*arguments, **options)`` with asynchronous scheduling, CUDA's default, which vLLM turns off on CPUs.

    The next step is prepared before the tokens of this one are known. The fact ``scheduled_ahead`` counts such steps.
    """
    check, steps = CpuPlatform.check_and_update_config, []

    def check_and_update(_: type, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    def update(self: AsyncScheduler, output: Any) -> None:
        steps.append(output)
        original(self, output)

    original = AsyncScheduler._update_after_schedule
    stubs = {"Stream": _NoStream, "Event": _NoStream, "current_stream": _NoStream, "stream": nullcontext}
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        stack.enter_context(mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update)))
        stack.enter_context(mock.patch.object(AsyncScheduler, "_update_after_schedule", update))
        outcome = function(*arguments, **options)
    outcome.facts["scheduled_ahead"] = len(steps)
    return outcome


def raising(states: list[Tensor]) -> dict[str, Tensor]:
    """A reducer that fails for responses of 5 tokens."""
    if any(len(response) == 5 for response in states):
        raise ValueError("five is too many")
    return {"length": torch.tensor([len(response) for response in states])}


def with_a_failing_reducer(path: Path, prompts: list[list[int]], **options: Any) -> Outcome:
    """Generate what the reducer fails for while other requests still run, then what it does not."""
    with engine(path, {"reducer": f"{__name__}:raising"}, skip_tokenizer_init=True, **options) as llm:
        lengths = [5] * 70 + [60] * 10
        asked = [{"prompt_token_ids": prompts[index % len(prompts)]} for index in range(len(lengths))]
        try:
            llm.generate(asked, [sampling(max_tokens=length) for length in lengths], use_tqdm=False)
            error = "none"
        except RuntimeError as raised:
            error = str(raised)
        answers = ask(llm, prompts, max_tokens=4)
        return Outcome(answers, {"error": error, "tasks": llm.collective_rpc("get_supported_tasks")} | memory(llm))


def means(states: list[Tensor]) -> dict[str, Tensor]:
    """A reducer whose results also say how many responses it was called with."""
    mean = torch.stack([response.mean(dim=0) for response in states])
    return {"mean": mean, "together": torch.full((len(states),), len(states)), "tokens": torch.cat(states)[:, :, 0]}


def room(num_tokens: int, num_layers: int, width: int) -> int:
    """The workspace that :func:`means` says it takes."""
    return 1000 * num_tokens * num_layers


def stepped_by_the_user(path: Path, prompts: list[list[int]]) -> Outcome:
    """Collect the states of 90 responses that end in different steps; then of the same, from ``generate``."""
    capture = {"reducer": f"{__name__}:means", "workspace": f"{__name__}:room"}
    with engine(path, capture, skip_tokenizer_init=True) as llm:
        core, asked = llm.llm_engine, [{"prompt_token_ids": prompts[index % len(prompts)]} for index in range(90)]
        params = [sampling(max_tokens=3 + index % 26, temperature=0.0) for index in range(90)]
        for index, prompt in enumerate(asked):
            core.add_request(str(index), prompt, params[index])
        outputs = []
        with core.state_collector.deferring():
            while core.has_unfinished_requests():
                outputs += [output for output in core.step() if output.finished]
        again = llm.generate(asked, params)
        answers = [output.outputs[0] for output in sorted(outputs, key=lambda output: int(output.request_id))]
        states = [answer.hidden_states for answer in answers]
        expected = [output.outputs[0].hidden_states["mean"] for output in again]
        pairs = [(one["mean"], mean) for one, mean in zip(states, expected, strict=True)]
        # Rows of the column of tokens belong to the response whose row the other column has.
        pairs += [(one["tokens"].mean(dim=0), one["mean"][0, :, 0]) for one in states]
        facts = {
            "difference": max(float((left - right).abs().max()) for left, right in pairs),
            "together": [int(one["together"]) for one in states],
            "num_tokens": [(len(answer.token_ids), len(answer.hidden_states["tokens"])) for answer in answers],
        }
        return Outcome([], memory(llm) | facts)


def refusal(path: Path, capture: dict[str, Any], **options: Any) -> str:
    """The error with which an engine does not start."""
    try:
        with engine(path, capture, **options):
            return "it started"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        cleanup_dist_env_and_memory()


def in_another_process(path: Path, capture: dict[str, Any], prompts: list[list[int]], **options: Any) -> Outcome:
    """vLLM's default: the engine core, and with tensor parallelism its workers, in processes of their own."""
    with engine(path, capture, **options) as llm:
        answers = ask(llm, prompts, n=2, temperature=1.0)
        facts: dict[str, Any] = {"client": type(llm.llm_engine.engine_core).__name__} | memory(llm)
        if not options.get("skip_tokenizer_init"):
            # Each token is a character here: by text, which the front end sees, and by token, which the core sees.
            common = SamplingParams(n=3, temperature=1.0, max_tokens=40, stop_token_ids=list(range(3, 20)))
            text = SamplingParams(n=3, temperature=1.0, max_tokens=40, ignore_eos=True, stop=list("0123456789 ab"))
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(asked, text, use_tqdm=False) + llm.generate(asked, common, use_tqdm=False)
            facts["stopped"] = [answer_of(output) for output in outputs]
        return Outcome(answers, facts)


def streamed(path: Path, capture: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """What ``AsyncLLM`` yields to a slow reader, to one whose request is aborted, and after one who went away."""

    async def run() -> dict[str, Any]:
        async_llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings(path, capture, skip_tokenizer_init=True)))
        delta = {"output_kind": RequestOutputKind.DELTA}

        async def read(name: str, pause: float, abort_after: int | None = None, **options: Any) -> list[Answer]:
            outputs = []
            asked = {"prompt_token_ids": prompt}
            async for output in async_llm.generate(asked, sampling(**options), name):
                outputs.append(answer_of(output))
                await asyncio.sleep(pause)
                if len(outputs) == abort_after:
                    await async_llm.abort(name)
            return outputs

        async def leave(name: str) -> None:
            async for _ in async_llm.generate({"prompt_token_ids": prompt}, sampling(max_tokens=80), name):
                return

        slow, aborted, plain, _ = await asyncio.gather(
            read("slow", 0.05, **delta, n=2, max_tokens=40),
            read("aborted", 0.0, abort_after=3, **delta, max_tokens=100),
            read("plain", 0.0, output_kind=RequestOutputKind.FINAL_ONLY),
            leave("left"),
        )
        await asyncio.sleep(0.5)
        (held,) = await async_llm.collective_rpc("hidden_states_memory")
        async_llm.shutdown()
        return {"slow": slow, "aborted": aborted, "plain": plain, "held": held}

    return asyncio.run(run())


def generate_twice(path: Path, capture: dict[str, Any], prompts: list[list[int]], **options: Any) -> Outcome:
    """Two responses a prompt."""
    with engine(path, capture, skip_tokenizer_init=True, **options) as llm:
        return Outcome(ask(llm, prompts, n=2, temperature=1.0))


def one_of_two_ranks(rank: int, port: int, function: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """Tensor parallelism the trainer's way: every rank has an engine of its own and runs the same requests."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return function(*arguments, tensor_parallel_size=2, distributed_executor_backend="external_launcher")


Asked = list[tuple[list[int], dict[str, Any]]]
"""Prompts with sampling options."""


def from_streams(path: Path, *batches: Asked, **options: Any) -> Outcome:
    """Tokens and their log-probabilities, of one batch after the other, from an engine that draws from streams."""
    streams = {"additional_config": {"sampling_streams": True}, "skip_tokenizer_init": True}
    options = {"logprobs_mode": "processed_logprobs"} | streams | options
    with preemptions() as preempted, engine(path, None, **options) as llm:
        outputs = []
        for asked in batches:
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
            outputs += llm.generate(prompts, [sampling(logprobs=0, **given) for _, given in asked], use_tqdm=False)
    return Outcome([drawn_of(output) for output in outputs], {"preempted": len(preempted)})


def drawn_of(output: Any) -> Answer:
    """Like :func:`answer_of`, with the tokens' log-probabilities in the place of states."""
    responses = []
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        logprobs = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
        responses.append(Response(tokens, logprobs, completion.finish_reason))
    return Answer(list(output.prompt_token_ids), None, output.num_cached_tokens, responses)


@dataclass
class Continued:
    """A response that was cut some times and went on."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    states: Tensor | None


@dataclass
class Cuts:
    """How responses are cut: the engine is emptied after ``after[i]`` further steps, for the i-th time."""

    after: list[int]
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """What the engine gets after each cut; of none it keeps its own."""
    params: dict[str, Any] = field(default_factory=dict)
    """Of sampling."""


def cut_and_continued(
    path: Path, asked: list[tuple[list[int], int]], plans: list[Cuts], layers: list[int], **options: Any
) -> tuple[list[list[Continued]], int]:
    """Responses to prompts, each drawn from its stream, for each plan; and how often any was preempted."""
    additional = {"hidden_states": {"layers": layers}, "sampling_streams": True}
    room: dict[str, Any] = {"block_size": 32, "logprobs_mode": "processed_logprobs", "additional_config": additional}
    with preemptions() as preempted, engine(path, None, **room | options) as llm:
        return [_continued(llm, asked, plan) for plan in plans], len(preempted)


def _continued(llm: LLM, asked: list[tuple[list[int], int]], plan: Cuts) -> list[Continued]:
    core, weights = llm.llm_engine, list(plan.weights)
    ended: dict[int, Continued] = {}
    begun: dict[int, tuple[list[int], list[float]]] = {i: ([], []) for i in range(len(asked))}
    for count in [*plan.after, 1000]:
        for i, (tokens, _) in begun.items():
            prompt, stream = asked[i]
            extra = {streams.KEY: stream} | response_cuts.resume_args(len(tokens))
            sampled = {"max_tokens": 24 - len(tokens), "logprobs": 0, "skip_reading_prefix_cache": bool(tokens)}
            given = sampling(**sampled | plan.params, temperature=1.0, extra_args=extra)
            core.add_request(str(i), {"prompt_token_ids": prompt + tokens}, given)
        for _ in range(count):
            if not core.has_unfinished_requests():
                break
            for output in core.step():
                if output.finished:
                    i, (completion,) = int(output.request_id), output.outputs
                    logprobs = begun[i][1] + sampled_logprobs(completion.token_ids, completion.logprobs)
                    tokens = list(completion.token_ids)
                    ended[i] = Continued(list(output.prompt_token_ids), tokens, logprobs, completion.hidden_states)
        begun = {
            int(o.request_id): (o.token_ids, begun[int(o.request_id)][1] + sampled_logprobs(o.token_ids, o.logprobs))
            for o in response_cuts.cut(core)
        }
        if weights:
            reload_weights(llm, weights.pop(0).items())
    assert not begun and llm.reset_prefix_cache()
    return [ended[i] for i in range(len(asked))]


def sampled_logprobs(tokens: Any, logprobs: Any) -> list[float]:
    """Of the last tokens of a response, those for which vLLM has any."""
    count = len(logprobs)
    last = tokens[len(tokens) - count :]
    return [position[token].logprob for token, position in zip(last, logprobs, strict=True)]
