"""Runs the commands of agents in the sandbox, where they reach their session's address and nothing else."""

import shutil
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

    A program in ``bin`` sees the folder around it, such as a virtual environment, also if it is a link to the program.

    Raises:
        ConfigError: If there is no sandbox or no such program, or the command would see ``/`` or the home folder, or
            cannot read its folders.
    """
    require_sandbox()
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(f"{field}.command: there is no program {words[0]!r}")
    paths = [Path(program).absolute(), Path(program).resolve()]
    folders = [path.parents[1] if path.parent.name == "bin" else path.parent for path in paths]
    absolute = [str(paths[0])]
    for word in words[1:]:
        path = Path(word).absolute()
        exists = path.exists()
        absolute.append(str(path) if exists else word)
        paths += [path] if exists else []
        folders += [path if path.is_dir() else path.parent] if exists else []
    seen: list[str] = []
    for path, folder in zip(paths, folders, strict=True):
        if any(path.is_relative_to(place) for place in SYSTEM):
            continue
        if Path.home().is_relative_to(folder):
            raise ConfigError(
                f"{field}.sandbox=True: the agent would see all of {folder}; put {path} in another folder"
            )
        for place in (folder, path):
            if uses_another_user() and not place.stat().st_mode & 0o004:
                raise ConfigError(f"{field}.sandbox=True: the agent runs as another user; chmod -R o+rX {place}")
        seen.append(str(folder))
    return SandboxedAgent(absolute, seen)
