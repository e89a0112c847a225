"""Which verifier or custom function scores which data source."""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

from verl.config.checks import require, require_choice
from verl.config.errors import ConfigError
from verl.rewards import countdown, knights_and_knaves, truths
from verl.rewards.answers import after_thinking
from verl.rewards.custom import CUSTOM_KWARGS, custom_verdict, load_function
from verl.rewards.score import Score, Verdict, score_of

ARITHMETIC = "verl.rewards.arithmetic:verify_arithmetic"
GSM8K = "verl.rewards.gsm8k:verify_gsm8k"

MATH = "verl.rewards.math:verify_math"
OPEN_ANSWER = "verl.rewards.open_answer:verify_open_answer"
MULTIPLE_CHOICE = "verl.rewards.multiple_choice:verify_multiple_choice"
DEEPSEEK_R1 = "verl.rewards.deepseek_r1:verify_deepseek_r1"
KNIGHTS_AND_KNAVES = "verl.rewards.knights_and_knaves:verify_knights_and_knaves"
COUNTDOWN = "verl.rewards.countdown:verify_countdown"

VERIFIERS: dict[str, str] = {
    "arithmetic": ARITHMETIC,
    "openai/gsm8k": GSM8K,
    "gsm8k": GSM8K,
    "math": MATH,
    "math_dapo": MATH,
    "math_dapo_reasoning": MATH,
    "DigitalLearningGmbH/MATH-lighteval": MATH,
    "lighteval/MATH": MATH,
    "HuggingFaceH4/MATH-500": MATH,
    "hkust-nlp/SimpleRL-Zoo-Data": MATH,
    "open_answer": OPEN_ANSWER,
    "multiple_choice": MULTIPLE_CHOICE,
    "aqua": MULTIPLE_CHOICE,
    "mmlu_stem": MULTIPLE_CHOICE,
    "sat_math": MULTIPLE_CHOICE,
    "gaokao_math_qa": MULTIPLE_CHOICE,
    "deepseek_r1": DEEPSEEK_R1,
    "kk": KNIGHTS_AND_KNAVES,
    "K-and-K/knights-and-knaves": KNIGHTS_AND_KNAVES,
    "countdown": COUNTDOWN,
}
"""``data_source`` of a record -> ``module:function`` of its verifier, loaded on first use, so that sympy is loaded only
where it is needed. ``math`` serves every data set whose answers are numbers or LaTeX."""

PREFIXES: dict[str, str] = {
    "simplelr_": MATH,
    "aime": MATH,
    "numina_": MATH,
    "deepseek_r1_": DEEPSEEK_R1,
    "kk_": KNIGHTS_AND_KNAVES,
    "kk/": KNIGHTS_AND_KNAVES,
}
"""Prefix of a ``data_source`` that is not in ``VERIFIERS`` -> its verifier, for families with one name per variant."""

TRUTH_READERS: dict[str, Callable[[Any], list[Any]]] = {
    **dict.fromkeys([ARITHMETIC, GSM8K, MATH, DEEPSEEK_R1], truths.any_of),
    OPEN_ANSWER: truths.any_of_words,
    MULTIPLE_CHOICE: truths.only_one,
    KNIGHTS_AND_KNAVES: lambda truth: [knights_and_knaves.read_truth(truth)],
    COUNTDOWN: lambda truth: [countdown.read_truth(truth)._asdict()],
}
"""Verifier -> from a ground truth to what the verifier is called with, once for every answer that counts as right.
They raise ``ValueError`` for a ground truth that the verifier cannot compare with; one that is not listed gets the
value as it is."""

WITH_THOUGHTS = (DEEPSEEK_R1,)
"""Verifiers that get the whole response, because they judge the form of its thoughts too. The others get what follows
the thoughts."""

CUSTOM_FUNCTIONS: dict[str, str] = {}
"""``data_source``, or ``*`` for all -> ``module:function`` of a user's own reward function, which comes before any
verifier; filled by ``use_custom_functions``."""


class Scorer(NamedTuple):
    """A verifier or a user's own function."""

    path: str
    """``module:function``."""
    is_custom: bool


class Verifier(Protocol):
    """The signature of a verifier. ``solution`` is the part of a response after its thoughts (``after_thinking``).

    With ``quick=True``, which the pool tries first, it returns None unless the verdict takes well under a millisecond,
    whatever the response. With ``quick=False`` it always returns a verdict, however long that takes.
    """

    def __call__(
        self, solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, quick: bool = False
    ) -> Verdict | None: ...


def register_verifier(data_source: str, path: str) -> None:
    """Register ``path``, a ``module:function`` that verifier processes can import, as the verifier of ``data_source``.

    Raises ``ConfigError`` if ``path`` does not have that form or ``data_source`` already has another verifier.
    """
    module, _, function = path.partition(":")
    require(bool(module and function), f"verifier of {data_source}", path, "must have the form module:function")
    known = VERIFIERS.setdefault(data_source, path)
    require(known == path, "data_source", data_source, f"already scored by {known}; choose another name")


