"""Made-up results for tests of tables, plots and the page."""

from collections.abc import Mapping, Sequence

from verl.evaluation.results import ProblemResult, ScoredSample, TaskResult

REASON_OF = {"c": "correct", "w": "wrong", "n": "no_answer", "t": "timeout"}


def sample(code: str, answer: str | None = None, **changes: object) -> ScoredSample:
    """A sample with the verdict ``code``, a key of ``REASON_OF``."""
    given = {"c": "7", "w": "8", "n": "", "t": "9"}[code] if answer is None else answer
    values = {
        "response": f"So it is \\boxed{{{given}}}.",
        "num_tokens": 10,
        "truncated": code == "n",
        "correct": code == "c",
        "answer": given,
        "reason": REASON_OF[code],
        "metrics": {},
    }
    return ScoredSample(**{**values, **changes})


def problem(index: int, verdicts: str, question: str | None = None, **changes: object) -> ProblemResult:
    samples = [sample(code, **changes) for code in verdicts]
    return ProblemResult(index, question or f"What is problem {index}?", "7", samples)


def result(
    verdicts: Sequence[str],
    run: str = "grpo",
    step: int = 0,
    benchmark: str = "aime24",
    temperature: float = 1.0,
    **changes: object,
) -> TaskResult:
    """A result with one problem for each string of verdicts."""
    problems = [problem(i, codes, **changes) for i, codes in enumerate(verdicts)]
    return TaskResult(run, step, benchmark, temperature, problems)


def with_metrics(base: TaskResult, metrics: Mapping[str, Sequence[float]]) -> TaskResult:
    """``base`` with one value of each metric per sample, in the order of samples."""
    place = iter(range(sum(len(p.samples) for p in base.problems)))
    problems = []
    for p in base.problems:
        samples = []
        for s in p.samples:
            at = next(place)
            values = {name: series[at] for name, series in metrics.items()}
            samples.append(
                ScoredSample(s.response, s.num_tokens, s.truncated, s.correct, s.answer, s.reason, metrics=values)
            )
        problems.append(ProblemResult(p.index, p.question, p.answer, samples))
    return TaskResult(base.run, base.step, base.benchmark, base.temperature, problems)


HOSTILE = {
    "script": "</script><script>window.broken = 1</script><!-- <img src=x onerror='window.broken=2'>",
    "separators": "a\u2028b\u2029c\x85d\x0be",
    "null": "null \x00 byte, escape \x1b[31m, bell \x07",
    "right to left": "\u202eevil\u202c \u0627\u0644\u062c\u0648\u0627\u0628 \u2067",
    "surrogates": "lone \ud800 and \udfff, pair \U0001f600",
    "template": "{{data}} ${window.broken=3} `x` \\u003c/script\\u003e &lt;b&gt; %s {0}",
    "entities": "&amp; &#60;script&#62; ]]> <![CDATA[",
}


def hostile_result(run: str = "<b>grpo</b>", step: int = 0) -> TaskResult:
    """Every hostile text as question, reference answer, response and answer."""
    problems = [
        ProblemResult(i, text, text, [sample("c", text, response=text), sample("w", text, response=text + "!")])
        for i, text in enumerate(HOSTILE.values())
    ]
    return TaskResult(run, step, "</script>bench|mark", 1.0, problems)
