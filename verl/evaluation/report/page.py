"""Builds the HTML page of an evaluation, with its tables, curves and responses."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.evaluation.report.tables import LEGEND, baseline_sentence, definitions
from verl.evaluation.results import ENVIRONMENT, PROMPT_TOO_LONG, ScoredSample, TaskResult, row_labels
from verl.evaluation.statistics import AVERAGE, ENDS, FIGURES, GROUPS, Summary
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


def make_page(
    summary: Summary,
    results: Sequence[TaskResult],
    title: str = "Evaluation",
    about: str = "",
    pages: Sequence[tuple[str, str]] = (),
    max_bytes: int = MAX_PAGE_BYTES,
) -> str:
    """Return the page's HTML, limited to ``max_bytes`` unless statistics, verdicts and questions alone exceed it.

    See ``write_results`` for the other arguments.
    """
    runs, prompts = _gather(summary, results)
    legend = (printable(about), LEGEND, printable(baseline_sentence(summary)), definitions(summary))
    index = {
        "runs": [
            {"name": printable(run), "colour": page_colour(COLOURS[i % len(COLOURS)])} for i, run in enumerate(runs)
        ],
        "labels": [{"name": printable(label)} | style for label, style in label_styles(summary.labels).items()],
        "benchmarks": [printable(name) for name in summary.benchmarks],
        "rows": [_row(name, label, row, summary) for (name, label), row in summary.table.to_dict("index").items()],
        "reasons": list(VERDICT_CODES),
        "legend": [text for text in legend if text],
        "pages": [{"text": f"Page of {printable(run)}", "href": href} for run, href in pages],
    }
    verdicts = {code: name for name, code in VERDICT_CODES.items()}
    return build_page(title, index, prompts, summary.metrics, verdicts, max_bytes)


def _gather(summary: Summary, results: Sequence[TaskResult]) -> tuple[list[str], list[PromptSamples]]:
    """Return the names of the runs and a list of all problems, with their samples keyed by run and step."""
    labels = row_labels(results)
    # A run that was evaluated at two temperatures is listed as two runs.
    names = [result.run + label.removeprefix(result.label) for result, label in zip(results, labels, strict=True)]
    order = {label: place for place, label in enumerate(summary.labels)}
    runs = list(dict.fromkeys(names[i] for i in sorted(range(len(names)), key=lambda i: order[labels[i]])))
    # Runs may use different versions of a benchmark, so problems are the same only if their texts are equal.
    prompts: dict[tuple[int, int, str], PromptSamples] = {}
    for name, result in zip(names, results, strict=True):
        for problem in result.problems:
            key = (summary.benchmarks.index(result.benchmark), problem.index, problem.question)
            empty = PromptSamples("", problem.index, problem.question, printable(result.benchmark), problem.answer)
            cells = prompts.setdefault(key, empty).cells
            cells[runs.index(name), result.step] = [_response(sample) for sample in problem.samples]
    return runs, [prompts[key] for key in sorted(prompts, key=lambda key: key[:2])]


def _response(sample: ScoredSample) -> Row:
    extras = {**sample.extras, **{f"{ENVIRONMENT}{name}": value for name, value in sample.environment.items()}}
    return {
        **sample.metrics,
        "response": spoken(sample.conversation) or sample.response,
        "truncated": sample.truncated,
        "verdict": VERDICT_CODES[sample.reason],
        "reason": "",
        "answer": sample.answer,
        "extra": json.dumps(finite_or_null(extras), ensure_ascii=False) if extras else "",
        "num_tokens": sample.num_tokens,
    }


def label_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each label's line style: one colour and shape per run, lighter for earlier steps, dashed for step 0."""
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


def _row(benchmark: str, label: str, row: Mapping[str, Any], summary: Summary) -> dict[str, Any]:
    """Return the statistics of one run on one benchmark. The benchmark index -1 denotes the average."""

    def estimates(name: str, *ends: str) -> list[list[Any]]:
        """Return k, the value and its interval for each k at which the row contains the statistic."""
        every_k = ([k, *(row.get(f"{name}@{k}{end}", math.nan) for end in (*ENDS, *ends))] for k in summary.ks)
        return [values for values in every_k if not math.isnan(values[1])]

    return {
        "label": summary.labels.index(label),
        "benchmark": -1 if benchmark == AVERAGE else summary.benchmarks.index(benchmark),
        "problems": row["problems"],
        "missing": row["problems_without_samples"],
        "samples": [row["samples_min"], row["samples_max"]],
        **{name: estimates(name) for name in FIGURES},
        "differences": estimates("difference", "_outside_noise"),
        "tokens": row["mean_tokens"],
        "truncated": row["truncation_rate"],
        "repetition": row["repetition_rate"],
        "reasons": {name: count for name in summary.reasons if (count := row[f"reason_{name}"])},
        "metrics": {
            metric_name(name): [row[f"{name}/{group}"] for group in GROUPS]
            for name in summary.metrics
            if math.isfinite(row[f"{name}/all"])
        },
    }
