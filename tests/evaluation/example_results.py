"""Results for tests of statistics, tables, plots and the page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from verl.evaluation.results import ProblemResult, ScoredSample, TaskResult

REASONS = {"c": "correct", "w": "wrong", "n": "no_answer", "t": "timeout"}
ANSWERS = {"c": "7", "w": "8", "n": "", "t": "9"}


def sample(verdict: str, answer: str | None = None, **changes: object) -> ScoredSample:
    """A sample with a verdict, a key of ``REASONS``."""
    given = ANSWERS[verdict] if answer is None else answer
    made = ScoredSample(
        response=f"So it is \\boxed{{{given}}}.",
        num_tokens=10,
        truncated=verdict == "n",
        correct=verdict == "c",
        answer=given,
        reason=REASONS[verdict],
    )
    return replace(made, **changes)


def problem(index: int, verdicts: str, question: str | None = None) -> ProblemResult:
    return ProblemResult(index, question or f"What is problem {index}?", "7", [sample(verdict) for verdict in verdicts])


def result(
    verdicts: Sequence[str | ProblemResult],
    run: str = "grpo",
    step: int = 0,
    benchmark: str = "aime24",
    temperature: float = 1.0,
) -> TaskResult:
    """A result with one problem for each string of verdicts, or with the problems given."""
    problems = [problem(i, found) if isinstance(found, str) else found for i, found in enumerate(verdicts)]
    return TaskResult(run, step, benchmark, temperature, problems)


def with_metrics(base: TaskResult, metrics: Mapping[str, Sequence[float]]) -> TaskResult:
    """``base`` with one value of each metric per sample, in the order of samples."""
    values = (dict(zip(metrics, row, strict=True)) for row in zip(*metrics.values(), strict=True))
    problems = [replace(p, samples=[replace(s, metrics=next(values)) for s in p.samples]) for p in base.problems]
    return replace(base, problems=problems)


TWO_RUNS = [
    with_metrics(result(["cwwn", "wwww", "cccc"]), {"Effective Rank": [float(i) for i in range(12)]}),
    result(["cccc", "wwwt", "cccc"], step=300),
    result(["wwww", "cwww"], benchmark="amc23"),
    result(["cwww", "cwww"], step=300, benchmark="amc23"),
]
"""One run at steps 0 and 300 on two benchmarks."""

HOSTILE = {
    "script": "</script><script>window.broken = 1</script><!-- <img src=x onerror='window.broken=2'>",
    "separators": "a\u2028b\u2029c\x85d\x0be",
    "null": "null \x00 byte, escape \x1b[31m, bell \x07",
    "right to left": "\u202eevil\u202c \u0627\u0644\u062c\u0648\u0627\u0628 \u2067",
    "surrogates": "lone \ud800 and \udfff, pair \U0001f600",
    "template": "{{data}} ${window.broken=3} `x` \\u003c/script\\u003e &lt;b&gt; %s {0}",
    "entities": "&amp; &#60;script&#62; ]]> <![CDATA[",
}


def hostile_result(run: str = "<b>grpo</b>") -> TaskResult:
    """Every hostile text as question, reference answer, response and answer."""
    problems = [
        ProblemResult(i, text, text, [sample("c", text, response=text), sample("w", text, response=text + "!")])
        for i, text in enumerate(HOSTILE.values())
    ]
    return result(problems, run, benchmark="</script>bench|mark")
