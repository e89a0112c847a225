"""Records hidden states in an engine's workers and returns them on request.

Once vLLM's worker has loaded the model, the states of every ``execute_model`` call of its runner are recorded.
``take_hidden_states`` returns them, and ``hidden_states_memory`` reports their memory use. Both methods are called
through vLLM's ``collective_rpc``. The model, its compilation and its CUDA graphs remain unchanged.
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
from vllm_patches.capture import HiddenStateCapture, reserved_bytes
from vllm_patches.compat import patch, require
from vllm_patches.options import CaptureOptions
from vllm_patches.resume import num_read
from vllm_patches.runners import LayerSelection, check_runner, read_step
from vllm_patches.sampler import asks_for_streams, attach_streams

logger = logging.getLogger(__name__)

NORM_IN_HEAD = {"MiMoForCausalLM", "Step3p5ForCausalLM", "KimiK3ForConditionalGeneration"}
"""Models for which vLLM applies the final norm in the output head, so that runners cannot access the result."""

SCALED = {"MiniCPMForCausalLM", "MiniCPM3ForCausalLM"}
"""Models for which vLLM scales the state after the final norm before returning it to the runner."""


def install() -> None:
    """Patch vLLM's worker class, from which the workers for CPUs and other devices are derived."""
    patch(Worker, "load_model", _load_model)
    worker_class: Any = Worker  # Any, because vLLM does not declare these methods
    worker_class.take_hidden_states = take_hidden_states
    worker_class.hidden_states_memory = hidden_states_memory


def take_hidden_states(
    worker: Any, requests: list[tuple[str, int]], abandoned: list[str], as_bytes: bool
) -> list[dict[str, Tensor]] | list[bytes] | str | None:
    """Return the states of ``requests``, pairs of id and number of tokens, and release the states of ``abandoned``.

    All workers are called, but workers without states return None. With ``as_bytes``, the tensors of each request are
    serialized with safetensors to pass them between processes. Errors are returned as text. An exception would leave
    the replies of other workers unread, and the next call would receive these replies.
    """
    capture: HiddenStateCapture | None = getattr(worker, "hidden_state_capture", None)
    if capture is None:
        return None
    for request_id in abandoned:
        capture.drop(request_id)
    # The results are ordinary tensors, which a user may differentiate, even if the engine calls in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        try:
            results = capture.take(requests)
        except Exception as error:  # a reducer may raise anything
            logger.exception("Hidden states of finished responses are lost")
            return f"{type(error).__name__}: {error}"
    return [_to_bytes(result) for result in results] if as_bytes else results


def hidden_states_memory(worker: Any) -> dict[str, int] | None:
    """Return a worker's memory use for hidden states, or None if it keeps none. Called through ``collective_rpc``.

    The result contains the numbers of requests and rows, and current and peak bytes on the device and (for spilled
    rows) on the host. vLLM keeps ``reserved_bytes`` on the device for states and reducer when sizing the KV cache.
    """
    capture: HiddenStateCapture | None = getattr(worker, "hidden_state_capture", None)
    if capture is None:
        return None
    names = ("num_rows", "device_bytes", "host_bytes", "peak_device_bytes", "peak_host_bytes")
    held = {name: getattr(capture.buffer, name) for name in names}
    buffer, longest = capture.buffer, worker.vllm_config.model_config.max_model_len
    reserved = reserved_bytes(capture.options, longest, buffer.row_shape[1], buffer.dtype.itemsize)
    return {"num_requests": len(capture), "reserved_bytes": reserved} | held


def _to_bytes(result: dict[str, Tensor]) -> bytes:
    # Copy, because safetensors rejects tensors that share memory.
    return safetensors.torch.save({name: value.to("cpu", copy=True).contiguous() for name, value in result.items()})


