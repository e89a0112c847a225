"""Runs Python programs in responses, as in PAL (arXiv 2211.10435) and ToRA (arXiv 2309.17452).

A program is enclosed in ```` ```python ```` and ```` ``` ````. Each program runs separately in the sandbox and shares
no state with earlier programs. In ``python: output`` templates, the environment runs the program at the end of a turn
and replies with its output. The model itself writes the opening ```` ```output ````. In ``python: solution`` templates,
the response is one program whose function ``solution`` returns the answer.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.utils.process import available_cores
from verl.utils.sandbox import require_sandbox, run_python

SECONDS = 10.0
TRACEBACK_LINES = 8
OUTPUT_CHARS = 400
"""Maximum length of program output, as in Qwen's and the paper's evaluations. Longer output is cut in the middle."""

SOLUTION_SECONDS = 5.0
"""Time limit in seconds for a solution, as in Qwen's and the paper's evaluations."""

STOPPED = {
    "timeout": f"TimeoutError: stopped after {SECONDS:.0f} seconds",
    "memory": "MemoryError: stopped, as it used more than 1 GiB",
    "output": "OSError: stopped, as it printed more than 16 MiB",
}

SOLUTION = """
import contextlib, io, sys
names = {"__name__": "__main__"}
with contextlib.redirect_stdout(io.StringIO()):
    exec(compile(sys.stdin.read(), "/main.py", "exec"), names)
    answer = names["solution"]()
print(answer)
"""


class Programs:
    """Environment that runs the program at the end of a turn. Raises ``ConfigError`` if there is no sandbox."""

    def __init__(self) -> None:
        require_sandbox()

    def start(self, record: Any) -> dict[str, Any]:
        """Return an empty state, because programs do not share state."""
        return {}

    def step(self, state: dict[str, Any], turn: Any) -> tuple[dict[str, Any], list[dict[str, str]], bool, float]:
        """Run the program at the end of the turn, or end the conversation if there is none."""
        program = program_at_end(turn.text)
        if program is None:
            return state, [], True, 0.0
        return state, [{"role": "user", "content": output_of(program, OUTPUT_CHARS)}], False, 0.0


def program_at_end(text: str) -> str | None:
    """Return the program at the end of ``text``, or None if the text does not end with a program."""
    body, closed, rest = text.rstrip().rpartition("```")
    _, opened, program = body.rpartition("```python")
    return program.strip("\n") if opened and closed and not rest and "```" not in program else None


def output_of(code: str, max_chars: int) -> str:
    """Run a program and return its output and the end of any traceback. The middle of long output is omitted."""
    ending, stdout, stderr = run_python(code, seconds=SECONDS)
    parts = [stdout.rstrip()]
    if ending != "ok":
        parts += [STOPPED.get(ending) or "\n".join(stderr.splitlines()[-TRACEBACK_LINES:])]
    result = "\n".join(part for part in parts if part)
    if len(result) > max_chars:
        half = max_chars // 2
        result = f"{result[:half]}\n... {len(result) - 2 * half} characters left out ...\n{result[-half:]}"
    return result or "(nothing was printed)"


def with_solutions(responses: Sequence[str]) -> list[str]:
    """Append the boxed result of ``solution()``, or the error, to each response that contains a program."""
    with ThreadPoolExecutor(available_cores()) as threads:
        return list(threads.map(_with_solution, responses))


def _with_solution(text: str) -> str:
    _, opened, rest = text.rpartition("```python")
    program = rest.partition("```")[0] if opened else text
    ending, stdout, stderr = run_python(SOLUTION, program, seconds=SOLUTION_SECONDS)
    answer = stdout.strip() if ending == "ok" else (stderr.strip().splitlines() or [ending])[-1]
    return f"{text}\n```output\n\\boxed{{{answer}}}\n```"
