"""A researcher's own functions and classes that the learning signal calls: checked early, with state that is saved."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.errors import ConfigError
from verl.utils.json_state import from_json, to_json
from verl.utils.user_code import load_own, user_code


class OwnCall:
    """A user's function, or an instance of a user's class that can be called.

    A class is made once, with the options as keyword arguments; a function gets them at each call. An object with
    ``state_dict`` and ``load_state_dict`` has state, which may hold what JSON holds and tensors.
    """

    def __init__(self, field: str, path: str, options: Mapping[str, Any], inputs: Sequence[str]) -> None:
        """
        Args:
            field: the option that holds ``path``; its own options are in ``<field>_kwargs``.
            path: ``module:attribute`` or ``file.py:attribute``.
            options: keyword arguments.
            inputs: names of what a call gets, for messages.

        Raises:
            ConfigError: the code cannot be loaded, does not take these arguments, raised, or defines only one of
                ``state_dict`` and ``load_state_dict``.
        """
        self.field = field
        self.where = f"{field}={path!r}"
        self._options = dict(options)
        found: Any = load_own(path, field)
        if isinstance(found, type):
            self._require_fit(found, (), f"{found.__name__} is made with {field}_kwargs={self._options}")
            with user_code(f"{self.where}: {found.__name__}({', '.join(self._options)})"):
                found = found(**self._options)
            self._options = {}
        if not callable(found):
            raise ConfigError(f"{self.where}: {type(found).__name__} has no __call__({', '.join(inputs)}); define it")
        self.called: Any = found
        self._require_fit(found, inputs, f"it is called with ({', '.join(inputs)}) and {field}_kwargs={self._options}")
        has = [hasattr(found, method) for method in ("state_dict", "load_state_dict")]
        if any(has) != all(has):
            raise ConfigError(f"{self.where}: define both state_dict and load_state_dict, or neither")
        self.has_state = all(has)
        self.state()  # what cannot be saved is found before training

    def __call__(self, *inputs: Any) -> Any:
        """What the user's code returns. Raises ``ConfigError`` for whatever it raises."""
        with user_code(f"{self.where}:"):
            return self.called(*inputs, **self._options)

    def state(self) -> Any:
        """The state as JSON; None without one."""
        if not self.has_state:
            return None
        with user_code(f"{self.where}: its state_dict(), which may hold what JSON holds and tensors,"):
            return to_json(self.called.state_dict())

    def load_state(self, state: Any) -> None:
        """Go on from what :meth:`state` returned.

        Raises:
            ConfigError: the state is missing or there is nobody to take it, or the user's code raised.
        """
        if (state is not None) != self.has_state:
            raise ConfigError(f"{self.where}: the checkpoint was written with another {self.field}; start a new run")
        if self.has_state:
            with user_code(f"{self.where}: its load_state_dict(state)"):
                self.called.load_state_dict(from_json(state))

    def _require_fit(self, called: Any, inputs: Sequence[str], how: str) -> None:
        """Raise ``ConfigError`` unless ``called`` takes the inputs and the options."""
        try:
            signature = inspect.signature(called)
        except (ValueError, TypeError):  # some functions of C do not tell
            return
        try:
            signature.bind(*inputs, **self._options)
        except TypeError as error:
            raise ConfigError(f"{self.where}: {error}; {how}") from error
