"""VERL: reinforcement learning with verifiable rewards, shaped by the effective rank of hidden states.

Public names are imported on first use (docs/python.md).
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "ConfigError": "verl.config.errors",
    "Evaluation": "verl.api",
    "RepresentationMetricsCalculator": "verl.rank.calculator",
    "Run": "verl.api",
    "RunError": "verl.api",
    "evaluate": "verl.api",
    "score": "verl.api",
    "train": "verl.api",
}
"""Public name -> module that defines it."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _refuse_verl() -> None:
    """Raise ``ImportError`` if ByteDance's veRL is installed, because its package is also called ``verl``."""
    try:
        other = version("verl")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"veRL {other} (the distribution `verl`) is installed in this environment, and imports as `verl` like this one "
        "(`verl-rank`); use an environment without it, or `pip uninstall verl` and install verl-rank again"
    )


_refuse_verl()
