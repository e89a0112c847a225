"""Appends the name of every top-level module that a process imports to the file that VERL_TEST_IMPORTS names."""

import os
import sys


class ImportLog:
    """A finder that finds nothing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Note a name without a dot."""
        if "." not in name:
            with open(os.environ["VERL_TEST_IMPORTS"], "a") as file:
                file.write(f"{name}\n")


sys.meta_path.insert(0, ImportLog)  # type: ignore[arg-type]
