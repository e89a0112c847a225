"""Registry of verifiers and custom functions by data source."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from verl.config.checks import require_choice
from verl.config.errors import ConfigError
from verl.config.judge import JUDGE
from verl.config.rewards import VERIFIER, is_sum, summands
from verl.rewards import code
from verl.rewards.custom import CUSTOM_KWARGS, check_function, custom_verdict, further_parameters
from verl.rewards.score import with_score
from verl.utils.sandbox import require_sandbox
from verl.verifiers import countdown, ground_truths, knights_and_knaves, reasoning_gym, rlla, search_r1
from verl.verifiers.answers import after_thinking, extract_gsm8k
from verl.verifiers.verdict import Verdict

FAMILIES: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "arithmetic": ("arithmetic", ground_truths.any_of),
    "gsm8k": ("openai/gsm8k gsm8k word_problems", ground_truths.any_of),
    "math": (  # data sets whose answers are numbers or LaTeX
        "math math_dapo math_dapo_reasoning DigitalLearningGmbH/MATH-lighteval lighteval/MATH HuggingFaceH4/MATH-500"
        " hkust-nlp/SimpleRL-Zoo-Data simplelr_* aime* numina_*",
        ground_truths.any_of,
    ),
    "open_answer": ("open_answer", ground_truths.any_of_words),
    "multiple_choice": ("multiple_choice aqua mmlu_stem sat_math gaokao_math_qa", ground_truths.only_one),
    "deepseek_r1": ("deepseek_r1 deepseek_r1_*", ground_truths.any_of),
    "knights_and_knaves": (
        "kk kk_* kk/* K-and-K/knights-and-knaves",
        lambda truth: [knights_and_knaves.read_truth(truth)],
    ),
    "countdown": ("countdown", lambda truth: [countdown.read_truth(truth)._asdict()]),
    "search_r1": ("search_r1 searchR1_*", search_r1.read_truth),
    "rlla": ("rlla rlla_*", rlla.read_truth),
    "reasoning_gym": ("reasoning_gym/*", reasoning_gym.read_truth),
    "code": ("code codecontests apps codeforces taco", lambda truth: [code.read_tests(truth)]),
}
"""Data sources and ground-truth reader of each verifier module, which must define ``verify_<module>``."""


def _path(module: str) -> str:
    package = "rewards" if module == "code" else "verifiers"
    return f"verl.{package}.{module}:verify_{module}"


VERIFIERS = {source: _path(module) for module, (sources, _) in FAMILIES.items() for source in sources.split()}
"""Verifier of each ``data_source``, or of each prefix ending in ``*``, as ``module:function``.

Verifiers are lazily imported, because some need sympy. A verifier is called with ``(solution, ground_truth, extra_info,
quick)``, where ``solution`` is the response after its thoughts, and returns a :class:`Verdict`. With ``quick=True``,
which the pool tries first, the verifier returns None if verification could take more than about a millisecond."""

TRUTH_READERS = {_path(module): read for module, (_, read) in FAMILIES.items()}
"""For each verifier, a function that converts a ground truth to a list of accepted answers. The verifier takes one of
these answers at a time. The function raises ``ValueError`` for an invalid ground truth."""

BOXED = tuple(_path(module) for module in ("gsm8k", "math", "open_answer"))
"""Verifiers that expect answers in ``\\boxed{}``."""

WITH_THOUGHTS = (_path("deepseek_r1"), _path("rlla"))
"""Verifiers that receive the whole response, because they also check the format of its thoughts."""

ZERO_IF_FAILED = (_path("reasoning_gym"),)
"""Verifiers that score 0 in every mode if a response exceeds their limits."""

CUSTOM_FUNCTIONS: dict[str, str] = {}
"""Custom reward functions as ``module:function``, by ``data_source`` or ``*`` for all data sources. These functions
take precedence over verifiers. Set by ``use_custom_functions``."""

GROUND_TRUTH = "reward_model.ground_truth"
"""Field that contains the answer in veRL's records."""

