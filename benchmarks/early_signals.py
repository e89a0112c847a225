"""Print the tables of early_signals.md: how well metrics of the first tokens tell correct responses from wrong ones.

    python -m verl.trainer.main_analysis ...     (early_signals.md has the commands)
    python benchmarks/early_signals.py FOLDER [FOLDER ...] [--stop POSITION]

With --stop, also print what stopping responses at a position would save and lose, counted on the stored responses.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from verl.analysis.early import LENGTH, MIN_EACH, auc_figures, prefix_metrics
from verl.analysis.sheets import MODEL, of_model
from verl.config.calculator import CalculatorConfig
from verl.evaluation.statistics import ENDS
from verl_pages.names import metric_name

DRAWS = 1000
TOLD = 0.7
"""AUC from which, or from whose complement, a metric is said to tell correct responses from wrong ones."""
STOPPED = (0.1, 0.2, 0.3, 0.5)
"""Shares of the running responses that are stopped."""
KINDS = {"auc": "all pairs", "within": "within a prompt"}


def model_tables(table: pd.DataFrame) -> Iterator[str]:
    """Yield the lines of both tables of one model: at shares of the tokens, and at positions."""
    for by, shown in (("share", [0.2, 0.5, 1.0]), ("position", None)):
        rows = table[(table["by"] == by) & (shown is None or table["at"].isin(shown or []))]
        points = sorted(set(rows["at"]))
        names = [f"{at:.0%} of the tokens" if by == "share" else f"{at:g} tokens" for at in points]
        yield from (f"| | Pairs | {' | '.join(names)} |", f"|---|---|{'---:|' * len(points)}")
        if by == "position":
            # Entropy has a value at every prefix.
            running = rows[rows["metric"] == "entropy"].set_index("at").reindex(points)
            counts = [
                f"{n:.0f}, {right:.0f}" for n, right in zip(running["responses"], running["correct"], strict=True)
            ]
            yield f"| Running, correct | | {' | '.join(counts)} |"
            read = [f"{share:.0%}" for share in points / running["mean_length"]]
            yield f"| Share of their mean length | | {' | '.join(read)} |"
        for metric, part in rows.groupby("metric", sort=False):
            at = part.set_index("at").reindex(points)
            for of, kind in KINDS.items():
                cells = [_cell(*at.loc[point, [of, f"{of}_low", f"{of}_high"]]) for point in points]
                yield f"| {metric_name(str(metric)) if of == 'auc' else ''} | {kind} | {' | '.join(cells)} |"
        yield ""


def _cell(value: float, low: float, high: float) -> str:
    if pd.isna(value):
        return "–"
    text = f"{value:.2f} [{low:.2f}, {high:.2f}]"
    return f"**{text}**" if max(value, 1 - value) >= TOLD else text


def farthest(calculator: CalculatorConfig, courses: pd.DataFrame) -> Iterator[str]:
    """Yield the lines of a table: each metric where it is farthest from 0.5 before half of the mean length."""
    responses, metrics = prefix_metrics(calculator, courses.reset_index(drop=True))
    length, correct = responses["response_length"].to_numpy(), responses["correctness"].to_numpy() == 1
    prompts = responses["prompt_id"].to_numpy()
    yield f"| Farthest from 0.5 before half of the tokens | {' | '.join(KINDS.values())} |"
    yield "|---|---:|---:|"
    for name in [name for name in metrics if name != LENGTH]:
        found = dict.fromkeys(KINDS, (0.0, "–"))
        for place, values in enumerate(metrics[name].T[:-1], start=1):
            position = place * calculator.diff_stride
            known = (length > position) & np.isfinite(values)
            right = correct[known].sum()
            if min(right, known.sum() - right) < MIN_EACH or position >= length[known].mean() / 2:
                continue
            auc = auc_figures(values[known], correct[known], prompts[known], DRAWS, 0)
            for of in KINDS:
                cell = f"{_cell(*(auc[of + end] for end in ENDS))} at {position}"
                found[of] = max(found[of], (abs(auc[of] - 0.5), cell))
        yield f"| {metric_name(name)} | {' | '.join(cell for _, cell in found.values())} |"
    yield ""


def stopping(calculator: CalculatorConfig, courses: pd.DataFrame, position: int) -> Iterator[str]:
    """Yield the lines of a table: stopping the running responses of highest entropy at ``position``."""
    responses, metrics = prefix_metrics(calculator, courses.reset_index(drop=True))
    length, correct = responses["response_length"].to_numpy(), responses["correctness"].to_numpy() == 1
    running = length > position
    entropy = np.where(running, metrics["entropy"][:, position // calculator.diff_stride - 1], -np.inf)
    of_running = (entropy[running], correct[running], responses["prompt_id"].to_numpy()[running])
    auc = auc_figures(*of_running, DRAWS, 0)
    cells = [f"{kind} {_cell(*(auc[of + end] for end in ENDS)).strip('*')}" for of, kind in KINDS.items()]
    share = position / length[running].mean()
    yield f"Entropy after {position} tokens, {share:.0%} of the mean length: {', '.join(cells)}.\n"
    yield f"| Stopped at {position} tokens | Tokens saved | Correct lost | Correct per token |"
    yield "|---|---:|---:|---:|"
    for share in STOPPED:
        stopped = np.argsort(-entropy, kind="stable")[: round(share * running.sum())]
        saved = (length[stopped] - position).sum() / length.sum()
        lost = correct[stopped].sum() / correct.sum()
        yield f"| {share:.0%} of {running.sum()} | {saved:.1%} | {lost:.1%} | {(1 - lost) / (1 - saved):.2f} times |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder of an analysis")
    parser.add_argument("--stop", type=int, metavar="POSITION", help="a multiple of calculator.diff_stride, in tokens")
    options = parser.parse_args()
    for folder in options.folders:
        for place, table in pd.read_parquet(folder / "early.parquet").groupby(MODEL, sort=False):
            run, step, benchmark, temperature = place
            whole = table[(table["at"] == 1.0) & (table["metric"] == "entropy")].iloc[0]
            print(f"### {run}, step {step}, {benchmark} at temperature {temperature:g}\n")
            share = whole["correct"] / whole["responses"]
            print(f"{whole['responses']} responses to {whole['prompts']} prompts, {whole['mean_length']:.1f} tokens on")
            print(
                f"average; {share:.0%} are correct, and {whole['mixed_prompts']} prompts have correct and wrong ones.\n"
            )
            print("\n".join(model_tables(table)))
            calculator = CalculatorConfig(**yaml.safe_load((folder / "config.yaml").read_text())["calculator"])
            courses = of_model(pd.read_parquet(folder / "courses.parquet"), place)
            print("\n".join(farthest(calculator, courses)))
            if options.stop:
                print("\n".join(stopping(calculator, courses, options.stop)))


if __name__ == "__main__":
    main()
