"""Verifier of responses in DeepSeek-R1's form: ``<think>...</think> <answer>...</answer>``."""

import re
from collections.abc import Mapping
from typing import Any

from verl.verifiers.answers import after_thinking, boxed_in_place, extract_gsm8k, extract_stated, extract_tagged
from verl.verifiers.math import decide_math
from verl.verifiers.verdict import Verdict

_MARKUP = re.compile(r"\\[()\[\]]|\*\*|`")


def verify_deepseek_r1(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """Verify a response; with ``quick``, return None if it needs algebra. ``extra_info`` is not used.

    The answer is read from the last ``<answer>`` after all thoughts: its box, else what it states ("the answer is 5"),
    else all of it. It is compared as mathematics, even if the form of the response is wrong; a response without an
    ``<answer>`` has no answer. ``boxed`` says whether the form is correct. So ``mode=independent`` gives a correct
    answer 1 in the correct form and 0.5 in another, and a wrong one -0.5 and -1.
    """
    well_formed = has_r1_form(solution)
    content = extract_tagged(after_thinking(solution), "answer")
    marked = content and (boxed_in_place(content) or extract_gsm8k(content) or extract_stated(content))
    answer = marked or (content and _MARKUP.sub("", content).strip())
    return decide_math(answer, well_formed, ground_truth, quick)


def has_r1_form(solution: str) -> bool:
    """Whether a response is one thought and one non-empty answer in their tags, with only whitespace around them.

    The opening ``<think>`` may be missing, because chat templates write it at the end of the prompt.
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
