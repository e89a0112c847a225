"""An object of a user's own class: made with keyword arguments, called with checks, saved as JSON."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from verl.config.errors import ConfigError
from verl.utils.json_state import from_json, to_json
from verl.utils.user_code import load_own, user_code


class OwnObject:
    """What the option ``field`` names, by an import path, and made with the option ``<field>_kwargs``.

    A class may have ``state_dict`` and ``load_state_dict``, which checkpoints then hold.
    """

    def __init__(self, path: str, field: str, kwargs: Mapping[str, Any], methods: Mapping[str, int]) -> None:
        """
        Args:
            methods: the number of arguments of each method that the class must have; of one whose name ends in ``?``
                that it may have.

        Raises:
            ConfigError: it cannot be loaded or made, it lacks a method or one takes other arguments, it has only one of
                ``state_dict`` and ``load_state_dict``, or its state cannot be saved.
        """
        self.field = field
        self.where = f"{field}={path!r}"
        user_class = load_own(path, field)
        if not isinstance(user_class, type):
            required = [name for name in methods if not name.endswith("?")]
            raise ConfigError(f"{self.where}: must be a class with the method {required[0]}")
        self._check_kwargs(user_class, kwargs)
        with user_code(f"{self.where}: {user_class.__name__}(**{field}_kwargs)"):
            self.inner: Any = user_class(**kwargs)
        for name, number in methods.items():
            self._check_method(name, number)
        has = [hasattr(self.inner, method) for method in ("state_dict", "load_state_dict")]
        if any(has) != all(has):
            raise ConfigError(f"{self.where}: define both state_dict and load_state_dict, or neither")
        self.has_state = all(has)
        self.state()  # what cannot be saved is found before training

    def _check_kwargs(self, user_class: type, kwargs: Mapping[str, Any]) -> None:
        try:
            inspect.signature(user_class).bind(**kwargs)
        except TypeError as error:
            raise ConfigError(f"{self.field}_kwargs={dict(kwargs)!r}: {user_class.__name__}: {error}") from error
        except ValueError:  # some classes have no signature that Python can tell
            return

    def _check_method(self, name: str, number: int) -> None:
        optional, name = name.endswith("?"), name.removesuffix("?")
        method = getattr(self.inner, name, None)
        if method is None and optional:
            return
        if not callable(method):
            raise ConfigError(f"{self.where}: the class needs a method {name}")
        try:
            inspect.signature(method).bind(*[None] * number)
        except TypeError as error:
            raise ConfigError(f"{self.where}: its {name} must take {number} argument(s): {error}") from error

    def has(self, name: str) -> bool:
        """Whether there is a method of this name."""
        return hasattr(self.inner, name)

    def call(self, name: str, *arguments: Any) -> Any:
        """What the method returns. Raises ``ConfigError`` for whatever it raises."""
        method: Callable[..., Any] = getattr(self.inner, name)
        with user_code(f"{self.where}: its {name}"):
            return method(*arguments)

    def state(self) -> Any:
        """The object's own state as JSON; None without one."""
        if not self.has_state:
            return None
        with user_code(f"{self.where}: its state_dict(), which may hold what JSON holds and tensors,"):
            return to_json(self.inner.state_dict())

    def load_state(self, state: Any) -> None:
        """Give the object its own state back. Raises ``ConfigError`` if the checkpoint has none of it."""
        if (state is not None) != self.has_state:
            raise ConfigError(f"{self.where}: the checkpoint was written by another class; start a new run")
        if self.has_state:
            with user_code(f"{self.where}: its load_state_dict(state)"):
                self.inner.load_state_dict(from_json(state))
