"""The published benchmarks, where they lie beside the project: all load, and the verifiers know their own answers."""

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from conftest import PUBLISHED, scoring

from verl.evaluation.benchmarks import Problem, load_benchmark
from verl.rewards.pool import VerifierPool
from verl.verifiers.answers import normalise
from verl.verifiers.notation import split_answers, unify

FOLDER = PUBLISHED / "benchmarks"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the benchmark files are not at {FOLDER}"),
]

SIZES = {
    **dict.fromkeys(
        ["BeyondAIME", "OlymMATH-EN-EASY", "OlymMATH-EN-HARD", "OlymMATH-ZH-EASY", "OlymMATH-ZH-HARD"], 100
    ),
    **dict(aime24=30, aime25=30, amc23=40, amc24=45, aqua=254, asdiv=2215, carp_en=976, cn_middle_school=101),
    **dict(college_math=2818, gaokao2023en=385, gaokao2024_I=14, gaokao2024_II=14, gaokao2024_mix=91, mawps=2065),
    **dict(gaokao_math_cloze=118, gaokao_math_qa=351, gsm8k=1319, math24o=21, math500=500, minerva_math=272),
    **dict(mmlu_stem=3018, olympiadbench=675),
}
"""Non-blank lines of each file."""

CHOICES = dict(aqua=254, cn_middle_school=41, gaokao2023en=47, gaokao2024_I=11, gaokao2024_II=11, gaokao2024_mix=55)
CHOICES |= dict(gaokao_math_qa=351, math500=3, mmlu_stem=3018)
"""How many of their problems are multiple choice; of all others none."""

SEED = 7

PLAIN = re.compile(r"[-0-9. ]+(\([^0-9]*\))?|[A-E]+")
"""Answers that are compared without algebra: numbers and letters."""


@cache
def problems_of(name: str) -> list[Problem]:
    return load_benchmark(name, FOLDER)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(scoring(mode="mix", num_workers=2, timeout_s=8.0, memory_limit_mb=1024)) as pool:
        yield pool


def share_correct(pool: VerifierPool, problems: Sequence[Problem], responses: Sequence[str]) -> float:
    scores = pool.score_batch(
        [p.data_source for p in problems], responses, [p.answer for p in problems], [p.extra_info for p in problems]
    )
    return sum(score.correct for score in scores) / len(scores)


def deranged(answers: list[str]) -> list[str]:
    """A random order of ``answers`` in which every one meets a different text, as far as there are any."""
    rng = random.Random(SEED)
    order = rng.sample(answers, len(answers))
    texts = [normalise(answer) for answer in answers]
    for i in range(len(order)):
        for j in rng.sample(range(len(order)), len(order)):
            if normalise(order[i]) != texts[i]:
                break
            if normalise(order[j]) != texts[i] and normalise(order[i]) != texts[j]:
                order[i], order[j] = order[j], order[i]
    assert sorted(order) == sorted(answers)
    return order


def restyled(answer: str) -> str:
    """``answer`` as another author would set it."""
    text = re.sub(r"\\frac(?![a-z])", r"\\dfrac", re.sub(r"\\?\$", "", answer))
    text = re.sub(r"(?<=[a-z)}])\s*=\s*", " = ", re.sub(r",(?=[^\d\\])", ", ", text))
    return f" {text} ."


@pytest.mark.parametrize("name", SIZES)
def test_loads(name: str):
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(SIZES)
    problems = problems_of(name)
    assert [p.index for p in problems] == list(range(SIZES[name]))
    assert all(len(p.question.strip()) >= 10 and p.answer.strip("$ ") for p in problems)
    choices = [p for p in problems if p.data_source == "multiple_choice"]
    assert len(choices) == CHOICES.get(name, 0)
    assert all(len(p.extra_info["options"]) >= 2 for p in choices if p.extra_info)
    assert sum(not p.extra_info for p in choices) <= 1


@pytest.mark.parametrize("name", SIZES)
def test_its_own_answers_are_right(pool: VerifierPool, name: str):
    problems = problems_of(name)
    assert share_correct(pool, problems, [rf"Thus \boxed{{{p.answer}}}." for p in problems]) >= 0.99
    few = random.Random(SEED).sample(problems, min(len(problems), 200))
    assert share_correct(pool, few, [rf"\boxed{{{restyled(p.answer)}}}" for p in few]) >= 0.99


@pytest.mark.parametrize("sample", [5, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", SIZES)
def test_other_problems_answers_are_wrong(pool: VerifierPool, name: str, sample: int):
    """All that need no algebra, which takes up to a second, and a ``sample`` of those that do."""
    problems = problems_of(name)
    quick, slow = [], []
    # Apart, because the answer of an open question may be the text of the right option of another one.
    for source in sorted({p.data_source for p in problems}):
        same = [p for p in problems if p.data_source == source]
        for problem, other in zip(same, deranged([p.answer for p in same]), strict=True):
            if normalise(other) != normalise(problem.answer):
                both_plain = PLAIN.fullmatch(other) and PLAIN.fullmatch(problem.answer)
                (quick if both_plain else slow).append((problem, rf"\boxed{{{other}}}"))
    assert len(quick) + len(slow) >= 0.9 * len(problems)
    pairs = quick + random.Random(SEED).sample(slow, min(sample, len(slow)))
    assert share_correct(pool, *zip(*pairs, strict=True)) <= 0.03


@pytest.mark.parametrize(
    ("name", "share"), [("math500", 0.99), ("gsm8k", 0.99), ("aime24", 0.98), ("minerva_math", 0.98)]
)
def test_its_own_solutions_are_right(pool: VerifierPool, name: str, share: float):
    problems = problems_of(name)
    solutions = [p.solution or "" for p in problems]
    right = share_correct(pool, problems, solutions)
    assert right >= share
    # A thought before it changes nothing; as the thought itself, with an end or without, it is no answer.
    thought = r"<think>Perhaps \boxed{0}. #### 0</think>"
    assert share_correct(pool, problems, [f"{thought}\n{solution}" for solution in solutions]) == right
    for form in ("<think>{}</think>", "{}</think>", "<think>{}"):
        assert share_correct(pool, problems, [form.format(solution) for solution in solutions]) == 0


def test_proofs_with_their_answers_boxed_are_right(pool: VerifierPool):
    # Those of OlympiadBench end in no statement of the answer, so it is added, each of several in a box of its own.
    problems = problems_of("olympiadbench")
    responses = []
    for problem in problems:
        parts, _ = split_answers(unify(problem.answer))
        boxes = " and ".join(rf"\boxed{{{part}}}" for part in parts)
        responses.append(f"{problem.solution}\n\nSo the final answer is ${boxes}$.")
    assert share_correct(pool, problems, responses) >= 0.98
