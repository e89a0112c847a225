"""Tables of an evaluation: ``results.md``, ``results.csv``, and one for the terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from verl.evaluation.statistics import (
    AVERAGE,
    GROUPS,
    LEVEL,
    MIN_CHANGED,
    REPEATED_WORDS,
    Difference,
    Estimate,
    Summary,
    SummaryRow,
)
from verl.utils.portable import printable

UP, DOWN, NOTHING = "▲", "▼", "–"

LEGEND = (
    f"Figures are percentages, with {LEVEL:.0%} bootstrap intervals over problems (Wilson's where all problems have "
    "the same figure). Signed figures are differences from the baseline in percentage points, on the problems that "
    f"both runs have. {UP} and {DOWN} mark differences outside the noise: the paired bootstrap interval excludes 0, "
    f"and at least {MIN_CHANGED} problems differ. If two runs are equally good, about one difference in "
    f"{round(1 / (1 - LEVEL))} is marked by chance."
)

DEFINITIONS = (
    "pass@k: probability that at least one of k samples is correct (unbiased estimate). maj@k: probability that a vote "
    "among k samples elects the correct answer; ties are broken at random, and samples without an answer do not vote. "
    "rm@k: probability that the one of k samples which the reward model prefers is correct; rm_maj@k: as maj@k, each "
    "vote weighted by the sigmoid of its score. "
    f"Repetition: share of sequences of {REPEATED_WORDS} words that occurred before in the same response, mean over "
    "responses."
)


@dataclass(frozen=True)
class Table:
    """A table of text: the first ``num_names`` columns are names, the others figures."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    num_names: int = 1

    def markdown(self) -> str:
        alignment = ["---"] * self.num_names + ["---:"] * (len(self.headers) - self.num_names)
        lines = [self.headers, alignment, *self.rows]
        return "\n".join("| " + " | ".join(escape_markdown(cell) for cell in line) + " |" for line in lines)

    def on_terminal(self) -> RichTable:
        """Narrow enough for 80 columns with names of usual length; longer names are folded."""
        shown = RichTable(title=self.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, header in enumerate(self.headers):
            name = place < self.num_names
            shown.add_column(header, overflow="fold", justify="left" if name else "right", no_wrap=not name)
        for row in self.rows:
            shown.add_row(*(Text(printable(cell)) for cell in row))
        return shown


def escape_markdown(text: str) -> str:
    """``text`` as one table cell: bars are escaped, control characters and line breaks become spaces."""
    return printable(text).replace("\\", "\\\\").replace("|", "\\|")


def percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else NOTHING


def signed(difference: Difference | None) -> str:
    """``+4.5 ▲``: the difference in percentage points, marked if it is outside the noise."""
    if difference is None:
        return ""
    value = 100 * difference.estimate.value
    mark = (f" {UP}" if value > 0 else f" {DOWN}") if difference.outside_noise else ""
    # Rounding first avoids -0.0.
    return f"{round(value, 1) + 0.0:+.1f}{mark}"


def with_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return NOTHING
    if not math.isfinite(estimate.low):
        return percent(estimate.value)
    return f"{percent(estimate.value)} [{percent(estimate.low)}, {percent(estimate.high)}]"


def plain(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else NOTHING


def comparison_table(summary: Summary, k: int) -> Table:
    """pass@k of every run on every benchmark; the longer list goes down."""

    def cell(label: str, benchmark: str) -> str:
        row = summary.row(label, benchmark)
        return NOTHING if row is None else _with_difference(row, k)

    labels, benchmarks = summary.labels, summary.benchmarks + [AVERAGE] * bool(summary.averages)
    if len(labels) > len(benchmarks):
        rows = [[label, *(cell(label, benchmark) for benchmark in benchmarks)] for label in labels]
        return Table(f"pass@{k}", ["run", *benchmarks], rows)
    rows = [[benchmark, *(cell(label, benchmark) for label in labels)] for benchmark in benchmarks]
    return Table(f"pass@{k}", ["benchmark", *labels], rows)


def _with_difference(row: SummaryRow, k: int) -> str:
    """pass@k and in brackets its difference from the baseline, if there is one."""
    if k not in row.pass_at_k:
        return NOTHING
    difference = signed(row.differences.get(k))
    return percent(row.pass_at_k[k].value) + (f" ({difference})" if difference else "")


def _estimates_table(name: str, ks: Sequence[int], summary: Summary) -> Table:
    """Return a table of a figure at every k, with intervals."""
    rows = [
        [row.benchmark, row.label, *(with_interval(row.estimates(name).get(k)) for k in ks)] for row in summary.all_rows
    ]
    return Table(f"{name}@k", ["benchmark", "run", *(f"{name}@{k}" for k in ks)], rows if ks else [], num_names=2)


def _response_table(summary: Summary) -> Table:
    """Return a table of the number and length of responses, and the reasons for their verdicts."""
    reasons = summary.reasons()
    headers = ["benchmark", "run", "problems", "without samples", "samples each", "mean tokens", "truncated"]
    headers += ["repetition", *reasons]
    rows = [
        [
            row.benchmark,
            row.label,
            *map(str, (row.num_problems, row.num_missing)),
            " to ".join(map(str, dict.fromkeys(row.samples))),
            plain(row.mean_tokens, ".1f"),
            *map(percent, (row.truncation_rate, row.repetition_rate)),
            *(str(row.reasons.get(reason, 0)) for reason in reasons),
        ]
        for row in summary.all_rows
    ]
    return Table("Responses and verdicts", headers, rows, num_names=2)


def _metric_table(summary: Summary) -> Table:
    """Mean rank metrics over all, correct and wrong responses."""
    rows = [
        [row.benchmark, row.label, name, *(plain(groups[group].mean, ".4g") for group in GROUPS)]
        for row in summary.rows
        for name, groups in row.metrics.items()
    ]
    return Table("Rank metrics (means)", ["benchmark", "run", "metric", *GROUPS], rows, num_names=3)


def comparison_ks(summary: Summary) -> list[int]:
    """Return the k of the overview: 1, and the largest that most rows have."""
    largest = [max(row.pass_at_k) for row in summary.rows if row.pass_at_k]
    return sorted({1, max(largest, key=lambda k: (largest.count(k), k))}) if largest else []


def baseline_sentence(summary: Summary) -> str:
    """Which rows are compared with which."""
    pairs = {row.label: row.baseline for row in summary.rows if row.baseline}
    if not pairs:
        return ""
    if len(set(pairs.values())) == 1:
        return f"Baseline: {min(pairs.values())}."
    return "Baselines: " + ", ".join(f"{label} against {other}" for label, other in pairs.items()) + "."


def markdown(summary: Summary, title: str = "Evaluation") -> str:
    """Return the text of ``results.md``."""
    parts = [f"# {printable(title)}"]
    if not summary.rows:
        return "\n\n".join([*parts, "There are no results."]) + "\n"
    parts += [" ".join(filter(None, [LEGEND, escape_markdown(baseline_sentence(summary))])), DEFINITIONS]
    if summary.averages and summary.averaged != summary.benchmarks:
        parts.append(
            f"The {AVERAGE} is over the benchmarks of every run: {escape_markdown(', '.join(summary.averaged))}."
        )
    tables = [comparison_table(summary, k) for k in comparison_ks(summary)]
    ks = summary.ks()
    tables.append(_estimates_table("pass", ks, summary))
    # Of one sample there is nothing to choose.
    tables += [_estimates_table(name, [k for k in ks if k > 1], summary) for name in summary.figures()[1:]]
    tables += [_response_table(summary), _metric_table(summary)]
    for table in tables:
        if table.rows:
            parts += [f"## {table.title}", table.markdown()]
    return "\n\n".join(parts) + "\n"


def csv_text(summary: Summary) -> str:
    """Return the text of ``results.csv``: a line per run and benchmark, shares from 0 to 1, empty if undefined."""
    records = [_record(row, summary) for row in summary.all_rows]
    frame = pd.DataFrame(records) if records else pd.DataFrame(columns=["benchmark", "run"])
    return str(frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def _record(row: SummaryRow, summary: Summary) -> dict[str, object]:
    """Names and values of one line of ``results.csv``."""
    ks = summary.ks()
    names = {"benchmark": row.benchmark, "run": row.label, "baseline": row.baseline or ""}
    record: dict[str, object] = {key: name.encode("utf-8", "replace").decode() for key, name in names.items()}
    record |= {"problems": row.num_problems, "problems_without_samples": row.num_missing}
    record |= {"samples_min": row.samples[0], "samples_max": row.samples[1]}
    for name in summary.figures():
        for k in ks:
            record |= _bounds(f"{name}@{k}", row.estimates(name).get(k))
    for k in ks:
        difference = row.differences.get(k)
        record |= _bounds(f"difference@{k}", difference.estimate if difference else None)
        record[f"difference@{k}_outside_noise"] = str(difference.outside_noise).lower() if difference else ""
    record |= {name: getattr(row, name) for name in ("mean_tokens", "truncation_rate", "repetition_rate")}
    record |= {f"reason_{reason}": row.reasons.get(reason, 0) for reason in summary.reasons()}
    return record | {f"{name}/{group}": groups[group].mean for name, groups in row.metrics.items() for group in GROUPS}


def _bounds(name: str, estimate: Estimate | None) -> dict[str, float]:
    value, low, high = (estimate.value, estimate.low, estimate.high) if estimate else (math.nan,) * 3
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def overview_table(summary: Summary) -> Table:
    """Return the table for the terminal.

    It has pass@1 and pass@n with differences, maj@n, with a reward model rm@n and rm_maj@n, mean length, and the share
    of cut responses.
    """
    ks = comparison_ks(summary)
    chosen = [(name, k) for name in summary.figures()[1:] for k in ks if k > 1]
    rows = [
        [
            row.benchmark,
            row.label,
            *(_with_difference(row, k) for k in ks),
            *(percent(row.estimates(name)[k].value) if k in row.estimates(name) else NOTHING for name, k in chosen),
            plain(row.mean_tokens, ".0f"),
            percent(row.truncation_rate),
        ]
        for row in summary.all_rows
    ]
    headers = ["benchmark", "run", *(f"pass@{k}" for k in ks), *(f"{name}@{k}" for name, k in chosen), "tokens", "cut"]
    return Table("Evaluation (percent)", headers, rows, num_names=2)
