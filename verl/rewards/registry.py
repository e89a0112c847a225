"""Which verifier scores which data source."""

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from verl.config.checks import require, require_choice
from verl.rewards.score import Score, Verdict, score_of

MATH = "verl.rewards.math:verify_math"

VERIFIERS: dict[str, str] = {
    "arithmetic": "verl.rewards.arithmetic:verify_arithmetic",
    "openai/gsm8k": "verl.rewards.gsm8k:verify_gsm8k",
    "gsm8k": "verl.rewards.gsm8k:verify_gsm8k",
    "math": MATH,
    "DigitalLearningGmbH/MATH-lighteval": MATH,
    "lighteval/MATH": MATH,
    "HuggingFaceH4/MATH-500": MATH,
    "hkust-nlp/SimpleRL-Zoo-Data": MATH,
    "simplelr_qwen": MATH,
    "simplelr_abel": MATH,
}
"""``data_source`` of a record -> ``module:function`` of its verifier, loaded on first use so that sympy is loaded
only where it is needed. ``math`` serves every set whose answers are numbers or LaTeX."""


class Verifier(Protocol):
    """The form of a verifier.

    With ``quick=True`` it answers only if that takes well under a millisecond, whatever the response, and returns None
    otherwise; the pool asks so first. With ``quick=False`` it always returns a verdict, taking the time it takes.
    """

    def __call__(
        self, solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
    ) -> Verdict | None: ...


def register_verifier(data_source: str, path: str) -> None:
    """Let ``path``, a ``module:function`` that verifier processes can import, score ``data_source``.

    Raises ``ValueError`` when ``path`` has not that form or ``data_source`` has another verifier already.
    """
    module, _, function = path.partition(":")
    require(bool(module and function), f"verifier of {data_source}", path, "must have the form module:function")
    known = VERIFIERS.setdefault(data_source, path)
    require(known == path, "data_source", data_source, f"already scored by {known}; choose another name")


def verifier_path(data_source: str) -> str:
    """The verifier of ``data_source`` as ``module:function``. Raises ``ValueError`` naming the known sources."""
    require_choice("data_source", data_source, list(VERIFIERS))
    return VERIFIERS[data_source]


@cache
def load_verifier(path: str) -> Verifier:
    """The function that ``module:function`` names."""
    module, _, function = path.partition(":")
    verifier: Verifier = getattr(importlib.import_module(module), function)
    return verifier


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    mode: str = "independent",
) -> Score:
    """Score one response in this process, without any limit on time or memory; see ``VerifierPool`` for limits.

    ``mode`` is ``independent`` (+1 correct and boxed, +0.5 correct unboxed, -0.5 wrong boxed, -1 wrong unboxed) or
    ``mix`` (1 or 0). Raises ``ValueError`` for an unknown data source or mode.
    """
    return score_of(final_verdict(verifier_path(data_source), solution_str, ground_truth, extra_info), mode)


def final_verdict(path: str, solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None) -> Verdict:
    """The verdict of the verifier ``path``, whatever time it takes. Raises ``TypeError`` if it gives none."""
    verdict = load_verifier(path)(solution, ground_truth, extra_info)
    if verdict is None:
        raise TypeError(f"{path} returned None with quick=False; return a Verdict")
    return verdict
