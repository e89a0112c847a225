"""Prompts with which a policy teaches itself: what it would say if it knew more becomes what it says.

SDPO (arXiv 2601.20802): with x the question, y a sampled response, and f feedback on it,

    L = sum over t of KL(p(. | x, y_<t) || stopgrad p(. | x, f, y_<t))

where f is a correct response from the same group, a text from the verifier, or both. Both sides are the same model, so
``teacher.model.path=policy`` and ``teacher.loss=reverse_kl``. The teacher may be regularised as a moving average of the
policy (``teacher.update_rate``). The wording of the prompts is our own.
"""

from collections.abc import Sequence
from typing import Any

from verl.data.prompt_record import PromptRecord
from verl.verifiers.verdict import Verdict

FEEDBACK = "feedback"
"""Key of a reward function's dictionary, with text about the response for its next attempt."""


def with_feedback(
    record: PromptRecord, verdict: Verdict, siblings: Sequence[tuple[str, Verdict]]
) -> list[dict[str, Any]] | None:
    """Return SDPO's prompt: the question, a correct response if there is one, and the verifier's feedback.

    Returns None, for the policy's own prompt and thus nothing to learn, if the response is correct already or there is
    nothing to tell.
    """
    if verdict.correct:
        return None
    solved = next((text for text, other in siblings if other.correct), None)
    feedback = verdict.extras.get(FEEDBACK)
    parts = [f"A correct solution:\n\n{solved}"] if solved is not None else []
    parts += [f"Feedback on a wrong attempt:\n\n{feedback}"] if feedback else []
    return _with_help(record, [*parts, "Now answer the question correctly."]) if parts else None


def with_answer(record: PromptRecord) -> list[dict[str, Any]]:
    """Return a prompt with the question and its ground truth, or ``extra_info["solution"]`` if the file has one."""
    known = record.extra_info.get("solution") or record.ground_truth
    return _with_help(record, [f"The reference solution:\n\n{known}", "Now answer the question in your own words."])


def _with_help(record: PromptRecord, parts: Sequence[str]) -> list[dict[str, Any]]:
    *before, question = record.messages
    return [*before, {**question, "content": "\n\n".join([str(question["content"]), *parts])}]