load_verifier = cache(resolve_name)


def use_custom_functions(paths: Mapping[str, str], kwargs: Mapping[str, Any] | None = None) -> None:
    """Replace the contents of ``CUSTOM_FUNCTIONS`` and ``CUSTOM_KWARGS`` with ``paths`` and ``kwargs``.

    Raises ``ConfigError`` if a function cannot be loaded or does not accept ``kwargs``.
    """
    for path in paths.values():
        check_function(path, kwargs or {})
    for table, entries in ((CUSTOM_FUNCTIONS, paths), (CUSTOM_KWARGS, kwargs or {})):
        table.clear()
        table.update(entries)


def custom_columns(data_source: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of ``row`` that are parameters of the custom function for ``data_source``, if there is one."""
    path = CUSTOM_FUNCTIONS.get(str(data_source), CUSTOM_FUNCTIONS.get("*"))
    return {} if path is None else {name: row[name] for name in further_parameters(path) if name in row}


class Scorer(NamedTuple):
    """Verifier or custom function."""

    path: str
    """Import path, ``module:function``."""
    is_custom: bool

    def part(self, path: str, data_source: str) -> "Scorer":
        """Return the scorer for one function in this weighted sum."""
        family = _family(data_source) if path == VERIFIER else None
        return Scorer(path, is_custom=True) if family is None else Scorer(VERIFIERS[family], is_custom=False)

    def accepted(self, ground_truth: Any) -> list[Any]:
        """Return the accepted answers for a ground truth. Raises ``ValueError`` if the verifier rejects it."""
        if self.is_custom or isinstance(ground_truth, str) or self.path not in TRUTH_READERS:
            return [ground_truth]
        return TRUTH_READERS[self.path](ground_truth)


def find_scorer(data_source: str, custom: Mapping[str, str] = CUSTOM_FUNCTIONS) -> Scorer:
    """Return the custom function or verifier for ``data_source``. Raises ``ConfigError`` for an unknown data source."""
    for name in (data_source, "*"):
        if name in custom:
            return Scorer(custom[name], is_custom=True)
    name = _family(data_source) or data_source
    configured = f"has {', '.join(custom)}" if custom else f"may name your own: ['{data_source}=file.py:function']"
    require_choice("data_source", name, [*VERIFIERS, *custom], f"; reward_score.custom_functions {configured}")
    return Scorer(VERIFIERS[name], is_custom=False)


def _family(data_source: str) -> str | None:
    """Return the key in ``VERIFIERS`` that matches a data source, or None."""
    families = (name for name in VERIFIERS if name.endswith("*") and data_source.startswith(name[:-1]))
    return data_source if data_source in VERIFIERS else next(families, None)


def verifier(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the verifier's result, with a score of 1 or 0, or None if the data source has no verifier.

    In a sum that is scored by :class:`verl.rewards.pool.VerifierPool`, the score depends on ``reward_score.mode``.
    """
    if _family(data_source) is None:
        return None
    verdict = Job(find_scorer(data_source, {}), data_source, solution_str, ground_truth, extra_info).verdict()
    assert verdict is not None, "only quick verdicts are None"
    return {"score": float(verdict.correct), "acc": verdict.correct}


def can_score(data_source: str, ground_truth: Any) -> bool:
    """Return whether responses to a record with this data source and ground truth can be scored."""
    try:
        scorer = find_scorer(data_source)
        return scorer.is_custom or (ground_truth is not None and bool(scorer.accepted(ground_truth)))
    except ValueError:
        return False


def rewards_boxes(data_source: str) -> bool:
    """Return whether any scorer for ``data_source`` expects answers in ``\\boxed{}``."""
    scorer = find_scorer(data_source)
    return any(scorer.part(path, data_source).path in BOXED for _, path in summands(scorer.path))


def adds_judge() -> bool:
    """Return whether the judge is part of a weighted sum for any data source."""
    sums = [path for path in CUSTOM_FUNCTIONS.values() if is_sum(path)]
    return any(part == JUDGE for path in sums for _, part in summands(path))


class Job(NamedTuple):
    """Response and its scorer, as sent to a verifier process."""

    scorer: Scorer
    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any] | None = None
    takes_hashes: bool = False
    """Whether an answer after ``####`` counts as boxed, because the prompt asks for this format."""
    is_part: bool = False
    """Whether the custom function is part of a sum and may therefore return None."""

    def verdict(self, quick: bool = False) -> Verdict | None:
        """Return the verdict, or None if ``quick`` is set and verification could take a long time.

        Custom functions may take arbitrarily long, so they have no quick verdict. If there are several accepted
        answers, the response must match one. The verdict is None if no comparison succeeds and some are undecided.

        Raises ``CustomFunctionError`` if a custom function fails, or ``TypeError`` if a verifier wrongly returns None.
        """
        path, is_custom = self.scorer
        if is_custom:
            return None if quick else custom_verdict(path, *self[1:5], is_part=self.is_part)
        graded = self.solution if path in WITH_THOUGHTS else after_thinking(self.solution)
        verdicts = []
        for truth in self.scorer.accepted(self.ground_truth):
            verdict: Verdict | None = load_verifier(path)(graded, truth, self.extra_info, quick=quick)
            if verdict is None and not quick:
                raise TypeError(f"{path} returned None with quick=False; return a Verdict")
            if verdict is not None and self.takes_hashes and path in BOXED and extract_gsm8k(graded) is not None:
                verdict = replace(verdict, boxed=True)
            if verdict is not None and verdict.correct:
                return verdict
            verdicts.append(verdict)
        return None if None in verdicts else verdicts[0]


