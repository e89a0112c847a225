"""GHPO's hints, against literal texts."""

import pytest
import torch

from verl.data.prompt_rows import PromptRecord
from verl.data.regeneration import Round
from verl.recipes.ghpo import GuidedHints, hint


@pytest.mark.parametrize(
    ("solution", "share", "expected"),
    [
        ("12345678", 0.25, "12"),
        ("12345678", 0.75, "123456"),
        ("one two three four", 0.5, "one two"),  # not "one two t"
        ("one two three four", 1.0, "one two three four"),
        ("7", 0.25, ""),
    ],
)
def test_hint(solution, share, expected):
    assert hint(solution, share) == expected


def test_unsolved_prompts_get_a_longer_hint_in_each_round():
    chat = [{"role": "user", "content": "Q?"}]
    solved, unsolved, long = (
        PromptRecord(uid, [1], "arithmetic", "ab", {"solution": solution}, chat, False)
        for uid, solution in enumerate(["abcdefgh", "ABCDEFGH", "x" * 80])
    )
    records = [solved, unsolved, long]
    correct = torch.tensor([[True, False], [False, False], [False, False]])

    def ask(number: int) -> dict[int, str]:
        texts = [["", ""]] * 3
        size = lambda place, prompt: len(prompt)  # noqa: E731
        return GuidedHints().regenerate(
            Round(number, 3, 1, 10, records, records, correct.float(), correct, texts, 40, size)
        )

    # The third prompt would not fit.
    assert ask(1) == {1: "Q? The solution begins with: AB"}
    assert ask(2) == {1: "Q? The solution begins with: ABCD"}
    assert ask(3) == {1: "Q? The solution begins with: ABCDEF"}
