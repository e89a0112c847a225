"""Content of an evaluation's page: tables, curves and every response."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.evaluation.report.tables import DEFINITIONS, LEGEND, baseline_sentence
from verl.evaluation.results import PROMPT_TOO_LONG, ScoredSample, TaskResult, metric_names, row_labels
from verl.evaluation.statistics import AVERAGE, FIGURES, GROUPS, Estimate, Summary, SummaryRow
from verl.utils.portable import finite_or_null, printable
from verl_pages.colours import COLOURS, SHAPES, lighter, page_colour
from verl_pages.evaluation import MAX_PAGE_BYTES, build_page
from verl_pages.names import metric_name
from verl_pages.sample_files import spoken
from verl_pages.samples import PromptSamples, Row

VERDICT_CODES = {
    "correct": "c",
    "wrong": "w",
    "no_answer": "n",
    "unparsed": "u",
    "timeout": "t",
    "memory": "m",
    "crash": "x",
    "error": "e",
    PROMPT_TOO_LONG: "l",
}
OTHER_VERDICT = "o"


def make_page(
    summary: Summary, results: Sequence[TaskResult], title: str = "Evaluation", max_bytes: int = MAX_PAGE_BYTES
) -> str:
    """Return the text of the page; ``max_bytes``: its size, unless figures, verdicts and questions alone are larger."""
    metrics = metric_names(problem for result in results for problem in result.problems)
    names = [*VERDICT_CODES, *sorted(set(summary.reasons()) - VERDICT_CODES.keys())]
    runs, prompts = _gather(summary, results)
    index = {
        "runs": [
            {"name": printable(run), "colour": page_colour(COLOURS[i % len(COLOURS)])} for i, run in enumerate(runs)
        ],
        "labels": [{"name": printable(label)} | style for label, style in label_styles(summary.labels).items()],
        "benchmarks": [printable(name) for name in summary.benchmarks],
        "rows": [_row(row, summary) for row in summary.all_rows],
        "reasons": names,
        "legend": [text for text in (LEGEND, printable(baseline_sentence(summary)), DEFINITIONS) if text],
    }
    verdicts = {VERDICT_CODES.get(name, OTHER_VERDICT): name for name in reversed(names)}
    return build_page(title, index, prompts, metrics, dict(reversed(verdicts.items())), max_bytes)


def _gather(summary: Summary, results: Sequence[TaskResult]) -> tuple[list[str], list[PromptSamples]]:
    """Return the runs, and every problem with the samples that each of them has at each step."""
    labels = row_labels(results)
    # A run at two temperatures is two.
    names = [result.run + label.removeprefix(result.label) for result, label in zip(results, labels, strict=True)]
    order = {label: place for place, label in enumerate(summary.labels)}
    runs = list(dict.fromkeys(names[i] for i in sorted(range(len(names)), key=lambda i: order[labels[i]])))
    # Runs may have been evaluated on different versions of a benchmark: only equal texts are the same problem.
    prompts: dict[tuple[int, int, str], PromptSamples] = {}
    for name, result in zip(names, results, strict=True):
        for problem in result.problems:
            key = (summary.benchmarks.index(result.benchmark), problem.index, problem.question)
            empty = PromptSamples("", problem.index, problem.question, printable(result.benchmark), problem.answer)
            cells = prompts.setdefault(key, empty).cells
            cells[runs.index(name), result.step] = [_response(sample) for sample in problem.samples]
    return runs, [prompts[key] for key in sorted(prompts, key=lambda key: key[:2])]


def _response(sample: ScoredSample) -> Row:
    return {
        **sample.metrics,
        "response": spoken(sample.conversation) or sample.response,
        "truncated": sample.truncated,
        "verdict": "c" if sample.correct else VERDICT_CODES.get(sample.reason, OTHER_VERDICT),
        "reason": "",
        "answer": sample.answer,
        "extra": json.dumps(finite_or_null(sample.extras), ensure_ascii=False) if sample.extras else "",
        "num_tokens": sample.num_tokens,
    }


def label_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the line of each label: one colour and shape per run, lighter for earlier steps; step 0 is dashed."""
    members: dict[str, list[str]] = {}
    is_base: dict[str, bool] = {}
    for label in labels:
        match = re.fullmatch(r"(.*)@(\d+)(?: T=.*)?", label, re.DOTALL)
        members.setdefault(match.group(1) if match else label, []).append(label)
        is_base[label] = match is not None and int(match.group(2)) == 0
    styles: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(members.values()):
        colour = COLOURS[number % len(COLOURS)]
        shape = SHAPES[(number + number // len(COLOURS)) % len(SHAPES)]
        trained = [label for label in run if not is_base[label]]
        for label in run:
            if is_base[label]:
                faded, dash = 0.35 if trained else 0.0, "5 3"
            else:
                faded, dash = 0.55 * (1 - (trained.index(label) + 1) / len(trained)), None
            styles[label] = {"colour": page_colour(lighter(colour, faded)), "shape": shape, "dash": dash}
    return styles


def _row(row: SummaryRow, summary: Summary) -> dict[str, Any]:
    """Return the figures of one run on one benchmark, -1 for the average."""
    return {
        "label": summary.labels.index(row.label),
        "benchmark": -1 if row.benchmark == AVERAGE else summary.benchmarks.index(row.benchmark),
        "problems": row.num_problems,
        "missing": row.num_missing,
        "samples": row.samples,
        **{name: _estimates(row.estimates(name)) for name in FIGURES},
        "differences": [
            [k, d.estimate.value, d.estimate.low, d.estimate.high, d.outside_noise] for k, d in row.differences.items()
        ],
        "tokens": row.mean_tokens,
        "truncated": row.truncation_rate,
        "repetition": row.repetition_rate,
        "reasons": dict(row.reasons),
        "metrics": {
            metric_name(name): [groups[group].mean for group in GROUPS] for name, groups in row.metrics.items()
        },
    }


def _estimates(estimates: Mapping[int, Estimate]) -> list[list[float]]:
    return [[k, e.value, e.low, e.high] for k, e in estimates.items()]
