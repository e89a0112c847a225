"""Builds an evaluation's tables for ``results.md``, ``results.csv`` and the terminal."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from verl.config.evaluation import EvaluationConfig
from verl.evaluation.results import ENVIRONMENT
from verl.evaluation.statistics import AVERAGE, GROUPS, LEVEL, MIN_CHANGED, REPEATED_WORDS, Summary
from verl.evaluation.targets import Target
from verl.utils.portable import printable

UP, DOWN, NOTHING = "▲", "▼", "–"

LEGEND = (
    f"Figures are percentages, with {LEVEL:.0%} bootstrap intervals over problems (Wilson's where all problems have "
    "the same figure). Signed figures are differences from the baseline in percentage points, on the problems that "
    f"both runs have. {UP} and {DOWN} mark differences outside the noise: the paired bootstrap interval excludes 0, "
    f"and at least {MIN_CHANGED} problems differ. If two runs are equally good, about one difference in "
    f"{round(1 / (1 - LEVEL))} is marked by chance."
)

DEFINITIONS = {
    "pass": "pass@k: probability that at least one of k samples is correct (unbiased estimate).",
    "maj": "maj@k: probability that a vote among k samples elects the correct answer; ties are broken at random, and "
    "samples without an answer do not vote.",
    "rm": "rm@k: probability that the one of k samples which the reward model prefers is correct.",
    "rm_maj": "rm_maj@k: as maj@k, each vote weighted by the sigmoid of its score.",
}
REPETITION = (
    f"Repetition: share of sequences of {REPEATED_WORDS} words that occurred before in the same response, mean over "
    "responses."
)


def definitions(summary: Summary) -> str:
    return " ".join([*(DEFINITIONS[name] for name in summary.figures), REPETITION])


def markdown_table(cells: pd.DataFrame) -> str:
    """Format a table of strings as Markdown, with left-aligned index columns and right-aligned data columns."""
    num_names, table = cells.index.nlevels, cells.reset_index()
    alignment = ["---"] * num_names + ["---:"] * len(cells.columns)
    lines = [list(table.columns), alignment, *table.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(map(escape_markdown, line)) + " |" for line in lines)


def escape_markdown(text: str) -> str:
    """Escape ``text`` for use in a table cell. Control characters and line breaks become spaces."""
    return printable(text).replace("\\", "\\\\").replace("|", "\\|")


def terminal_table(title: str, cells: pd.DataFrame) -> Table:
    """Return a table that fits in 80 columns unless names are unusually long. Long names are wrapped."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in cells.index.names:
        shown.add_column(name, overflow="fold")
    for column in cells:
        shown.add_column(column, overflow="fold", justify="right", no_wrap=True)
    for line in cells.reset_index().to_numpy():
        shown.add_row(*(Text(printable(cell)) for cell in line))
    return shown


def percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else NOTHING


