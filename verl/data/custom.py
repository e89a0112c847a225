"""Classes of a researcher's own, named by file or module: data sets and samplers."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.config.errors import ConfigError
from verl.utils.user_code import import_user_module, is_file

HERE = Path(__file__).parent


def load_class(path: str, name: str, path_field: str, name_field: str) -> type[Any]:
    """The class ``name`` of ``path``, a file ``folder/mine.py`` or a module ``package.mine``.

    Raises:
        ConfigError: there is no such file, module or class, or importing it raised; names the option.
    """
    if is_file(path) and not Path(path).is_file():
        raise ConfigError(f"{path_field}={path!r}: no such file; name a .py file or a module")
    hint = "" if is_file(path) else "; is its folder on PYTHONPATH? A file is named by its path, which ends in .py"
    try:
        module = import_user_module(path)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(f"{path_field}={path!r}: importing it raised {_named(error)}{hint}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{name_field}={name!r}: {path} has no class of this name")
    return found


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn what a user's class raises into a ``ConfigError`` that begins with ``what``, its option and the call, and
    ends with the place in the user's file."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's class may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != HERE]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(f"{what} raised {_named(error)}{place}") from error


def _named(error: BaseException) -> str:
    """The name of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
