"""Python as a tool of a model: ``rollout.multi_turn.tools=[verl.rollout.python_tool:python]``.

Importing this module raises ``ConfigError``, which says what to do, where programs cannot be run in a sandbox.
"""

from verl.utils.sandbox import require_sandbox, run_python

SECONDS = 10.0
MAX_CHARS = 8000
"""Longer results lose their middle."""

TRACEBACK_LINES = 8

STOPPED = {
    "timeout": f"TimeoutError: stopped after {SECONDS:.0f} seconds",
    "memory": "MemoryError: stopped, as it used more than 1 GiB",
    "output": "OSError: stopped, as it printed more than 16 MiB",
}

require_sandbox()


def python(code: str) -> str:
    """Run a Python program and read what it prints. Nothing is kept from one call to the next.

    Args:
        code: The program. Print what you want to know.

    Returns:
        What it printed, and the end of the traceback if it failed.
    """
    ending, stdout, stderr = run_python(code, seconds=SECONDS)
    parts = [stdout.rstrip()]
    if ending != "ok":
        parts += [STOPPED.get(ending) or "\n".join(stderr.splitlines()[-TRACEBACK_LINES:])]
    result = "\n".join(part for part in parts if part)
    if len(result) > MAX_CHARS:
        half = MAX_CHARS // 2
        result = f"{result[:half]}\n... {len(result) - 2 * half} characters left out ...\n{result[-half:]}"
    return result or "(nothing was printed)"
