"""Verifier for responses in DeepSeek-R1's format: ``<think>...</think> <answer>...</answer>``."""

import re

from verl.verifiers.answers import after_thinking, boxed_with_context, extract_gsm8k, extract_stated, extract_tagged
from verl.verifiers.math import decide_math
from verl.verifiers.verdict import Info, Verdict

_MARKUP = re.compile(r"\\[()\[\]]|\*\*|`")


def verify_deepseek_r1(
    solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False
) -> Verdict | None:
    """Verify a response. Return None if ``quick`` is set and algebra is required. ``extra_info`` is unused.

    The last ``<answer>`` after all thoughts contains the answer in a box, after ``####``, in a statement, or as its
    whole content. Malformed responses are also compared, but ``boxed`` is true only for well-formed ones. With
    ``mode=independent``, a correct answer scores 1 (0.5 if malformed) and a wrong answer -0.5 (-1 if malformed).
    """
    well_formed = has_r1_form(solution)
    content = extract_tagged(after_thinking(solution), "answer")
    marked = content and (boxed_with_context(content) or extract_gsm8k(content) or extract_stated(content))
    answer = marked or (content and _MARKUP.sub("", content).strip())
    return decide_math(answer, well_formed, ground_truth, quick)


def has_r1_form(solution: str) -> bool:
    """Return whether a response consists of a tagged thought and a tagged, non-empty answer, separated by whitespace.

    The opening ``<think>`` may be missing, because chat templates put it at the end of the prompt.
    """
    if any(solution.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")):
        return False
    thought, _, rest = (part.strip() for part in solution.partition("</think>"))
    return (
        "<think>" not in thought.removeprefix("<think>") + rest
        and rest.startswith("<answer>")
        and rest.endswith("</answer>")
        and extract_tagged(rest, "answer") is not None
    )
