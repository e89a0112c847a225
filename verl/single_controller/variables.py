"""Which of this process's environment variables a run's workers get, on whatever machine they are."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

PASSED = ("NCCL_*", "GLOO_*", "UCX_*", "HF_*", "TORCH_*", "CUDA_*", "PYTORCH_*", "VLLM_*", "OMP_*")
"""Patterns of names that always travel."""

OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP")
"""Variables of one machine: on the others Ray and the run set them."""

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CRED|AUTH", re.IGNORECASE)
"""Names of values that must not be shown. Ray writes a worker's declared environment into its logs."""


def passed_variables(names: Sequence[str] = ()) -> dict[str, str]:
    """The variables set here that match ``PASSED`` or ``names``, which may hold ``*``."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in OF_ONE_MACHINE and any(fnmatchcase(name, pattern) for pattern in (*PASSED, *names))
    }


def is_secret(name: str) -> bool:
    """Whether the variable's value must not be shown."""
    return SECRET.search(name) is not None
