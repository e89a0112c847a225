"""A researcher's own code, named by module or file: reward functions, data sets, samplers, losses, and the like."""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.errors import ConfigError

HERE = Path(__file__)
LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Where files are that are not the user's."""


def is_file(path: str) -> bool:
    """Whether ``path`` names a file, ``folder/mine.py``, rather than a module, ``package.mine``."""
    return path.endswith(".py")


def is_own(name: str) -> bool:
    """Whether ``name``, the value of an option, is an import path, ``module:attribute`` or ``file.py:attribute``, and
    not one of this project's names."""
    return ":" in name


def import_user_module(path: str) -> ModuleType:
    """The module that ``path`` names; raises whatever importing it raises."""
    return _import_file(Path(path)) if is_file(path) else importlib.import_module(path)


def load_class(path: str, name: str, path_field: str, name_field: str) -> type[Any]:
    """The class ``name`` of ``path``, a file ``folder/mine.py`` or a module ``package.mine``.

    Raises:
        ConfigError: there is no such file, module or class, or importing it raised; names the option.
    """
    found = getattr(_module(path, f"{path_field}={path!r}"), name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{name_field}={name!r}: {path} has no class of this name")
    return found


def load_own(path: str, field: str) -> Callable[..., Any]:
    """The function or class that ``path``, ``module:attribute`` or ``file.py:attribute``, names.

    Raises:
        ConfigError: there is no such file, module or attribute, it cannot be called, or importing it raised; names the
            option ``field``.
    """
    module, _, name = path.rpartition(":")
    where = f"{field}={path!r}"
    found: Any = _module(module, where)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{where}: {module} has no function or class {name!r}")
    return found  # type: ignore[no-any-return]  # narrowed by callable() to an object alone


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn what a user's code raises into a ``ConfigError`` that begins with ``what``, its option and the call, and
    ends with the place in the user's file."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) != HERE]
        # Often it is a library, called with something wrong, that raises.
        frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(f"{what} raised {_named(error)}{place}") from error


def _module(path: str, where: str) -> ModuleType:
    if is_file(path) and not Path(path).is_file():
        raise ConfigError(f"{where}: no such file; name a .py file or a module")
    hint = "" if is_file(path) else "; is its folder on PYTHONPATH? A file is named by its path, which ends in .py"
    try:
        return import_user_module(path)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(f"{where}: importing it raised {_named(error)}{hint}") from error


def _named(error: BaseException) -> str:
    """The name of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _import_file(file: Path) -> ModuleType:
    """The module in ``file``, whatever folder that is in; the same one until the file changes."""
    # Two files may share a name, and neither may hide a library of that name.
    identity = str(file.resolve()).encode() + b"\0" + file.read_bytes()
    name = f"{file.stem}_{hashlib.blake2b(identity, digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "the name of a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
