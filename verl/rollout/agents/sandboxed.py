"""Runs the commands of agents in the sandbox, where they reach their session's address and nothing else."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verl.config.errors import ConfigError
from verl.rollout.agents import forwarder
from verl.utils.sandbox import SandboxedCommand, require_sandbox, uses_another_user

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Folders that every sandbox has."""


class SandboxedAgent(NamedTuple):
    """A command with absolute paths, and the folders that it sees."""

    words: list[str]
    folders: list[str]

    def start(self, environment: Mapping[str, str], socket: Path, max_bytes: int) -> SandboxedCommand:
        """Start the command.

        Args:
            environment: Environment variables, with the base URL of the session.
            socket: Unix socket of the endpoint.
            max_bytes: Limit of the address space of each process, and of the resident memory of all.
        """
        script, endpoint = Path(forwarder.__file__).read_text(), (str(socket), forwarder.SOCKET)
        return SandboxedCommand(script, self.words, environment, self.folders, endpoint, max_bytes)


def prepare_sandboxed(words: Sequence[str], field: str) -> SandboxedAgent:
    """Return the command with the folders of its program and of the files that it names.

    A program in ``bin`` sees the folder around it, such as a virtual environment. If a file is a link, the command also
    sees the folder of the file to which it leads.

    Raises:
        ConfigError: If there is no sandbox or no such program, or the command would see the home, working or temporary
            folder, or cannot read its folders.
    """
    require_sandbox()
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(f"{field}.command: there is no program {words[0]!r}")
    # Without "..", behind which a folder would not be recognized.
    named = [os.path.abspath(program), *(os.path.abspath(word) if _is_file(word) else "" for word in words[1:])]
    places = {place: _folder(place) for path in named if path for place in (Path(path), Path(path).resolve())}
    folders: list[str] = []
    for path, folder in places.items():
        if any(path.is_relative_to(place) for place in SYSTEM):
            continue
        private = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path("/tmp"))
        if any(place.resolve().is_relative_to(folder.resolve()) for place in private):
            raise ConfigError(
                f"{field}.sandbox=True: the agent would see all of {folder}; put {path} in another folder"
            )
        for place in (folder, path):
            if uses_another_user() and not place.stat().st_mode & 0o004:
                raise ConfigError(f"{field}.sandbox=True: the agent runs as another user; chmod -R o+rX {place}")
        folders.append(str(folder))
    return SandboxedAgent([path or word for path, word in zip(named, words, strict=True)], folders)


def _is_file(word: str) -> bool:
    """Return whether a word of a command names a file or folder. Others may be too long for names."""
    return bool(word) and os.path.exists(word)


def _folder(path: Path) -> Path:
    """Return the folder that a command sees which names ``path``."""
    if path.is_dir():
        return path
    return path.parents[1] if path.parent.name == "bin" else path.parent
