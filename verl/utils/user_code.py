"""Loads, checks and calls user code specified by an import path, ``module:name`` or ``file.py:name``.

All options that specify user code use these functions. If possible, errors are reported before Ray starts. Runtime
errors state the option, and the file and line of the user's code. Importing this module is fast.
"""

import hashlib
import importlib
import importlib.util
import inspect
import multiprocessing
import sys
import sysconfig
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.errors import ConfigError
from verl.config.paths import find_path, places

HERE = Path(__file__)
LIBRARIES = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{HERE.parents[1]}/",
)
"""Folders whose files are not user code."""


def is_file(path: str) -> bool:
    """Return whether ``path`` refers to a file (``folder/mine.py``) rather than a module (``package.mine``)."""
    return path.endswith(".py")


def source_file(path: str) -> Path | None:
    """Return the source file of ``module:function`` or ``file.py:function``."""
    module = path.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def is_import_path(name: str) -> bool:
    """Return whether an option's value ``name`` is an import path rather than the name of a built-in."""
    return ":" in name


def load_code(path: str, field: str) -> Any:
    """Load the function or class at the import path ``path``, which is the value of the option ``field``.

    Raises ``ConfigError`` if the file, module or name does not exist, if importing it fails, or if it is not callable.
    """
    module, _, name = path.rpartition(":")
    where = f"{field}={path!r}"
    code: Any = load_module(module, where)
    for part in name.split("."):
        code = getattr(code, part, None)
    if not callable(code):
        raise ConfigError(f"{where}: {module} has no function or class {name!r}")
    return code


def load_class(path: str, name: str, path_field: str, name_field: str) -> type[Any]:
    """Load the class ``name`` from the file or module ``path``. Each is a separate option, as in veRL."""
    code = getattr(load_module(path, f"{path_field}={path!r}"), name, None)
    if not isinstance(code, type):
        raise ConfigError(f"{name_field}={name!r}: {path} has no class of this name")
    return code


def check_signature(
    where: str, code: Callable[..., Any], inputs: Sequence[str], kwargs: Mapping[str, Any], kwargs_field: str = ""
) -> None:
    """Raise a ``ConfigError`` whose message starts with ``where`` if ``code`` does not accept the arguments.

    Args:
        inputs: Names of the positional arguments, for the message.
        kwargs: Keyword arguments from the option ``kwargs_field``.
    """
    try:
        signature = inspect.signature(code)
    except (ValueError, TypeError):  # functions written in C may have no signature
        return
    try:
        signature.bind(*inputs, **kwargs)
    except TypeError as error:
        call = f"it is called with ({', '.join(inputs)})" if inputs else f"{getattr(code, '__name__', code)} is made"
        given = f"{' and' if inputs else ' with'} {kwargs_field}={dict(kwargs)}" if kwargs_field else ""
        raise ConfigError(f"{where}: {error}; {call}{given}{definition(code)}") from error


def definition(code: Callable[..., Any]) -> str:
    """Return the file and first line (with decorators) of a function or class, or an empty string if unknown."""
    try:
        return f" ({inspect.getsourcefile(code)}, line {inspect.getsourcelines(code)[1]})"
    except (TypeError, OSError):
        return ""


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert an error in user code to a ``ConfigError``.

    The message starts with ``what`` (the option and the call) and ends with the file and line of the user's code.
    """
    try:
        yield
    except (ConfigError, CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # user code may raise anything, a panic of Rust included
        if isinstance(error, KeyboardInterrupt) and multiprocessing.parent_process() is None:
            raise
        raise ConfigError(f"{what} {raised(error)}") from error


def raised(error: BaseException) -> str:
    """Describe an error in user code and its location, such as ``raised KeyError: 5 (mine.py, line 3)``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) != HERE]
    frames = [frame for frame in frames if not frame.filename.startswith("<") and "importlib" not in frame.filename]
    # Often, a library raises the error because the user's code calls it incorrectly.
    frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = f"raised {described(error)}"
    if isinstance(error, AttributeError) and error.name and "did you mean" not in text:
        near = get_close_matches(error.name, dir(error.obj), n=1)
        text += f"; did you mean {near[0]!r}?" if near else ""
    return text + place


def described(error: BaseException) -> str:
    """Return the type and the first line of an error, or only the type if the error's ``__str__`` fails."""
    try:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    except Exception:
        return type(error).__name__


