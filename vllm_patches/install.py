"""The few places where the capture touches vLLM's internals, each behind one small function.

Relied upon, in vLLM 0.24 to 0.33:
- ``GPUModelRunner.load_model`` builds ``self.model``; the CPU runner overrides it;
- ``GPUModelRunner.execute_model`` calls ``self.model.compute_logits(rows)`` once, with one row per request of
  ``self.input_batch.req_ids``, and has set ``self.discard_request_mask`` by then;
- ``RequestState._new_completion_output`` builds the ``CompletionOutput`` of one request in the front end.
"""

import functools
import os
from typing import Any

from torch import Tensor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_patches.capture import CaptureOptions, HiddenStateCapture

_captures: list[HiddenStateCapture] = []
"""Captures of this process's engines. Request ids are unique within a process, so that one look-up finds the owner."""


def install() -> None:
    """Patch the classes of this process; doing it twice changes nothing."""
    if getattr(GPUModelRunner, "_hidden_states_installed", False):
        return
    GPUModelRunner._hidden_states_installed = True
    for runner_class in (GPUModelRunner, CPUModelRunner):
        if "load_model" in vars(runner_class):
            _wrap_load_model(runner_class)
    _wrap_completion_output()


def _wrap_load_model(runner_class: Any) -> None:
    original = runner_class.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        raw = (self.vllm_config.additional_config or {}).get("hidden_states")
        if raw is not None:
            _require_in_process()
            _attach(self, HiddenStateCapture(CaptureOptions.parse(raw)))
        return result

    runner_class.load_model = load_model


def _require_in_process() -> None:
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0":
        raise RuntimeError(
            "hidden-state capture needs the engine in this process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before "
            "importing vllm"
        )


def _attach(runner: Any, capture: HiddenStateCapture) -> None:
    """Record the rows of every ``execute_model`` of ``runner``; profiling and prompt log-probs are left alone."""
    if hasattr(runner, "hidden_state_capture"):
        return
    runner.hidden_state_capture = capture
    _captures.append(capture)
    executing = False
    execute_model, compute_logits = runner.execute_model, runner.model.compute_logits

    @functools.wraps(execute_model)
    def execute_and_mark(*args: Any, **kwargs: Any) -> Any:
        nonlocal executing
        executing = True
        try:
            return execute_model(*args, **kwargs)
        finally:
            executing = False

    @functools.wraps(compute_logits)
    def compute_and_record(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if executing:
            request_ids = runner.input_batch.req_ids
            capture.record(states, request_ids, runner.discard_request_mask.np[: len(request_ids)].tolist())
        return compute_logits(states, *args, **kwargs)

    runner.execute_model = execute_and_mark
    runner.model.compute_logits = compute_and_record


def _wrap_completion_output() -> None:
    original = RequestState._new_completion_output

    @functools.wraps(original)
    def new_completion_output(self: Any, token_ids: Any, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, token_ids, finish_reason, *args, **kwargs)
        if finish_reason is not None:
            owner = next((c for c in _captures if self.request_id in c), None)
            if owner is not None:
                output.hidden_states = owner.pop(self.request_id, len(output.token_ids))
        return output

    RequestState._new_completion_output = new_completion_output
