"""Modules of a researcher's own: reward functions, data sets, samplers."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def is_file(path: str) -> bool:
    """Whether ``path`` names a file, ``folder/mine.py``, rather than a module, ``package.mine``."""
    return path.endswith(".py")


def import_user_module(path: str) -> ModuleType:
    """The module that ``path`` names; raises whatever importing it raises."""
    return _import_file(Path(path)) if is_file(path) else importlib.import_module(path)


def _import_file(file: Path) -> ModuleType:
    """The module in ``file``, whatever folder that is in."""
    # Two files may share a name, and neither may hide a library of that name.
    name = f"{file.stem}_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "the name of a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
