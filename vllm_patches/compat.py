"""Which vLLM this package works with, and what to say if it meets another."""

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED = SpecifierSet(">=0.24,<0.34")


def is_supported(version: str) -> bool:
    """Whether the capture knows this version of vLLM; local and pre-release parts do not matter."""
    try:
        return Version(version).base_version in SUPPORTED
    except InvalidVersion:
        return False


def check_version() -> None:
    """Refuse to capture hidden states with an unknown vLLM.

    Raises:
        RuntimeError: naming the version found and the range supported.
    """
    if not is_supported(vllm.__version__):
        raise RuntimeError(f"vLLM {vllm.__version__}: hidden states can be captured with vllm{SUPPORTED}")


def require(owner: object, *names: str) -> None:
    """Check that an object or class of vLLM has what the capture relies on.

    Raises:
        RuntimeError: naming what is missing, the version found and the range supported.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        where = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise RuntimeError(
            f"vLLM {vllm.__version__}: {where} has no {', '.join(missing)}, which the capture of hidden states relies "
            f"on; it knows vllm{SUPPORTED}"
        )