def use_custom_functions(paths: Mapping[str, str], kwargs: Mapping[str, Any] | None = None) -> None:
    """Replace ``CUSTOM_FUNCTIONS`` by ``paths``, and what they are called with by ``kwargs``.

    Raises ``ConfigError`` if a function cannot be loaded or does not take ``kwargs``.
    """
    for path in paths.values():
        load_function(path, tuple(kwargs or {}))
    for table, entries in ((CUSTOM_FUNCTIONS, paths), (CUSTOM_KWARGS, kwargs or {})):
        table.clear()
        table.update(entries)


def find_scorer(data_source: str, custom: Mapping[str, str] = CUSTOM_FUNCTIONS) -> Scorer:
    """The scorer of ``data_source``: its custom function, else its verifier.

    Raises ``ConfigError`` naming the known sources if it has neither.
    """
    for name in (data_source, "*"):
        if name in custom:
            return Scorer(custom[name], is_custom=True)
    prefixes = [prefix for prefix in PREFIXES if data_source.startswith(prefix)]
    if data_source in VERIFIERS or not prefixes:
        require_choice("data_source", data_source, list(VERIFIERS))
        return Scorer(VERIFIERS[data_source], is_custom=False)
    return Scorer(PREFIXES[prefixes[0]], is_custom=False)


@cache
def load_verifier(path: str) -> Verifier:
    """The function that ``module:function`` names."""
    module, _, function = path.partition(":")
    verifier: Verifier = getattr(importlib.import_module(module), function)
    return verifier


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    mode: str = "independent",
) -> Score:
    """Score one response in this process, without limits on time or memory; see ``VerifierPool`` for limits.

    ``mode`` is ``independent`` (+1 correct and boxed, +0.5 correct unboxed, -0.5 wrong boxed, -1 wrong unboxed) or
    ``mix`` (1 or 0); a custom function gives its own score. Raises ``ConfigError`` for an unknown data source or mode.
    """
    return score_of(final_verdict(find_scorer(data_source), data_source, solution_str, ground_truth, extra_info), mode)


def graded_part(scorer: Scorer, solution: str) -> str:
    """The part of a response that ``scorer`` gets."""
    return solution if scorer.is_custom or scorer.path in WITH_THOUGHTS else after_thinking(solution)


def accepted_answers(scorer: Scorer, ground_truth: Any) -> list[Any]:
    """What ``scorer`` is called with, once for every answer that counts as right.

    Raises ``ValueError`` if the verifier cannot compare with ``ground_truth``.
    """
    if scorer.is_custom or isinstance(ground_truth, str):
        return [ground_truth]
    return TRUTH_READERS.get(scorer.path, _as_it_is)(ground_truth)


def _as_it_is(ground_truth: Any) -> list[Any]:
    return [ground_truth]


def check_ground_truth(
    data_source: str,
    ground_truth: Any,
    custom: Mapping[str, str] = CUSTOM_FUNCTIONS,
    extra_info: Mapping[str, Any] | None = None,
) -> None:
    """Raise ``ConfigError`` unless the scorer of ``data_source`` can compare responses with ``ground_truth``.

    A verifier is tried on an empty response. A custom function may be given any JSON value.
    """
    scorer = find_scorer(data_source, custom)
    try:
        truths.require_shallow(ground_truth, "the value")
        if not scorer.is_custom:
            if truths.is_missing(ground_truth):
                raise ValueError(f"{ground_truth!r}: no answer to check against; remove the row")
            TRUTH_READERS.get(scorer.path, _as_it_is)(ground_truth)
    except ValueError as error:
        reader = f"data_source={data_source!r} is scored by {scorer.path}"
        raise ConfigError(f"reward_model.ground_truth: {error} ({reader})") from error
    try:
        truths.require_shallow(extra_info, "extra_info")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if scorer.is_custom:
        return
    if scorer.path == OPEN_ANSWER:
        try:
            truths.check_tolerances(extra_info or {})
        except ValueError as error:
            raise ConfigError(f"extra_info.{error}") from error
    quick_verdict(scorer, data_source, "", ground_truth, extra_info)


def quick_verdict(
    scorer: Scorer, data_source: str, solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> Verdict | None:
    """The verdict if it is quick, else None. Custom functions are not called: they may take any time.

    Of several accepted answers any may be the right one, so that one undecided answer leaves the verdict open unless
    another is right.
    """
    if scorer.is_custom:
        return None
    verifier, graded = load_verifier(scorer.path), graded_part(scorer, solution)
    verdicts = [verifier(graded, truth, extra_info, quick=True) for truth in accepted_answers(scorer, ground_truth)]
    right = [verdict for verdict in verdicts if verdict is not None and verdict.correct]
    return right[0] if right else None if None in verdicts else verdicts[0]


def final_verdict(
    scorer: Scorer, data_source: str, solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> Verdict:
    """The verdict, however long it takes. Raises ``CustomFunctionError``, or ``TypeError`` if a verifier returns
    None."""
    if scorer.is_custom:
        return custom_verdict(scorer.path, data_source, solution, ground_truth, extra_info)
    first: Verdict | None = None
    for truth in accepted_answers(scorer, ground_truth):
        verdict = load_verifier(scorer.path)(graded_part(scorer, solution), truth, extra_info)
        if verdict is None:
            raise TypeError(f"{scorer.path} returned None with quick=False; return a Verdict")
        if verdict.correct:
            return verdict
        first = first or verdict
    assert first is not None, "there is an accepted answer"
    return first
