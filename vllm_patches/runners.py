"""Converts the step that a vLLM model runner has just computed to a common format for both model runners.

Both runners keep their results in ``execute_model_state`` between ``execute_model`` and ``sample_tokens``. All other
information comes from the batch that a runner prepares for each step.
"""

from typing import Any

import numpy as np
from torch import Tensor

from vllm_patches.capture import ForwardStep
from vllm_patches.compat import require


class LayerSelection:
    """Selection of the captured layers among the tensors that a model returns.

    A model returns the state after the final norm. If EAGLE-3 layers are set on the model, it also returns a list of
    the inputs of these layers in ascending order. The input of layer k + 1 is the output of layer k.
    """

    def __init__(self, layers: tuple[int, ...], num_layers: int) -> None:
        """Select ``layers`` by their nonnegative indices. ``num_layers - 1`` is the state after the final norm."""
        self.auxiliary = tuple(sorted(layer + 1 for layer in layers if layer != num_layers - 1))
        self._places = [None if layer == num_layers - 1 else self.auxiliary.index(layer + 1) for layer in layers]

    @property
    def include_last(self) -> bool:
        """Whether the state after the final norm is captured."""
        return None in self._places

    def pick(self, final: Tensor, auxiliary: list[Tensor]) -> list[Tensor]:
        """Return the captured tensors in order. ``auxiliary`` contains the inputs of the layers ``self.auxiliary``."""
        return [final if place is None else auxiliary[place] for place in self._places]


def check_runner(runner: Any, is_v2: bool) -> None:
    """Check that a runner has the attributes that :func:`read_step` and the capture need.

    Raises ``RuntimeError`` with the names of any missing attributes.
    """
    require(runner, "execute_model", "execute_model_state", "use_aux_hidden_state_outputs", "profile_run")
    if not is_v2:
        require(runner, "input_batch", "query_start_loc", "discard_request_mask")
        require(runner.input_batch, "req_ids", "num_reqs", "num_computed_tokens_cpu")


def read_step(runner: Any, layers: LayerSelection, is_v2: bool) -> ForwardStep:
    """Return the step whose results are in ``runner.execute_model_state``."""
    return (_read_v2 if is_v2 else _read_v1)(runner, layers)


def _read_v1(runner: Any, layers: LayerSelection) -> ForwardStep:
    """Read the step of ``v1/worker/gpu_model_runner.py``, or of the CPU runner, which is derived from it.

    This assumes that ``input_batch`` and the buffers filled by ``_prepare_inputs`` do not change until the next step.
    """
    state, batch = runner.execute_model_state, runner.input_batch
    count = batch.num_reqs
    starts = runner.query_start_loc
    one_each = state.scheduler_output.total_num_scheduled_tokens == count
    return ForwardStep(
        request_ids=batch.req_ids,
        computed=batch.num_computed_tokens_cpu[:count],
        scheduled=np.ones(count, dtype=np.int64) if one_each else np.diff(starts.np[: count + 1]),
        sampled=~runner.discard_request_mask.np[:count],
        last_rows=None if one_each else starts.gpu[1 : count + 1] - 1,
        states=layers.pick(state.hidden_states, state.aux_hidden_states),
    )


def _read_v2(runner: Any, layers: LayerSelection) -> ForwardStep:
    """Read the step of ``v1/worker/gpu/model_runner.py``, which describes each step in an ``InputBatch``.

    A sampled token is kept only if the step completes the prefill (``prefill_len_np``). After a preemption, the prefill
    includes the response so far.
    """
    state = runner.execute_model_state
    batch = state.input_batch
    count = batch.num_reqs
    computed, scheduled = batch.num_computed_tokens_np[:count], batch.num_scheduled_tokens[:count]
    return ForwardStep(
        request_ids=batch.req_ids,
        computed=computed,
        scheduled=scheduled,
        sampled=computed + scheduled >= batch.prefill_len_np[:count],
        last_rows=None if batch.num_tokens == count else batch.query_start_loc[1 : count + 1] - 1,
        states=layers.pick(state.hidden_states, state.aux_hidden_states),
    )
