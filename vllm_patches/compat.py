"""Checks vLLM's version and the attributes that the plugin needs, and patches or rejects engines."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_patches.options import KEY

SUPPORTED = SpecifierSet(">=0.24,<0.34")

STREAMS = "sampling_streams"
"""Key in vLLM's ``additional_config``. If true, the engine samples from the random streams that requests specify."""


def is_supported(version: str) -> bool:
    """Return whether the plugin supports a version of vLLM, ignoring local and pre-release suffixes."""
    try:
        return Version(version).base_version in SUPPORTED
    except InvalidVersion:
        return False


def require(owner: object, *names: str) -> None:
    """Check that an object or class of vLLM has the attributes that the plugin relies on.

    Raises:
        RuntimeError: If attributes are missing. The message contains them, vLLM's version and the supported range.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        where = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise RuntimeError(
            f"vLLM {vllm.__version__}: {where} has no {', '.join(missing)}, which the plugin relies on; it supports "
            f"vllm{SUPPORTED}"
        )


def patch(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of a vLLM class with one that calls ``replacement(original method, self, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(owner, name, method)


def refuse(reason: str) -> None:
    """Make engines that enable the plugin fail at startup with the message ``reason``. Other engines are unaffected."""
    try:
        # Import lazily, because an unsupported vLLM may not have these classes.
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError:
        logging.getLogger(__name__).warning(reason)
        return
    for engine_class in (LLMEngine, AsyncLLM):
        patch(engine_class, "__init__", functools.partial(_refusing_init, reason))


def _refusing_init(reason: str, original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    additional_config = getattr(config, "additional_config", None)
    if isinstance(additional_config, dict) and (KEY in additional_config or additional_config.get(STREAMS)):
        raise RuntimeError(reason)
    original(self, *args, **kwargs)