def plain(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else NOTHING


def with_interval(row: Any, name: str) -> str:
    """Format a statistic of a row with its interval, such as ``50.0 [21.5, 78.5]``."""
    value, low, high = (percent(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return value if low == NOTHING else f"{value} [{low}, {high}]"


def with_difference(row: Any, k: int) -> str:
    """Format a row's pass@k and its difference from the baseline, marked if significant, such as ``75.0 (+4.5 ▲)``."""
    value, difference = percent(row[f"pass@{k}"]), 100 * row[f"difference@{k}"]
    if not math.isfinite(difference):
        return value
    mark = (f" {UP}" if difference > 0 else f" {DOWN}") if row[f"difference@{k}_outside_noise"] else ""
    # Adding 0.0 after rounding turns -0.0 into 0.0.
    return f"{value} ({round(difference, 1) + 0.0:+.1f}{mark})"


def comparison_table(summary: Summary, k: int) -> pd.DataFrame:
    """Return a table of pass@k with benchmarks as rows and runs as columns, or transposed if there are more runs."""
    benchmarks = summary.benchmarks + [AVERAGE] * bool(summary.averaged)
    cells = summary.table.apply(with_difference, axis=1, k=k).unstack("run", fill_value=NOTHING)
    cells = cells.loc[benchmarks, summary.labels]
    return cells.T if len(summary.labels) > len(benchmarks) else cells


def _response_table(summary: Summary) -> pd.DataFrame:
    """Return a table of sample counts, mean lengths, and the number of verdicts per reason."""
    table = summary.table
    samples = zip(table["samples_min"], table["samples_max"], strict=True)
    cells = {
        "problems": table["problems"].map(str),
        "without samples": table["problems_without_samples"].map(str),
        "samples each": [" to ".join(map(str, dict.fromkeys(pair))) for pair in samples],
        "mean tokens": table["mean_tokens"].map(lambda value: plain(value, ".1f")),
        "truncated": table["truncation_rate"].map(percent),
        "repetition": table["repetition_rate"].map(percent),
    }
    for column in table.filter(regex=f"^{ENVIRONMENT}"):
        cells[column] = table[column].map(lambda value: plain(value, ".4g"))
    return pd.DataFrame(cells | {reason: table[f"reason_{reason}"].map(str) for reason in summary.reasons})


def _metric_table(summary: Summary) -> pd.DataFrame:
    """Return a table of mean rank metrics over all, correct and wrong responses."""
    rows = {
        (*names, metric): [plain(row[f"{metric}/{group}"], ".4g") for group in GROUPS]
        for names, row in summary.table.iterrows()
        for metric in summary.metrics
        if math.isfinite(row[f"{metric}/all"])
    }
    index = pd.MultiIndex.from_tuples(rows, names=["benchmark", "run", "metric"])
    return pd.DataFrame(list(rows.values()), index, GROUPS)


def comparison_ks(summary: Summary) -> list[int]:
    """Return the values of k for the overview: 1 and the most common value among the rows' largest k."""
    known = summary.table[[f"pass@{k}" for k in summary.ks]].notna()
    largest = [ks[-1] for row in known.to_numpy() if (ks := [k for k, has in zip(summary.ks, row, strict=True) if has])]
    return sorted({1, max(largest, key=lambda k: (largest.count(k), k))}) if largest else []


def sampling_text(config: EvaluationConfig, targets: Collection[Target]) -> str:
    """Describe the sampling options, as in ``temperature 0.6, top_p 0.95, n=4, at most 128 tokens, template chat``."""
    heat = ["greedy" if value == 0 else f"temperature {value:g}" for value in config.temperatures]
    lengths = " or ".join(dict.fromkeys(str(target.max_response_length) for target in targets))
    templates = " or ".join(dict.fromkeys(target.template for target in targets))
    parts = [*heat, f"top_p {config.top_p:g}", f"n={config.n_sampling}", f"at most {lengths} tokens"]
    return ", ".join([*parts, f"template {templates}"])


def baseline_sentence(summary: Summary) -> str:
    """Return a sentence that names the baseline of each run, or an empty string if there are no baselines."""
    pairs = {run: baseline for (_, run), baseline in summary.table.get("baseline", pd.Series()).items() if baseline}
    if not pairs:
        return ""
    if len(set(pairs.values())) == 1:
        return f"Baseline: {min(pairs.values())}."
    return "Baselines: " + ", ".join(f"{label} against {other}" for label, other in pairs.items()) + "."


def markdown(
    summary: Summary, title: str = "Evaluation", about: str = "", pages: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the text of ``results.md``. See ``write_results`` for the arguments."""
    parts = [f"# {printable(title)}"]
    links = [f"[page of {escape_markdown(run)}]({href})" for run, href in pages]
    if about:
        parts.append(" ".join([escape_markdown(about), *links]))
    if not len(summary.table):
        return "\n\n".join([*parts, "There are no results."]) + "\n"
    parts += [" ".join(filter(None, [LEGEND, escape_markdown(baseline_sentence(summary))])), definitions(summary)]
    if summary.averaged and summary.averaged != summary.benchmarks:
        parts.append(
            f"The {AVERAGE} is over the benchmarks of every run: {escape_markdown(', '.join(summary.averaged))}."
        )
    tables = {f"pass@{k}": comparison_table(summary, k) for k in comparison_ks(summary)}
    for name in summary.figures:
        # Voting and reranking are trivial with a single sample, so k = 1 is shown only for pass@k.
        names = [f"{name}@{k}" for k in summary.ks if k > 1 or name == "pass"]
        cells = {column: summary.table.apply(with_interval, axis=1, name=column) for column in names}
        tables[f"{name}@k"] = pd.DataFrame(cells)
    tables |= {"Responses and verdicts": _response_table(summary), "Rank metrics (means)": _metric_table(summary)}
    for name, table in tables.items():
        if table.size:
            parts += [f"## {name}", markdown_table(table)]
    return "\n\n".join(parts) + "\n"


def csv_text(summary: Summary) -> str:
    """Return ``results.csv``, with one line per run and benchmark. Rates are in [0, 1], or empty if undefined."""
    words = {f"difference@{k}_outside_noise": {True: "true", False: "false"} for k in summary.ks}
    table = summary.table.assign(**{name: summary.table[name].map(word) for name, word in words.items()})
    return str(table.to_csv(float_format="%.6g", lineterminator="\n"))


def overview_table(summary: Summary) -> pd.DataFrame:
    """Return the table for the terminal.

    The columns are pass@1 and pass@n with differences, maj@n, rm@n and rm_maj@n (with a reward model only), the mean
    length, and the fraction of truncated responses.
    """
    table, ks = summary.table, comparison_ks(summary)
    cells = {f"pass@{k}": table.apply(with_difference, axis=1, k=k) for k in ks}
    cells |= {
        (name := f"{figure}@{k}"): table[name].map(percent) for figure in summary.figures[1:] for k in ks if k > 1
    }
    lengths = table["mean_tokens"].map(lambda value: plain(value, ".0f"))
    return pd.DataFrame(cells | {"tokens": lengths, "cut": table["truncation_rate"].map(percent)})
