"""A researcher's own functions and classes at extension points: checked early, called with checks, saved as JSON."""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from verl.config.errors import ConfigError
from verl.utils.json_state import from_json, to_json
from verl.utils.user_code import load_code, user_code


class Own:
    """An object of the user's, with state if it has ``state_dict`` and ``load_state_dict``.

    The state may hold what JSON holds and tensors.
    """

    def __init__(self, field: str, path: str, inner: Any) -> None:
        """
        Args:
            field: the option that named it.
            path: the option's value.

        Raises:
            ConfigError: it has only one of these methods, or its state cannot be saved.
        """
        self.field = field
        self.where = f"{field}={path!r}"
        self.inner = inner
        has = [hasattr(inner, method) for method in ("state_dict", "load_state_dict")]
        if any(has) != all(has):
            raise ConfigError(f"{self.where}: define both state_dict and load_state_dict, or neither")
        self.has_state = all(has)
        self.state()  # what cannot be saved is found before training

    def state(self) -> Any:
        """The state as JSON; None without one."""
        if not self.has_state:
            return None
        with user_code(f"{self.where}: its state_dict(), which may hold what JSON holds and tensors,"):
            return to_json(self.inner.state_dict())

    def load_state(self, state: Any) -> None:
        """Go on from what :meth:`state` returned.

        Raises:
            ConfigError: the state is missing or there is nobody to take it, or the user's code raised.
        """
        if (state is not None) != self.has_state:
            raise ConfigError(f"{self.where}: the checkpoint was written with another {self.field}; start a new run")
        if self.has_state:
            with user_code(f"{self.where}: its load_state_dict(state)"):
                self.inner.load_state_dict(from_json(state))

    def refuse_state(self) -> None:
        """Raise ``ConfigError`` for one with state, at an option whose state is not saved."""
        if self.has_state:
            raise ConfigError(f"{self.where}: has a state_dict, but the state of this option is not saved; remove it")

    def has(self, name: str) -> bool:
        """Whether there is a method of this name."""
        return hasattr(self.inner, name)

    def call(self, name: str, *arguments: Any) -> Any:
        """What the method returns. Raises ``ConfigError`` for whatever it raises."""
        with user_code(f"{self.where}: its {name}"):
            return getattr(self.inner, name)(*arguments)

    @property
    def note(self) -> str:
        """What the user should know; empty if there is nothing."""
        if self.has("update") and not self.has_state:
            return f"{self.where}: has update but no state_dict, so a resumed run forgets what update was told"
        return ""


class OwnCall(Own):
    """A user's function, or an instance of a user's class that can be called.

    A class is made once, with the options as keyword arguments; a function gets them at each call.
    """

    def __init__(
        self,
        field: str,
        path: str,
        options: Mapping[str, Any],
        inputs: Sequence[str],
        methods: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            field: the option that holds ``path``; its own options are in ``<field>_kwargs``.
            path: ``module:attribute`` or ``file.py:attribute``.
            options: keyword arguments.
            inputs: names of what a call gets, for messages.
            methods: as those of :class:`OwnObject`, of what is called.

        Raises:
            ConfigError: the code cannot be loaded, does not take these arguments, raised, or has a wrong state.
        """
        where, self._options = f"{field}={path!r}", dict(options)
        found: Any = load_code(path, field)
        if isinstance(found, type):
            _require_fit(
                where, found, (), self._options, f"{found.__name__} is made with {field}_kwargs={dict(options)}"
            )
            with user_code(f"{where}: {found.__name__}({', '.join(self._options)})"):
                found = found(**self._options)
            self._options = {}
        named = ", ".join(inputs)
        if not callable(found):
            raise ConfigError(f"{where}: {type(found).__name__} has no __call__({named}); define it")
        how = f"it is called with ({named}) and {field}_kwargs={self._options}"
        _require_fit(where, found, inputs, self._options, how)
        for name, number in methods.items():
            _check_method(where, found, name, number)
        super().__init__(field, path, found)

    def __call__(self, *inputs: Any) -> Any:
        """What the user's code returns. Raises ``ConfigError`` for whatever it raises."""
        with user_code(f"{self.where}:"):
            return self.inner(*inputs, **self._options)


class OwnObject(Own):
    """An instance of a user's class with methods."""

    def __init__(self, path: str, field: str, kwargs: Mapping[str, Any], methods: Mapping[str, int]) -> None:
        """
        Args:
            path: ``module:Class`` or ``file.py:Class``.
            field: the option that holds ``path``.
            kwargs: ``<field>_kwargs``, the arguments that make it.
            methods: the number of arguments of each method that the class must have; of one whose name ends in ``?``
                that it may have.

        Raises:
            ConfigError: it cannot be loaded or made, lacks a method, has one that takes other arguments, or has a wrong
                state.
        """
        where, user_class = f"{field}={path!r}", load_code(path, field)
        if not isinstance(user_class, type):
            required = [name for name in methods if not name.endswith("?")]
            raise ConfigError(f"{where}: must be a class with the method {required[0]}")
        try:
            inspect.signature(user_class).bind(**kwargs)
        except TypeError as error:
            raise ConfigError(f"{field}_kwargs={dict(kwargs)!r}: {user_class.__name__}: {error}") from error
        except ValueError:  # some classes have no signature that Python can tell
            pass
        with user_code(f"{where}: {user_class.__name__}(**{field}_kwargs)"):
            inner = user_class(**kwargs)
        for name, number in methods.items():
            _check_method(where, inner, name, number)
        super().__init__(field, path, inner)


def _require_fit(where: str, called: Any, inputs: Sequence[str], options: Mapping[str, Any], how: str) -> None:
    """Raise ``ConfigError`` unless ``called`` takes the inputs and the options."""
    try:
        signature = inspect.signature(called)
    except (ValueError, TypeError):  # some functions of C do not tell
        return
    try:
        signature.bind(*inputs, **options)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}; {how}") from error


def _check_method(where: str, inner: Any, name: str, number: int) -> None:
    optional, name = name.endswith("?"), name.removesuffix("?")
    method = getattr(inner, name, None)
    if method is None and optional:
        return
    if not callable(method):
        raise ConfigError(f"{where}: the class needs a method {name}")
    try:
        inspect.signature(method).bind(*[None] * number)
    except TypeError as error:
        raise ConfigError(f"{where}: its {name} must take {number} argument(s): {error}") from error
