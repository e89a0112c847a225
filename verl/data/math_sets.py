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
class MathSet:
    """Where a set is on the hub and how its rows are read."""

    hub_id: str
    """Also the ``data_source`` of its records, which names their verifier."""
    config: str | None
    """Configuration name on the hub; None for the default one."""
    read: Callable[[Row], dict[str, str]]
    """The ``question`` and ``ground_truth`` of a row, and its ``solution`` and ``category`` if it has them; empty
    texts for what is missing."""


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
    common = {"data_source": math_set.hub_id, "split": split, "instruction": instruction}
    records = []
    for index, row in enumerate(rows):
        problem = math_set.read(row)
        require(bool(problem["question"]), f"{name} {split} row {index}", dict(row), "has no question")
        if problem["ground_truth"]:
            records.append(rl_record(index=index, **common, **problem))
    return records


def _local_rows(folder: Path, split: str) -> Iterable[Row]:
    # A file as published comes before its conversion.
    paths = [folder / f"{split}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
    existing = [path for path in paths if path.exists()]
    if not existing:
        raise ValueError(f"local_dir={str(folder)!r}: needs one of {', '.join(path.name for path in paths)}")
    return read_rows(str(existing[0]))


def _hub_rows(math_set: MathSet, split: str, subset: str) -> Iterable[Row]:
    files = {"data_files": {split: f"{subset}/{split}.parquet"}} if subset else {}
    rows: Iterable[Row] = load_dataset(math_set.hub_id, math_set.config, split=split, **files)
    return rows


def _read_gsm8k(row: Row) -> dict[str, str]:
    answer = row["answer"]
    return {"question": row["question"], "ground_truth": extract_gsm8k(answer) or "", "solution": answer}


def _read_math(row: Row) -> dict[str, str]:
    answer = row.get("answer") or extract_boxed(row["solution"]) or ""
    level = str(row.get("level") or "")
    return {"question": row["problem"], "ground_truth": str(answer), "solution": row["solution"], "category": level}


def _read_simplerl(row: Row) -> dict[str, str]:
    question = row.get("question") or (row.get("extra_info") or {}).get("question") or ""
    answer = row.get("gt_answer") or (row.get("reward_model") or {}).get("ground_truth") or ""
    level = row.get("level")
    return {"question": question, "ground_truth": str(answer), "category": "" if level is None else str(level)}


MATH_SETS = {
    "gsm8k": MathSet("openai/gsm8k", "main", _read_gsm8k),
    "math": MathSet("DigitalLearningGmbH/MATH-lighteval", None, _read_math),
    "simplerl-zoo": MathSet("hkust-nlp/SimpleRL-Zoo-Data", None, _read_simplerl),
}
"""Name on the command line -> set."""
