"""Published sets of mathematical problems, converted to the RL record layout.

A set is read from the Hugging Face hub or from local files with the same fields. Layouts on the hub:

- GSM8K: ``question``, ``answer`` ending in ``#### 72``
- MATH: ``problem``, ``solution`` with the answer in its last box (some mirrors add ``answer``), ``level``
- SimpleRL-Zoo: ``question``, ``gt_answer``, ``level``, and a ``prompt`` that already contains a template, so the prompt
  is rebuilt from the question. To train on that prompt as it is, read the file itself with ``data.template=raw``.

A prompt is the question and, on a new line, the instruction, as the templates of the evaluation join them. Problems
without an answer are dropped.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset

from verl.config.checks import require, require_choice
from verl.data.files import read_rows
from verl.data.records import rl_record
from verl.rewards.answers import extract_boxed, extract_gsm8k

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """One problem of a set, independent of the set's field names."""

    question: str
    ground_truth: str
    """The final answer; empty if the set has none."""
    solution: str
    """A worked solution, or empty."""
    category: str
    """The set's level label, or empty."""


@dataclass(frozen=True)
class MathSet:
    """Where a set is on the hub and how its rows are read."""

    data_source: str
    """Verifier name, a key of ``verl.rewards.registry.VERIFIERS``."""
    hub_id: str
    config: str
    """Configuration name on the hub, or empty for the default one."""
    read: Callable[[Row], Example]


def load_math_set(
    name: str, split: str, local_dir: Path | None = None, instruction: str = "", subset: str = ""
) -> list[dict[str, Any]]:
    """The rows of ``RL_SCHEMA`` for one split of the set ``name``, a key of ``MATH_SETS``.

    ``local_dir`` contains ``{split}.jsonl``, ``.json`` (a list) or ``.parquet``; without it the set comes from the hub.
    ``subset`` is the folder on the hub of a set that has several. ``index`` counts the rows as published, so it still
    identifies a row when rows without an answer are dropped. Raises ``ValueError`` for an unknown set, a missing file
    or a row without a question.
    """
    require_choice("data set", name, list(MATH_SETS))
    math_set = MATH_SETS[name]
    rows = _local_rows(local_dir, split) if local_dir else _hub_rows(math_set, split, subset)
    records = []
    for index, row in enumerate(rows):
        example = math_set.read(row)
        require(bool(example.question), f"{name} {split} row {index}", dict(row), "has no question")
        if example.ground_truth:
            records.append(
                rl_record(
                    data_source=math_set.data_source,
                    question=example.question,
                    ground_truth=example.ground_truth,
                    split=split,
                    index=index,
                    instruction=instruction,
                    solution=example.solution,
                    category=example.category,
                )
            )
    return records


def _local_rows(folder: Path, split: str) -> Iterable[Row]:
    # A file as published comes before its conversion.
    suffixes = (".jsonl", ".json", ".parquet")
    for suffix in suffixes:
        path = folder / f"{split}{suffix}"
        if path.exists():
            return read_rows(str(path))
    raise ValueError(f"local_dir={str(folder)!r}: needs one of {', '.join(split + suffix for suffix in suffixes)}")


def _hub_rows(math_set: MathSet, split: str, subset: str) -> Iterable[Row]:
    if subset:
        rows: Iterable[Row] = load_dataset(
            math_set.hub_id, data_files={split: f"{subset}/{split}.parquet"}, split=split
        )
    else:
        rows = load_dataset(math_set.hub_id, math_set.config or None, split=split)
    return rows


def _read_gsm8k(row: Row) -> Example:
    return Example(row["question"], extract_gsm8k(row["answer"]) or "", row["answer"], "")


def _read_math(row: Row) -> Example:
    answer = row.get("answer") or extract_boxed(row["solution"]) or ""
    return Example(row["problem"], str(answer), row["solution"], str(row.get("level") or ""))


def _read_simplerl(row: Row) -> Example:
    extra = row.get("extra_info") or {}
    question = row.get("question") or extra.get("question") or ""
    answer = row.get("gt_answer") or (row.get("reward_model") or {}).get("ground_truth") or ""
    level = row.get("level")
    return Example(question, str(answer), "", "" if level is None else str(level))


MATH_SETS = {
    "gsm8k": MathSet("openai/gsm8k", "openai/gsm8k", "main", _read_gsm8k),
    "math": MathSet("DigitalLearningGmbH/MATH-lighteval", "DigitalLearningGmbH/MATH-lighteval", "", _read_math),
    "simplerl-zoo": MathSet("hkust-nlp/SimpleRL-Zoo-Data", "hkust-nlp/SimpleRL-Zoo-Data", "", _read_simplerl),
}
"""Name on the command line -> set."""
