"""Measure how many verdicts of the verifiers a careful reader shares, beside plain math-verify, and what one costs.

python benchmarks/bench_verdicts.py --out benchmarks/verdicts --label after [--wrong] [--public DATA --right RIGHT]

The reader's verdicts are tests/verifiers/corpus/*.jsonl. math-verify reads what follows the thoughts of a response,
once with its defaults and once with the box first, as training with it usually does. Costs are CPU time in one
process.

--public judges some 57,000 responses made from published data too, all of them right (public_verdicts.py); DATA is the
folder with benchmarks/ and gsm8k/. --right writes the names of those that are judged right to RIGHT.LABEL, and counts
how many of RIGHT.before are not among them. For another checkout's verdicts set PYTHONPATH to it.

Adds rows to OUT.jsonl in place of those with the same label, and writes OUT.md. --wrong prints every verdict of ours
that the reader does not share.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench_report import ROOT, head, parser, provenance, read_report, table, write_report
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from public_verdicts import public_rows, public_table

from verl.rewards import compute_score
from verl.verifiers.answers import after_thinking, extract_tagged

CORPUS = ROOT / "tests" / "verifiers" / "corpus"
SOURCES = {
    **{name: name for name in ("math", "gsm8k", "multiple_choice", "countdown")},
    "answer_tags": "deepseek_r1",
    "knights_and_knaves": "kk",
}
"""Family of the corpus -> the data source that its responses are scored as."""

BOX_FIRST = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
PLAIN: dict[str, Callable[[str], list[Any]]] = {
    "math-verify": parse,
    "math-verify, box first": lambda text: parse(text, BOX_FIRST, extraction_mode="first_match"),
}
TIMED = {
    "boxed fraction, as text": ("math", r"So the answer is \boxed{\frac{3}{4}}.", r"\frac{3}{4}"),
    "boxed number, wrong": ("math", r"So the answer is \boxed{12}.", "13"),
    "boxed decimal for a fraction": ("math", r"So the answer is \boxed{0.75}.", r"\frac{3}{4}"),
    "boxed polynomial": ("math", r"So the answer is \boxed{(x+1)^2}.", "x^2+2x+1"),
    "GSM8K, ####": ("gsm8k", "She makes 9 * 2 = $18.\n#### 18", "18"),
    "GSM8K, a sentence": ("gsm8k", "So the answer is 18 dollars per day.", "18"),
}


def read_corpus() -> dict[str, list[dict[str, Any]]]:
    """Family -> its cases."""
    files = sorted(CORPUS.glob("*.jsonl"))
    return {path.stem: [json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in files}


def ours(rows: Iterable[dict[str, Any]], source: str) -> list[bool]:
    return [compute_score(source, row["response"], row["truth"], row.get("extra_info"))["correctness"] for row in rows]


def by_math_verify(rows: Iterable[dict[str, Any]], read: Callable[[str], list[Any]], tagged: bool) -> list[bool]:
    verdicts = []
    for row in rows:
        text = after_thinking(row["response"])
        answer = read((extract_tagged(text, "answer") or "") if tagged else text)
        truths = row["truth"] if isinstance(row["truth"], list) else [row["truth"]]
        verdicts.append(any(verify(parse(f"${truth}$"), answer) for truth in truths))
    return verdicts


def counts(label: str, family: str, rows: list[dict[str, Any]], verdicts: list[bool]) -> dict[str, Any]:
    pairs = [(row["correct"], verdict) for row, verdict in zip(rows, verdicts, strict=True)]
    wrong = {"false_positives": pairs.count((False, True)), "false_negatives": pairs.count((True, False))}
    return {"label": label, "family": family, "cases": len(pairs), **wrong}


def microseconds(source: str, response: str, truth: str, rounds: int = 7) -> float:
    """CPU time of one verdict, the median of ``rounds``."""
    repeats = 10
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            compute_score(source, response, truth)
        times.append((time.process_time() - start) / repeats)
    return 1e6 * statistics.median(times)


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Verdicts by family and costs, a column for each label."""
    verdicts, costs, public = ([row for row in rows if key in row] for key in ("family", "us", "kind"))
    labels = list(dict.fromkeys(row["label"] for row in verdicts))
    cells = {
        (row["family"], row["label"]): f"{100 - 100 * (fp + fn) / row['cases']:.1f} % ({fp}, {fn})"
        for row in verdicts
        for fp, fn in [(row["false_positives"], row["false_negatives"])]
    }
    sizes = {row["family"]: row["cases"] for row in verdicts}
    times = {(row["case"], row["label"]): f"{row['us']:,.0f}" for row in costs}
    timed = list(dict.fromkeys(row["label"] for row in costs))
    return (
        head("Verdicts beside a careful reader's", facts)
        + "Share of the reader's verdicts that each has; in brackets, wrong answers called right and right answers "
        + "called wrong.\n\nThe cases are older than the fixes, but the fixes were made with them at hand: `after` "
        + "says that they hold, not how many verdicts on other responses are right. Of 164 hard shapes that were "
        + "written afterwards, 25 were wrong at first and 8 stayed so. Of 151 more, shapes that an examiner found and "
        + "their siblings, 73 were wrong; they are cases now.\n\n"
        + table(
            ["Family", "Cases:", *(f"{label}:" for label in labels)],
            [[name, str(size), *(cells.get((name, label), "") for label in labels)] for name, size in sizes.items()],
        )
        + "\nMicroseconds a verdict:\n\n"
        + table(
            ["Answer", *(f"{label}:" for label in timed)],
            [[case, *(times.get((case, label), "") for label in timed)] for case in TIMED],
        )
        + (public_table(public) if public else "")
    )


def main(argv: list[str]) -> None:
    command = parser(__doc__)
    command.add_argument("--label", required=True, help="name of the column")
    command.add_argument("--wrong", action="store_true", help="print the verdicts that the reader does not share")
    command.add_argument("--public", type=Path, help="folder of published data")
    command.add_argument("--right", type=Path, default=Path("right"), help="file of the responses judged right")
    args = command.parse_args(argv)
    cases = read_corpus()
    rows = []
    for family in cases:
        verdicts = ours(cases[family], SOURCES[family])
        rows.append(counts(args.label, family, cases[family], verdicts))
        for case, verdict in zip(cases[family], verdicts, strict=True):
            if args.wrong and verdict != case["correct"]:
                print(json.dumps({**case, "verdict": verdict}, ensure_ascii=False))
    for label, read in PLAIN.items():
        for family in ("math", "gsm8k", "answer_tags"):
            found = by_math_verify(cases[family], read, tagged=family == "answer_tags")
            rows.append(counts(label, family, cases[family], found))
    rows += [{"label": args.label, "case": case, "us": microseconds(*job)} for case, job in TIMED.items()]
    rows += public_rows(args.label, args.public, args.right) if args.public else []
    path = args.out.with_suffix(".jsonl")
    earlier = read_report(path)[1] if path.exists() else []
    replaced = {row["label"] for row in rows}
    rows = [row for row in earlier if row["label"] not in replaced] + rows
    write_report(args.out, provenance("bench_verdicts.py", argv), rows, page)


if __name__ == "__main__":
    main(sys.argv[1:])
