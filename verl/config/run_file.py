"""Reads the ``config.yaml`` in a run's folder, which may be damaged, unrelated or malicious."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.config.errors import ConfigError, in_one_line
from verl.config.old_names import rename_options

RUN_CONFIG = "config.yaml"
"""Name of the configuration file in a run's folder."""

MAX_BYTES = 1 << 17
"""Maximum file size in bytes, which limits parsing to a few seconds. Typical files are about 10 kB in size."""

MAX_INTEGER = 100
"""Maximum length of an integer in characters, because converting ``1:59:59:...`` takes quadratic time."""


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain values, but rejects aliases, because a few lines with aliases can expand to billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("holds an alias")
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: Any) -> Any:
        if len(node.value) > MAX_INTEGER:
            raise yaml.YAMLError(f"holds an integer of more than {MAX_INTEGER} characters")
        return super().construct_yaml_int(node)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)


def read_run_config(path: Path) -> dict[str, Any]:
    """Return the options in the file ``path``, with old option names replaced by new names.

    Raises ``ConfigError`` if the file cannot be read or is not a mapping; the message gives the reason in one line.
    """
    try:
        # Reading a pipe may block forever.
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: is damaged: it has more than {MAX_BYTES} bytes")
        found = yaml.load(path.read_bytes(), _PlainLoader)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # PyYAML raises errors of any type, such as AttributeError for an invalid timestamp
        raise ConfigError(f"{path}: is damaged: {in_one_line(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: is damaged: it is not a mapping")
    rename_options(found)
    return found


def run_option(config: Mapping[str, Any], group: str, option: str) -> Any:
    """Return the value of an option in a group, or None if the option is missing."""
    values = config.get(group)
    return values.get(option) if isinstance(values, dict) else None
