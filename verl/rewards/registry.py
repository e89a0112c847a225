"""Which verifier or custom function scores which data source."""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

from verl.config.checks import require_choice
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

_SOURCES = {
    ARITHMETIC: "arithmetic",
    GSM8K: "openai/gsm8k gsm8k",
    # Every data set whose answers are numbers or LaTeX.
    MATH: "math math_dapo math_dapo_reasoning DigitalLearningGmbH/MATH-lighteval lighteval/MATH HuggingFaceH4/MATH-500"
    " hkust-nlp/SimpleRL-Zoo-Data simplelr_* aime* numina_*",
    OPEN_ANSWER: "open_answer",
    MULTIPLE_CHOICE: "multiple_choice aqua mmlu_stem sat_math gaokao_math_qa",
    DEEPSEEK_R1: "deepseek_r1 deepseek_r1_*",
    KNIGHTS_AND_KNAVES: "kk kk_* kk/* K-and-K/knights-and-knaves",
    COUNTDOWN: "countdown",
}
VERIFIERS: dict[str, str] = {source: path for path, sources in _SOURCES.items() for source in sources.split()}
"""``data_source`` of a record -> ``module:function`` of its verifier, loaded on first use, so that sympy is loaded only
where it is needed. A name that ends in ``*`` is the prefix of a family with one name per variant."""

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
    families = (name for name in VERIFIERS if name.endswith("*") and data_source.startswith(name[:-1]))
    name = data_source if data_source in VERIFIERS else next(families, data_source)
    require_choice("data_source", name, list(VERIFIERS))
    return Scorer(VERIFIERS[name], is_custom=False)


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
    if scorer.is_custom or isinstance(ground_truth, str) or scorer.path not in TRUTH_READERS:
        return [ground_truth]
    return TRUTH_READERS[scorer.path](ground_truth)


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
    truths.require_shallow(ground_truth, "reward_model.ground_truth")
    truths.require_shallow(extra_info, "extra_info")
    if scorer.is_custom:
        return
    if scorer.path == OPEN_ANSWER:
        truths.check_tolerances(extra_info or {})
    try:
        if truths.is_missing(ground_truth):
            raise ValueError(f"{ground_truth!r}: no answer to check against; remove the row")
        TRUTH_READERS.get(scorer.path, lambda truth: [truth])(ground_truth)
    except ValueError as error:
        reader = f"data_source={data_source!r} is scored by {scorer.path}"
        raise ConfigError(f"reward_model.ground_truth: {error} ({reader})") from error
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
