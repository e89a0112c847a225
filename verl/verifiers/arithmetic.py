"""Verifier for the bundled arithmetic task, whose answers are integers written in digits."""

from verl.verifiers.answers import extract_answer, quick_equal
from verl.verifiers.verdict import Info, Verdict, decide


def verify_arithmetic(solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False) -> Verdict | None:
    """Verify a response without algebra. ``extra_info`` and ``quick`` are unused."""
    answer, boxed = extract_answer(solution)
    return decide(answer, boxed, answer is not None and quick_equal(answer, ground_truth) is True)