def _load_model(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    additional_config = self.vllm_config.additional_config
    if asks_for_streams(additional_config) and not hasattr(self, "samples_from_streams"):
        attach_streams(self.model_runner)
        self.samples_from_streams = True
    options = CaptureOptions.parse(additional_config)
    if options is not None and not hasattr(self, "hidden_state_capture"):
        self.hidden_state_capture = capture = attach(self.model_runner, options)
        if capture is not None:
            self.compile_or_warm_up_model = _clear_after(self.compile_or_warm_up_model, capture)


def _clear_after(warm_up: Callable[..., Any], capture: HiddenStateCapture) -> Callable[..., Any]:
    """Clear the capture after vLLM's warm-up, because the states of warm-up requests are never collected."""

    @functools.wraps(warm_up)
    def warm_up_and_clear(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        capture.clear()
        return result

    return warm_up_and_clear


def attach(runner: Any, options: CaptureOptions) -> HiddenStateCapture | None:
    """Make a runner record its steps. Return the capture, or None if another tensor-parallel rank keeps the states.

    This relies on the lists of new and finished requests in the scheduler's output. Some runners list a request as new
    again when it resumes after a preemption.

    Raises:
        RuntimeError: If this version of vLLM lacks an attribute that the capture relies on.
        ValueError: If the model cannot return the requested layers.
    """
    config = runner.vllm_config
    is_v2 = config.use_v2_model_runner
    check_runner(runner, is_v2)
    num_layers = config.model_config.get_total_num_hidden_layers()
    layers = LayerSelection(options.resolve_layers(num_layers), num_layers)
    if layers.include_last:
        _check_last_state(runner)
    if layers.auxiliary:
        _enable_auxiliary_states(runner, layers.auxiliary)
    external = config.parallel_config.distributed_executor_backend == "external_launcher"
    # With an external launcher, every rank is a separate engine, so its user receives only this rank's reply.
    if get_tp_group().rank_in_group != 0 and not (external and options.ranks == "all"):
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
            prompt = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
            capture.begin(new.req_id, len(prompt), num_read(new.sampling_params))
        if runner.execute_model_state is not None:
            with torch.inference_mode():
                capture.record(read_step(runner, layers, is_v2))
        return result

    runner.execute_model = execute_and_record
    if runner.device.type != "cpu":
        reserved = reserved_bytes(options, model_config.max_model_len, width, dtype.itemsize)
        runner.profile_run = reserving(runner.profile_run, runner.device, reserved)
    return capture


def _check_last_state(runner: Any) -> None:
    """Raise ``ValueError`` if the model's last state differs from the one in ``transformers``."""
    name = type(runner.get_model()).__name__
    if name in NORM_IN_HEAD | SCALED:
        what = "applies the final norm within its output head" if name in NORM_IN_HEAD else "scales its last state"
        raise ValueError(
            f"{name}: in vLLM this model {what}, so the state after the final norm is not available; ask for other "
            "layers, or try model_impl='transformers'"
        )


def _enable_auxiliary_states(runner: Any, layers: tuple[int, ...]) -> None:
    """Make the model return the inputs of ``layers`` in addition to its result, using the EAGLE-3 interface.

    A runner with ``use_aux_hidden_state_outputs`` must unpack the pair. The model must not be compiled yet.
    """
    model = runner.get_model()
    supported: bool = supports_eagle3(model)  # a variable, so that its type guard does not narrow the model to a class
    if not supported:
        raise ValueError(
            f"{type(model).__name__} cannot return the states of intermediate layers: in this vLLM it does not "
            "implement the EAGLE-3 interface. Try model_impl='transformers', or layers=[-1], the state after the final "
            "norm"
        )
    require(model, "set_aux_hidden_state_layers")
    model.set_aux_hidden_state_layers(layers)
    runner.use_aux_hidden_state_outputs = True


def reserving(profile_run: Callable[..., None], device: torch.device, num_bytes: int) -> Callable[..., None]:
    """Add ``num_bytes`` to the memory use measured by ``profile_run``, from which vLLM computes the KV cache size."""

    @functools.wraps(profile_run)
    def profile(*args: Any, **kwargs: Any) -> None:
        reserved = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        profile_run(*args, **kwargs)
        del reserved

    return profile
