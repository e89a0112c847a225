"""Engines that sample responses inside a worker."""

import os


def engine_environment(device_type: str) -> dict[str, str]:
    """Environment of a worker process that holds a vLLM engine; what the user has set already is kept."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine must share its process with the trained model
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second is not tried with the trainer yet
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device_type == "cpu":
        # vLLM compiles some helpers even in eager mode; on CPU that takes a C++ compiler and 15 s at the first batch.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
