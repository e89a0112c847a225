"""Teacher prompts for self-distillation, in which the policy with additional context is its own teacher.

SDPO (arXiv 2601.20802) minimises this loss, where x is the question, y a sampled response, and f feedback on y:

    L = sum over t of KL(p(. | x, y_<t) || stopgrad p(. | x, f, y_<t))

The feedback f is a correct response from the same group, text from the verifier, or both. Policy and teacher are the
same model, so set ``teacher.model.path=policy`` and ``teacher.loss=reverse_kl``. The teacher may be regularised as a
moving average of the policy (``teacher.update_rate``). We chose the wording of the prompts.
"""

from collections.abc import Sequence
from typing import Any

from verl.data.prompt_record import PromptRecord
from verl.verifiers.verdict import Verdict

FEEDBACK = "feedback"
"""Key of the textual feedback on a response in the dictionary that a reward function returns."""


def with_feedback(
    record: PromptRecord, verdict: Verdict, siblings: Sequence[tuple[str, Verdict]]
) -> list[dict[str, Any]] | None:
    """Return SDPO's prompt: the question, a correct response if there is one, and the verifier's feedback.

    Returns None if the response is already correct, or if there is neither a correct response nor feedback. In these
    cases, the teacher gives no signal. If several responses are correct, the one with the highest score is shown.
    """
    if verdict.correct:
        return None
    correct = [(other.score or 0.0, text) for text, other in siblings if other.correct and text.strip()]
    solved = max(correct, key=lambda scored: scored[0], default=None)
    feedback = verdict.extras.get(FEEDBACK)
    parts = [f"A correct solution:\n\n{solved[1]}"] if solved is not None else []
    parts += [f"Feedback on a wrong attempt:\n\n{feedback}"] if feedback else []
    return _with_help(record, [*parts, "Now answer the question correctly."]) if parts else None


def with_answer(record: PromptRecord) -> list[dict[str, Any]]:
    """Return a prompt with the question and ``extra_info["solution"]``, or the ground truth if there is no solution.

    Raises ``ValueError`` if the record has neither a solution nor a ground truth.
    """
    known = record.extra_info.get("solution") or record.ground_truth
    if known is None:
        raise ValueError(f"prompt {record.uid} has neither a solution nor a ground truth to show to the teacher")
    return _with_help(record, [f"The reference solution:\n\n{known}", "Now answer the question in your own words."])


def _with_help(record: PromptRecord, parts: Sequence[str]) -> list[dict[str, Any]]:
    messages = [dict(message) for message in record.messages]
    question = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
    question["content"] = "\n\n".join([str(question["content"]), *parts])
    return messages
