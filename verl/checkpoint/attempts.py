"""Attempts at a run: who may write into its folder.

A run that is requeued or restarted is the same run in another attempt. The file ``.attempt`` in its folder holds the
number of the newest one, which never decreases. A process of an earlier attempt may still be alive, on a machine that
lost its network or was paused; whatever it then writes carries its attempt's number and is refused.
"""

from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint.run_start import ATTEMPT
from verl.config.errors import ConfigError
from verl.utils.files import replace_text


class StaleAttempt(RuntimeError):
    """A newer attempt has taken over the run's folder."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at the run in ``root``."""

    root: Path
    number: int
    """Counted from 1."""

    @classmethod
    def claim(cls, root: Path) -> "Attempt":
        """Take the folder over from earlier attempts; the caller holds the run's lock.

        Raises:
            ConfigError: the folder cannot be written, as on a full disk.
        """
        try:
            attempt = cls(root, newest_attempt(root) + 1)
            replace_text(root / ATTEMPT, f"{attempt.number}\n")
        except OSError as error:
            field = f"trainer.default_local_dir={str(root)!r}"
            raise ConfigError(f"{field}: cannot be written ({error.strerror}); name another folder") from error
        except ValueError as error:
            raise ConfigError(f"{root / ATTEMPT}: is damaged; write the number of attempts so far into it") from error
        return attempt

    def check(self, path: Path) -> None:
        """Called before ``path`` is written.

        Raises:
            StaleAttempt: this is not the newest attempt.
        """
        newest = newest_attempt(self.root)
        if newest != self.number:
            raise StaleAttempt(
                f"{path}: not written by attempt {self.number}, since attempt {newest} has taken over {self.root}"
            )


def newest_attempt(root: Path) -> int:
    """The number in the folder's ``.attempt`` file; 0 if there is none."""
    try:
        return int((root / ATTEMPT).read_text())
    except FileNotFoundError:
        return 0
