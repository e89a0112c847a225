"""Programs in responses: found, run, and answered."""

from types import SimpleNamespace

import pytest

from verl.data.templates import DEMONSTRATIONS
from verl.rollout import programs
from verl.rollout.programs import OUTPUT_CHARS, Programs, program_at_end, with_solutions

PROGRAM = "I compute it.\n```python\nprint(6 * 7)\n```"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (PROGRAM, "print(6 * 7)"),
        (f"{PROGRAM}\n\n", "print(6 * 7)"),
        (f"{PROGRAM}\nIt is \\boxed{{42}}.", None),
        ("```python\nprint(1)", None),
        ("```\nprint(1)\n```", None),
        (f"{PROGRAM}\nand\n```\nx\n```", None),
        (f"```python\nx = 1\n```\n{PROGRAM}", "print(6 * 7)"),
        ("```python```", ""),
        ("", None),
    ],
)
def test_the_program_at_the_end(text: str, program: str | None):
    assert program_at_end(text) == program


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sympy takes seconds to import on a busy machine."""
    for name in ("SECONDS", "SOLUTION_SECONDS"):
        monkeypatch.setattr(programs, name, 60.0)


@pytest.mark.slow
def test_a_program_is_answered_by_what_it_prints(sandbox, patience):
    environment = Programs()

    def said(text: str) -> tuple[list[str], bool]:
        _, messages, done, _ = environment.step(environment.start(None), SimpleNamespace(text=text))
        return [message["content"] for message in messages], done

    assert said(PROGRAM) == (["42"], False)
    assert said("It is \\boxed{42}.") == ([], True)
    for _, answer in DEMONSTRATIONS["output"]:
        before, _, after = answer.partition("```output\n")
        assert said(before) == ([after.partition("\n```")[0]], False)
    # Nothing is kept, and errors are said.
    ((error,), _) = said("```python\nprint(x)\n```")
    assert error.endswith("NameError: name 'x' is not defined")
    ((long,), _) = said("```python\nprint('a' * 9999)\n```")
    assert OUTPUT_CHARS < len(long) < OUTPUT_CHARS + 50


@pytest.mark.slow
def test_the_answer_is_what_solution_returns(sandbox, patience):
    program = "def solution():\n    print('so far')\n    return 6 * 7"
    shown = [answer for _, answer in DEMONSTRATIONS["solution"]]
    assert [text.split("boxed")[1] for text in with_solutions(shown)] == ["{384}\n```", "{sqrt(13)/2 + 5/2}\n```"]
    fenced, bare, broken = with_solutions([f"```python\n{program}\n```", program, "No program."])
    assert fenced == f"```python\n{program}\n```\n```output\n\\boxed{{42}}\n```"
    assert bare == f"{program}\n```output\n\\boxed{{42}}\n```"
    assert broken == "No program.\n```output\n\\boxed{SyntaxError: invalid syntax}\n```"
