"""Memory that an engine reserves for captured hidden states."""

from verl.config.calculator import CalculatorConfig
from verl.rank.calculator import capture_options
from vllm_patches import capture
from vllm_patches.options import CaptureOptions


def reserved_bytes(calculator: CalculatorConfig, max_model_len: int, width: int, itemsize: int) -> int:
    """Return the number of bytes per device that are needed to store and measure hidden states.

    Args:
        max_model_len: Maximum sequence length in tokens.
        width: Number of elements in a hidden state.
        itemsize: Bytes per element of a hidden state.
    """
    if not calculator.measured_by("rollout"):
        return 0
    options = CaptureOptions.parse({"hidden_states": capture_options(calculator)})
    assert options is not None, "capture_options names hidden states"
    return capture.reserved_bytes(options, max_model_len, width, itemsize)
