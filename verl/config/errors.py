"""The error for everything that a user can fix by changing an option or a file."""


class ConfigError(ValueError):
    """A config that cannot be run; the message names the field, the value and the fix."""
