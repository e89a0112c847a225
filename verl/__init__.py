"""VERL: reinforcement learning with verifiable rewards and auxiliary signals from the effective rank of hidden states.

Public names are imported lazily, on first use (docs/python.md).
"""

from difflib import get_close_matches
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
"""Maps each public name to the module that defines it."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name.endswith("Trainer"):  # TRL's classes and veRL's
        raise ImportError(
            f"verl has no {name}: verl.train(...) and `bash train.sh` train (docs/python.md); docs/from_trl.md and "
            "docs/from_verl.md have the names of options"
        )
    if name not in _HOMES:
        near = get_close_matches(name, _HOMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
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
