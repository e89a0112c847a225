"""Memory that an engine reserves for the hidden states that it captures."""

from verl.config.calculator import CalculatorConfig
from verl.rank.calculator import capture_options
from vllm_patches import capture
from vllm_patches.options import CaptureOptions


def reserved_bytes(calculator: CalculatorConfig, max_model_len: int, width: int, itemsize: int) -> int:
    """Return the bytes on each device for the states of responses and the workspace that measures them.

    Args:
        max_model_len: longest sequence in tokens.
        width: of a hidden state.
        itemsize: bytes of a number in it.
    """
    if not calculator.measured_by("rollout"):
        return 0
    options = CaptureOptions.parse({"hidden_states": capture_options(calculator)})
    assert options is not None, "capture_options names hidden states"
    return capture.reserved_bytes(options, max_model_len, width, itemsize)
