import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import PUBLISHED

from scripts.prepare_data import BOXED_INSTRUCTION, main
from tests.kit import ROOT, jsonl, parquet
from verl.data.records import RL_SCHEMA
from verl.rewards import compute_score

GSM8K = PUBLISHED / "gsm8k"


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


SPLITS = {"train": 4096, "test": 256, "sft_train": 8192, "sft_val": 256}


def rows_of(task: str) -> dict[str, list[dict[str, Any]]]:
    return {name: read(ROOT / "data" / task / f"{name}.parquet") for name in SPLITS}


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[dict[str, Any]]]:
    return rows_of("arithmetic")


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        ("arithmetic", SPLITS),
        ("arithmetic_tools", {"train": 2048, "test": 128, "sft_train": 8192, "sft_val": 128}),
        ("word_problems", SPLITS | {"sft_train": 2048}),
    ],
)
def test_shipped_files_are_reproduced(task: str, sizes: dict[str, int], tmp_path: Path):
    main([task.replace("_", "-"), "--out", str(tmp_path)])
    for name, rows in rows_of(task).items():
        assert len(rows) == sizes[name]
        # Compared as a truth value: the difference of thousands of rows would take pytest minutes to print.
        same = read(tmp_path / f"{name}.parquet") == rows
        assert same, f"data/{task}/{name}.parquet differs from what scripts/prepare_data.py makes"


def test_shipped_files_share_no_problem_and_are_solved(shipped: dict[str, list[dict[str, Any]]]):
    questions = [row["prompt"][0]["content"] for row in shipped["train"] + shipped["test"]]
    questions += [row["messages"][0]["content"] for row in shipped["sft_train"] + shipped["sft_val"]]
    assert len(set(questions)) == sum(SPLITS.values())
    assert [row["extra_info"]["index"] for row in shipped["test"]] == list(range(256))
    for row in shipped["test"]:
        assert row["extra_info"]["split"] == "test"
        assert row["extra_info"]["category"] in ("sum", "difference", "product")
        truth = row["reward_model"]["ground_truth"]
        score = compute_score(row["data_source"], row["extra_info"]["solution"], truth, row["extra_info"])
        assert score["score"] == 1.0
    for row in shipped["sft_val"]:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_seed_and_digits_are_options(tmp_path: Path, shipped: dict[str, list[dict[str, Any]]]):
    sizes = ["--train", "60", "--test", "20", "--sft-train", "50", "--sft-val", "10"]
    main(["arithmetic", "--out", str(tmp_path), *sizes, "--seed", "6", "--product-digits", "4", "4"])
    questions = [row["extra_info"]["question"] for row in read(tmp_path / "train.parquet")]
    products = [re.findall(r"\d+", question)[0] for question in questions if "*" in question]
    assert products and {len(factor) for factor in products} == {4}
    assert questions[:10] != [row["extra_info"]["question"] for row in shipped["train"][:10]]
    for command, line in {
        f"arithmetic --out {tmp_path} --product-digits 5 4": "product_digits=.5, 4.",
        f"gsm8k --out {tmp_path} --local-dir {tmp_path / 'none'}": "needs one of train.json, train.jsonl",
    }.items():
        with pytest.raises(SystemExit, match=line):
            main(command.split())


def test_gsm8k_from_local_files(tmp_path: Path):
    row = {"question": "How many?", "answer": "3 * 400 = <<3*400=1200>>1200\n#### 1,200"}
    for split in ("train", "test"):
        jsonl(tmp_path / f"{split}.jsonl", row)
    main(["gsm8k", "--out", str(tmp_path / "out"), "--local-dir", str(tmp_path)])
    info = {"split": "test", "index": 0, "question": "How many?", "solution": row["answer"], "category": ""}
    (written,) = read(tmp_path / "out" / "test.parquet")
    assert written == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How many?\n{BOXED_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": info,
    }


@pytest.mark.skipif(not GSM8K.exists(), reason=f"the GSM8K sample is not at {GSM8K}")
def test_published_gsm8k_answers_are_numbers(tmp_path: Path):
    main(["gsm8k", "--out", str(tmp_path), "--local-dir", str(GSM8K), "--instruction", ""])
    for split, count in {"train": 7473, "test": 1319}.items():
        rows = read(tmp_path / f"{split}.parquet")
        assert len(rows) == count
        assert all(row["reward_model"]["ground_truth"].lstrip("-").replace(".", "").isdigit() for row in rows)
        assert rows[0]["prompt"][0]["content"] == rows[0]["extra_info"]["question"]


def test_math_from_local_files(tmp_path: Path):
    rows = [
        {"problem": "P?", "solution": r"so \boxed{1} is wrong and \boxed{\frac{1}{2}} right", "level": "Level 5"},
        {"problem": "Q?", "solution": "by the lemma", "answer": "7"},
        {"problem": "R?", "solution": "left to the reader"},
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    main(["math", "--out", str(tmp_path), "--local-dir", str(tmp_path), "--instruction", ""])
    written = read(tmp_path / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in written] == [r"\frac{1}{2}", "7"]
    assert [row["extra_info"]["category"] for row in written] == ["Level 5", ""]
    assert written[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"


def test_simplerl_zoo_prompts_are_built_from_questions(tmp_path: Path):
    template = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    rows = [
        {
            "question": question,
            "gt_answer": answer,
            "level": 3,
            "prompt": [{"role": "user", "content": template.format(question)}],
            "reward_model": {"style": "rule", "ground_truth": answer},
        }
        for question, answer in [("P?", "1"), ("no answer?", ""), ("Q?", r"\sqrt{2}")]
    ]
    for split in ("train", "test"):
        parquet(tmp_path / f"{split}.parquet", *rows)
    main(["simplerl-zoo", "--out", str(tmp_path / "out"), "--local-dir", str(tmp_path), "--instruction", "Box it."])
    written = read(tmp_path / "out" / "train.parquet")
    assert [row["prompt"] for row in written] == [
        [{"role": "user", "content": "P?\nBox it."}],
        [{"role": "user", "content": "Q?\nBox it."}],
    ]
    assert [row["extra_info"]["index"] for row in written] == [0, 2]
    assert [row["extra_info"]["category"] for row in written] == ["3", "3"]
    assert pq.read_schema(tmp_path / "out" / "train.parquet").equals(RL_SCHEMA)


@pytest.mark.parametrize(
    ("command", "config", "files"),
    [
        (["gsm8k"], "main", None),
        (["math"], None, None),
        (["simplerl-zoo", "--subset", "simplelr_abel_level3to5"], None, "simplelr_abel_level3to5/{}.parquet"),
    ],
)
def test_published_names_are_read_from_the_hub(
    command: list[str], config: str | None, files: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def load_dataset(path: str, name: str | None = None, **options: Any) -> list[dict[str, Any]]:
        asked.append((path, name, options))
        return [{"question": "Q?", "problem": "Q?", "answer": "#### 1", "solution": r"\boxed{1}", "gt_answer": "1"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    main([*command, "--out", str(tmp_path)])
    for (path, name, options), split in zip(asked, ("train", "test"), strict=True):
        expected = {"split": split} | ({"data_files": {split: files.format(split)}} if files else {})
        assert (name, options) == (config, expected)
        assert read(tmp_path / f"{split}.parquet")[0]["data_source"] == path