class UserFunction:
    """User-defined function that is called with inputs and with keyword arguments from the config.

    Raises ``ConfigError`` if the function cannot be loaded, is a class, or does not accept its arguments.
    """

    def __init__(
        self,
        field: str,
        path: str,
        inputs: Sequence[str],
        kwargs: Mapping[str, Any] | None = None,
        optional: Sequence[str] = (),
    ) -> None:
        """Load the function.

        Args:
            field: Option that names the function. If ``kwargs`` is not None, it is the value of ``<field>_kwargs``.
            path: Value of the option ``field``.
            inputs: Names of the positional arguments, for messages.
            optional: Names of inputs that are passed only if the function has parameters with these names.
        """
        self.where = f"{field}={path!r}"
        self.function = load_code(path, field)
        self.kwargs = dict(kwargs or {})
        if isinstance(self.function, type):
            raise ConfigError(f"{self.where}: is a class; name a function (what has state is a trainer.method)")
        self.optional = [name for name in optional if name in _parameters(self.function)]
        """Names of the optional inputs that are passed to the function."""
        named = self.kwargs | dict.fromkeys(self.optional)
        check_signature(self.where, self.function, inputs, named, "" if kwargs is None else f"{field}_kwargs")

    def __call__(self, *inputs: Any, **optional: Any) -> Any:
        """Call the function, and convert any exception that it raises to a ``ConfigError``."""
        with user_code(f"{self.where}:"):
            return self.function(*inputs, **self.kwargs, **optional)


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # functions written in C may have no signature
        return ()


def check_tensor(where: str, value: Any, *shapes: Sequence[int], what: str = "") -> None:
    """Raise ``ConfigError`` if ``value``, returned by user code, is not a tensor with one of ``shapes``.

    ``what`` is appended to the shapes in the message.
    """
    fits = hasattr(value, "is_complex") and not value.is_complex() and tuple(value.shape) in map(tuple, shapes)
    if not fits:
        returned = f"shape {list(value.shape)}" if hasattr(value, "shape") else type(value).__name__
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ConfigError(f"{where}: returned {returned}; expected a tensor of shape {expected}{what}")


def check_finite(where: str, value: Any, hint: str = "") -> None:
    """Raise ``ConfigError`` if the tensor ``value [B, ...]`` contains NaN or infinity."""
    wrong = (~value.isfinite()).reshape(len(value), -1).any(dim=1).nonzero()
    if len(wrong):
        raise ConfigError(f"{where}: returned NaN or infinity in row {int(wrong[0])}; expected finite numbers{hint}")


def kl_estimator(name: str, field: str, kwargs: Mapping[str, Any]) -> str | Callable[[Any, Any], Any]:
    """Return ``name`` unchanged, or the user's KL estimator with checks of its results if ``name`` is an import path.

    The estimator accepts ``(logprobs, ref_logprobs)``, both [B, R] in nats, and returns estimates of the divergence per
    token, [B, R]. If ``logprobs`` require a gradient, the estimates must be differentiable.
    """
    if not is_import_path(name):
        return name
    function = UserFunction(field, name, ("logprobs", "ref_logprobs"), kwargs)

    def estimate(logprobs: Any, ref_logprobs: Any) -> Any:
        values = function(logprobs, ref_logprobs)
        check_tensor(function.where, values, logprobs.shape, what=", one value per token")
        if logprobs.requires_grad and not values.requires_grad:
            raise ConfigError(f"{function.where}: returned no gradient; compute it from logprobs with torch")
        # In the loss, the optimizer step detects nonfinite values without waiting for the device.
        if not logprobs.requires_grad:
            check_finite(function.where, values, ", for equal inputs too")
        return values

    return estimate


def load_module(path: str, where: str) -> ModuleType:
    """Import a file or module. Raise a ``ConfigError`` whose message starts with ``where`` if the import fails."""
    path = find_path(path) if is_file(path) else path
    if is_file(path) and not Path(path).is_file():
        raise ConfigError(f"{where}: no such file ({places(path)}); name a .py file or a module")
    hint = "" if is_file(path) else "; is its folder on PYTHONPATH? A file is named by its path, which ends in .py"
    try:
        return _import_file(Path(path)) if is_file(path) else importlib.import_module(path)
    except (Exception, SystemExit) as error:  # user modules may raise anything
        raise ConfigError(f"{where}: importing it {raised(error)}{hint}") from error


def _import_file(file: Path) -> ModuleType:
    """Import ``file``, in any folder. Return the same module until the file changes."""
    # Two files can have the same name, and neither must hide a library of that name.
    identity = str(file.resolve()).encode() + b"\0" + file.read_bytes()
    name = f"{file.stem}_{hashlib.blake2b(identity, digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "the name of a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
