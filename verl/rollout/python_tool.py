"""Python interpreter as a tool: ``rollout.multi_turn.tools=[verl.rollout.python_tool:python]``.

Importing this module raises ``ConfigError`` with instructions if programs cannot be run in a sandbox.
"""

from verl.rollout.programs import output_of
from verl.utils.sandbox import require_sandbox

MAX_CHARS = 8000
"""Maximum length of a result in characters. Longer results are cut in the middle."""

require_sandbox()


def python(code: str) -> str:
    """Run a Python program and read what it prints. Nothing is kept from one call to the next.

    Args:
        code: The program. Print what you want to know.

    Returns:
        What it printed, and the end of the traceback if it failed.
    """
    return output_of(code, MAX_CHARS)
