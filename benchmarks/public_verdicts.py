"""The responses that public data sets hold or imply, all of them right: their solutions, and their answers in forms."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench_report import table

from verl.config import PPOConfig, load_config
from verl.evaluation.benchmarks import load_benchmark
from verl.rewards.pool import VerifierPool

AT_A_TIME = 500


class PublicResponse(NamedTuple):
    """A response that a reader takes for right."""

    kind: str
    """How it was made."""
    name: str
    """``<data set>/<index>``, which names it together with its kind."""
    data_source: str
    text: str
    truth: str
    extra_info: dict[str, Any] | None


def public_responses(data: Path) -> Iterator[PublicResponse]:
    """Of ``<data>/benchmarks/<name>/test.jsonl``: the solution, and the answer in a box and in a sentence. Of
    ``<data>/gsm8k/train.jsonl``: the solution, and what is left of it without ``####`` and calculator marks."""
    for folder in sorted((data / "benchmarks").iterdir()):
        for problem in load_benchmark(folder.name, folder.parent):
            name, rest = f"{folder.name}/{problem.index}", (problem.answer, problem.extra_info)
            texts = {"answer in a box": rf"Thus \boxed{{{problem.answer}}}.", "solution": problem.solution or ""}
            texts["answer in a sentence"] = f"Therefore, the final answer is {problem.answer}."
            for kind, text in texts.items():
                if text:
                    yield PublicResponse(kind, name, problem.data_source, text, *rest)
    for index, line in enumerate((data / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines()):
        solution = json.loads(line)["answer"]
        steps, _, answer = solution.rpartition("####")
        for kind, text in {
            "solution": solution,
            "without ####": steps.strip(),
            "without #### and <<>>": re.sub(r"<<.*?>>", "", steps).strip(),
        }.items():
            yield PublicResponse(kind, f"gsm8k train/{index}", "gsm8k", text, answer.strip(), None)


def judge(responses: list[PublicResponse]) -> list[bool]:
    """Whether each is right, by the verifiers of this checkout."""
    verdicts: list[bool] = []
    with VerifierPool(load_config(PPOConfig, "ppo_trainer").reward_score) as pool:
        for start in range(0, len(responses), AT_A_TIME):
            _, _, *columns = zip(*responses[start : start + AT_A_TIME], strict=True)
            verdicts += [verdict.correct for verdict in pool.score_batch(*map(list, columns))]
    return verdicts


def public_rows(label: str, data: Path, right: Path) -> list[dict[str, Any]]:
    """Counts of public responses by kind; prints and counts those of ``before`` that are lost."""
    responses = list(public_responses(data))
    verdicts = judge(responses)
    names = {f"{kind}: {name}": kind for kind, name, *_ in responses}
    found = [name for name, verdict in zip(names, verdicts, strict=True) if verdict]
    right.with_suffix(f".{label}").write_text("\n".join(found))
    lost = set(right.with_suffix(".before").read_text().split("\n")) - set(found)
    print(*sorted(lost), sep="\n")
    columns = {"responses": names, "right": found, "lost": lost}
    counts = {column: Counter(names[name] for name in listed) for column, listed in columns.items()}
    kinds = dict.fromkeys(names.values())
    return [{"label": label, "kind": kind, **{column: counts[column][kind] for column in counts}} for kind in kinds]


def public_table(rows: list[dict[str, Any]]) -> str:
    """How many of each kind are right, a column for each label."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    sizes = {row["kind"]: f"{row['responses']:,}" for row in rows}
    cells = {(row["kind"], row["label"]): f"{row['right']:,} ({row['lost']})" for row in rows}
    return (
        "\nResponses made of published data, all of which are right (public_verdicts.py): how many are judged so; in "
        "brackets, how many of those that were right before are no longer.\n\n"
        + table(
            ["Response", "All:", *(f"{label}:" for label in labels)],
            [[kind, size, *(cells.get((kind, label), "") for label in labels)] for kind, size in sizes.items()],
        )
    )