def judge_job(
    data_source: str, response: str, truth: Any, extra_info: Mapping[str, Any], other: str | None = None
) -> Job:
    """Return a job in which the judge scores a response or compares it with ``other``."""
    info = {**extra_info, "other_response": other}
    return Job(Scorer(JUDGE, is_custom=True), data_source, response, truth, info, is_part=True)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    mode: str = "independent",
) -> dict[str, Any]:
    """Score a response in this process, without the time and memory limits of ``VerifierPool``.

    ``mode`` is a value of ``RewardScoreConfig.mode``. Raises ``ConfigError`` for an unknown data source or mode.
    """
    verdict = Job(find_scorer(data_source), data_source, solution_str, ground_truth, extra_info).verdict()
    assert verdict is not None, "only quick verdicts are None"
    return with_score(verdict, mode).as_dict()


def check_ground_truth(
    data_source: str,
    ground_truth: Any,
    custom: Mapping[str, str] = CUSTOM_FUNCTIONS,
    extra_info: Mapping[str, Any] | None = None,
    field: str = GROUND_TRUTH,
) -> None:
    """Raise a ``ConfigError`` that names ``field`` if the scorer for ``data_source`` rejects ``ground_truth``.

    The check runs the verifier on an empty response. For programs, it also requires a sandbox on this machine. Custom
    functions accept any JSON value.
    """
    scorer = find_scorer(data_source, custom)
    ground_truths.require_shallow(ground_truth, field)
    ground_truths.require_shallow(extra_info, "extra_info")
    paths = [path for _, path in summands(scorer.path)]
    if scorer.is_custom and VERIFIER in paths:
        scorer = scorer.part(VERIFIER, data_source)
    if scorer.is_custom:
        return
    if scorer.path == _path("open_answer"):
        ground_truths.check_tolerances(extra_info or {})
    if scorer.path == _path("code"):
        require_sandbox()
    try:
        if ground_truths.is_missing(ground_truth):
            raise ValueError(f"{ground_truth!r}: no answer to check against; remove the row")
        TRUTH_READERS.get(scorer.path, lambda truth: [truth])(ground_truth)
    except ValueError as error:
        reader = f"data_source={data_source!r} is scored by {scorer.path}"
        raise ConfigError(f"{field}: {error} ({reader})") from error
    Job(scorer, data_source, "", ground_truth, extra_info).verdict(quick=True)
