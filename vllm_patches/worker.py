"""The side of the engine that computes: where hidden states are seen, kept and asked for.

After ``load_model`` of vLLM's worker, whatever runner it has, the states of every ``execute_model`` of its runner are
recorded; ``take_hidden_states`` hands them out and ``hidden_states_memory`` tells what they take, both through vLLM's
own ``collective_rpc``. The model itself, its compilation and its CUDA graphs are not touched.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.worker.gpu_worker import Worker

from vllm_patches.buffer import RowBuffer
from vllm_patches.capture import HiddenStateCapture
from vllm_patches.compat import require
from vllm_patches.options import CaptureOptions
from vllm_patches.runners import Layers, check_runner, read_step

logger = logging.getLogger(__name__)

NORM_IN_HEAD = {"MiMoForCausalLM", "Step3p5ForCausalLM", "KimiK3ForConditionalGeneration"}
"""Models in vLLM that apply the final norm on the way to the logits, after the state that the runner sees."""

SCALED = {"MiniCPMForCausalLM", "MiniCPM3ForCausalLM"}
"""Models in vLLM that scale the state after the final norm before the runner sees it."""


def install() -> None:
    """Patch the worker class; the CPU's and other devices' derive from it."""
    Worker.load_model = _then_attach(Worker.load_model)
    Worker.take_hidden_states = take_hidden_states
    Worker.hidden_states_memory = hidden_states_memory


def take_hidden_states(
    worker: Any, requests: list[tuple[str, int]], dropped: list[str], as_bytes: bool
) -> list[dict[str, Tensor]] | list[bytes] | str | None:
    """Hand out the states of ``requests``, (id, number of tokens), and forget those of ``dropped``.

    Called on all workers; those that keep no states answer None. ``as_bytes`` gives each request's tensors in the
    safetensors format, for the way between processes. An error is returned as text, for raised here it would leave the
    answers of other workers unread, where the next call would take them for its own.
    """
    capture: HiddenStateCapture | None = getattr(worker, "hidden_state_capture", None)
    if capture is None:
        return None
    for request_id in dropped:
        capture.drop(request_id)
    # Results are ordinary tensors, which a user may differentiate, even if the engine calls in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        try:
            results = capture.take(requests)
        except Exception as error:  # A reducer may raise anything.
            logger.exception("Hidden states of %d requests are lost", len(requests))
            return f"{type(error).__name__}: {error}"
        return [_to_bytes(result) for result in results] if as_bytes else results


def hidden_states_memory(worker: Any) -> dict[str, int] | None:
    """What the states of one worker take, for ``collective_rpc``: requests and rows held, bytes held and at most held
    since the start, on the device and, spilled, on the host; None from workers that keep no states."""
    capture: HiddenStateCapture | None = getattr(worker, "hidden_state_capture", None)
    if capture is None:
        return None
    names = ("num_rows", "device_bytes", "host_bytes", "peak_device_bytes", "peak_host_bytes")
    return {"num_requests": len(capture)} | {name: getattr(capture.buffer, name) for name in names}


def _to_bytes(result: dict[str, Tensor]) -> bytes:
    # Copies, for safetensors refuses tensors that share memory.
    return safetensors.torch.save({name: value.to("cpu", copy=True).contiguous() for name, value in result.items()})


def _then_attach(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        options = CaptureOptions.parse(self.vllm_config.additional_config)
        if options is not None and not hasattr(self, "hidden_state_capture"):
            self.hidden_state_capture = capture = attach(self.model_runner, options)
            if capture is not None:
                self.compile_or_warm_up_model = _then_clear(self.compile_or_warm_up_model, capture)

    return load_model


def _then_clear(warm_up: Callable[..., Any], capture: HiddenStateCapture) -> Callable[..., Any]:
    """vLLM warms some engines up with requests of its own, whose states nobody will ask for."""

    @functools.wraps(warm_up)
    def warm_up_and_clear(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        capture.clear()
        return result

    return warm_up_and_clear


def attach(runner: Any, options: CaptureOptions) -> HiddenStateCapture | None:
    """Let a runner record its steps; None where another rank of the tensor-parallel group keeps the same states.

    Relies on the lists of new and of finished requests in the scheduler's output; a request resumed after a preemption
    is among the new ones with one runner and not with the other.

    Raises:
        RuntimeError: if this vLLM lacks what is relied on.
        ValueError: if the model cannot give the layers asked for.
    """
    config = runner.vllm_config
    is_v2 = config.use_v2_model_runner
    check_runner(runner, is_v2)
    num_layers = config.model_config.get_total_num_hidden_layers()
    layers = Layers(options.resolve_layers(num_layers), num_layers)
    if layers.include_last:
        _check_last_state(runner)
    if layers.auxiliary:
        _ask_for_auxiliary_states(runner, layers.auxiliary)
    external = config.parallel_config.distributed_executor_backend == "external_launcher"
    # With an external launcher every rank is an engine of its own, whose user asks that rank alone.
    if get_tp_group().rank_in_group != 0 and not external:
        return None

    model_config = config.model_config
    dtype = options.resolve_dtype(model_config.dtype)
    width = model_config.get_hidden_size()
    buffer = RowBuffer(len(options.layers), width, dtype, runner.device, options.max_bytes)
    capture = HiddenStateCapture(options, buffer)
    execute_model = runner.execute_model

    @functools.wraps(execute_model)
    def execute_and_record(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute_model(scheduler_output, *args, **kwargs)
        for request_id in scheduler_output.finished_req_ids:
            capture.finish(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            capture.begin(new.req_id, len(new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids))
        if runner.execute_model_state is not None:
            with torch.inference_mode():
                capture.record(read_step(runner, layers, is_v2))
        return result

    runner.execute_model = execute_and_record
    if runner.device.type != "cpu":
        runner.profile_run = _beside_buffer(runner.profile_run, runner.device, options.max_bytes)
    return capture


def _check_last_state(runner: Any) -> None:
    """Refuse models whose last state is not what it is in ``transformers``."""
    name = type(runner.get_model()).__name__
    if name in NORM_IN_HEAD | SCALED:
        what = "applies the final norm within its output head" if name in NORM_IN_HEAD else "scales its last state"
        raise ValueError(
            f"{name}: in vLLM this model {what}, so that the state after the final norm cannot be seen; ask for other "
            "layers, or try model_impl='transformers'"
        )


def _ask_for_auxiliary_states(runner: Any, layers: tuple[int, ...]) -> None:
    """Have the model return the inputs of ``layers`` beside its result, by the interface made for EAGLE-3.

    Relies on the runner unpacking that pair when ``use_aux_hidden_state_outputs`` is set. Nothing is compiled yet.
    """
    model = runner.get_model()
    if not supports_eagle3(model):
        raise ValueError(
            f"{type(model).__name__} cannot give the states of intermediate layers: in this vLLM it does not implement "
            "the EAGLE-3 interface. Try model_impl='transformers', or layers=[-1], the state after the final norm"
        )
    require(model, "set_aux_hidden_state_layers")
    model.set_aux_hidden_state_layers(layers)
    runner.use_aux_hidden_state_outputs = True


def _beside_buffer(profile_run: Callable[..., None], device: torch.device, max_bytes: int) -> Callable[..., None]:
    """vLLM sizes the KV cache by the memory that ``profile_run`` takes: let the full buffer be a part of it."""

    @functools.wraps(profile_run)
    def profile(*args: Any, **kwargs: Any) -> None:
        reserved = torch.empty(max_bytes, dtype=torch.uint8, device=device)
        profile_run(*args, **kwargs)
        del reserved

    return profile
