"""Problems of reasoning-gym: data sets, their verifier and answers that are code, with a small package in its place."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from tests.kit import data_options, documented, ppo_config, scoring
from tests.tables import refusals
from verl.cli.eval_arguments import plain_arguments
from verl.cli.translate import translate
from verl.config.data import GeneratedSet
from verl.config.evaluation import EvaluationConfig
from verl.config.load import load_config
from verl.data.prompts import PromptDataset
from verl.data.reasoning_gym import generated_rows
from verl.evaluation.targets import Target
from verl.evaluation.tasks import load_problems, validation_problems
from verl.rewards import compute_score
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import check_ground_truth
from verl.verifiers.reasoning_gym import load_generator
from verl_pages.sample_files import shown_truth

FACTORY = """
import os, random, time
from dataclasses import dataclass

@dataclass
class Config:
    seed: int
    size: int
    most: int = 9
    bonus: float = 0.0

class Sums:
    def __init__(self, config):
        assert config.most > 0, "most must be positive"
        self.config = config

    def __len__(self):
        return self.config.size

    def __getitem__(self, index):
        draw = random.Random(self.config.seed + index)
        a, b = draw.randint(1, self.config.most), draw.randint(1, self.config.most)
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {"terms": (a, b), 7: {a}}}

    def score_answer(self, answer, entry):
        assert isinstance(entry["metadata"]["terms"], tuple) and 7 in entry["metadata"]
        found = eval(answer)
        return 1.0 if found == sum(entry["metadata"]["terms"]) else 0.01 + self.config.bonus

class Objects(Sums):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"metadata": object()}

DATASETS = {"sums": (Sums, Config), "objects": (Objects, Config)}
"""
PACKAGE = """
from .factory import DATASETS

def create_dataset(name, **options):
    made, config = DATASETS[name]
    return made(config(**options))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "packages" / "reasoning_gym"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "factory.py").write_text(FACTORY)
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder.parent)
    load_generator.cache_clear()
    yield
    load_generator.cache_clear()
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        sys.modules.pop(name, None)


def truth(**options: Any) -> Any:
    """The ground truth of 3 + 5."""
    (row,) = generated_rows("reasoning_gym:a", GeneratedSet("sums", 17, 1, options))
    assert row["prompt"] == [{"role": "user", "content": "9 + 7?"}]
    return row["reward_model"]["ground_truth"]


def test_generated_sets_become_records(package):
    entries = {"easy": {"dataset": "sums", "size": 3, "most": 4}, "sums": {"seed": 5, "size": 2}}
    config = data_options(train_files=["reasoning_gym:easy"], val_files=["reasoning_gym:sums"], generated=entries)
    dataset = PromptDataset(["reasoning_gym:easy", "reasoning_gym:sums"], make_tiny_tokenizer(), config)
    assert [record.messages[0]["content"] for record in dataset.records] == [
        *("4 + 4?", "2 + 1?", "1 + 1?"),
        *("5 + 6?", "2 + 8?"),
    ]
    assert dataset.sizes == [3, 2] and dataset[1].data_source == "reasoning_gym/sums"
    assert dataset[1].extra_info == {"index": 1, "set": "reasoning_gym:easy"}
    truth = json.loads(json.dumps(dataset[1].ground_truth))
    assert truth["answer"] == "3" and truth["options"] == {"most": 4, "seed": 0, "size": 3}
    assert truth["problem"] == repr({"question": "2 + 1?", "answer": "3", "metadata": {"terms": (2, 1), 7: {2}}})


@pytest.mark.parametrize(
    ("response", "score", "right", "reason"),
    [
        ("I add. <answer> 16 </answer>", 1.0, True, "equivalent"),
        ("<answer>1</answer> no, <answer>16</answer>", 1.0, True, "equivalent"),
        ("so \\boxed{16}", 1.0, True, "equivalent"),
        ("16", 1.0, True, "equivalent"),
        ("<think><answer>16</answer></think> 15", 0.01, False, "different"),
        ("<answer>15</answer>", 0.01, False, "different"),
        ("sixteen", 0.0, False, "unparsed"),
        ("", 0.0, False, "missing"),
        ("1" * 5000, 0.0, False, "missing"),
        ("<answer>float('nan')</answer>", 0.01, False, "different"),
        ("<answer>exit()</answer>", 0.0, False, "unparsed"),
    ],
)
def test_responses_get_the_scorers_score(package, response: str, score: float, right: bool, reason: str):
    for mode in ("mix", "independent"):
        scored = compute_score("reasoning_gym/sums", response, truth(), mode=mode)
        assert (scored["score"], scored["acc"], scored["reason"]) == (score, right, reason)
    # Scorers get the options of the set, and the ground truth may be text.
    bonus = 0.25 if score == 0.01 else 0.0
    assert compute_score("reasoning_gym/sums", response, json.dumps(truth(bonus=0.25)))["score"] == score + bonus


@pytest.mark.parametrize(
    ("value", "shown"),
    [({"answer": "16", "problem": "{}"}, "16"), ({"Ann": "knight"}, '{"Ann": "knight"}'), ("16", "16"), (None, "")],
)
def test_pages_show_the_answer_of_a_problem(value: Any, shown: str):
    assert shown_truth(json.dumps(value)) == shown


@pytest.mark.parametrize(
    "code",
    [
        "open('{file}', 'w').write('x')",
        "__import__('os').system('touch {file}')",
        "__import__('pathlib').Path('{file}').touch()",
        "__import__('subprocess').run(['touch', '{file}'])",
        "__import__('os').kill(__import__('os').getpid(), 9)",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
    ],
)
def test_answers_that_are_code_stay_in_the_process(package, tmp_path: Path, code: str):
    file = tmp_path / "harm"
    scored = compute_score("reasoning_gym/sums", f"<answer>{code.format(file=file)}</answer>", truth())
    assert (scored["score"], scored["reason"]) == (0.0, "unparsed") and not file.exists()
    file.write_text("afterwards files can be written")
    assert file.exists()


@pytest.mark.slow
def test_answer_that_hangs_scores_zero(package):
    responses = [f"<answer>{code}</answer>" for code in ("16", "9**9**9**9", "15")]
    with VerifierPool(scoring(mode="independent", num_workers=1, timeout_s=2.0)) as pool:
        verdicts = pool.score_batch(["reasoning_gym/sums"] * 3, responses, [truth()] * 3)
    assert [(verdict.score, verdict.reason) for verdict in verdicts] == [
        *((1.0, "equivalent"), (0.0, "timeout"), (0.01, "different"))
    ]


@pytest.mark.parametrize(("dataset", "options", "line"), refusals("data/refusals.txt", "generators"))
def test_sets_that_cannot_be_generated_are_refused(package, dataset: str, options: str, line: str, refused):
    with refused(line):
        generated_rows("reasoning_gym:a", GeneratedSet(dataset, 0, 2, eval(options)))


def test_missing_package_or_problem_is_refused(monkeypatch: pytest.MonkeyPatch, refused):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    load_generator.cache_clear()
    with refused("reasoning_gym/sums: ...; `pip install reasoning-gym`"):
        load_generator("sums", "{}")
    with refused("...ground_truth: {}: must be a problem of reasoning-gym, with answer, dat..."):
        check_ground_truth("reasoning_gym/sums", "{}")


@pytest.mark.parametrize(("options", "message"), refusals("data/refusals.txt", "generated"))
def test_options_of_generated_sets_are_refused(options: str, message: str, refused):
    with refused(message):
        ppo_config(options)


def test_train_and_eval_take_entries_without_a_plus(package):
    assert "++data.generated.a={size:5}" in translate(
        ["data.train_files=[reasoning_gym:a]", "data.generated.a={size:5}"]
    )
    words = plain_arguments(["benchmarks=held", "data.generated.held={dataset:sums,size:2,seed:17}"], EvaluationConfig)
    config = load_config(EvaluationConfig, "evaluation", words)
    problems = load_problems("held", config)
    assert [problem.question for problem in problems] == ["9 + 7?", "3 + 2?"]
    assert problems[0].data_source == "reasoning_gym/sums" and problems[0].answer["answer"] == "16"


def test_evaluation_reads_the_runs_generated_sets(package, tmp_path: Path):
    data = {"val_files": ["reasoning_gym:held"], "prompt_key": "prompt", "reward_fn_key": "data_source"}
    data |= {"answer_key": None, "data_source": None, "generated": {"held": {"dataset": "sums", "seed": 17, "size": 1}}}
    (tmp_path / "config.yaml").write_text(json.dumps({"data": data}))
    target = Target("run", 0, "", "chat", 8, folder=str(tmp_path))
    config = load_config(EvaluationConfig, "evaluation", [f"model.path={tmp_path}"])
    (found,) = validation_problems([target], config).items()
    assert found[0] == "reasoning_gym_held" and [problem.question for problem in found[1]] == ["9 + 7?"]


def test_documented_curriculum_goes_on_after_success(tmp_path: Path):
    names: dict[str, Any] = {}
    exec(documented("data", "levels.py"), names)
    records = [SimpleNamespace(extra_info={"set": name}) for name in "aabb"]
    levels = names["Levels"](records, None, 0)
    drawn = iter(levels)
    first = [next(drawn) for _ in range(2)]
    levels.update(SimpleNamespace(accuracy=[0.5, 1.0]))
    assert sorted(first) == [0, 1] and {next(drawn), next(drawn)} == {2, 3} and len(levels) == 4
    saved = levels.state_dict()
    again = names["Levels"](records[1:3], None, 0)
    again.load_state_dict(saved)
    assert again.state_dict() == saved and next(iter(again)) == 1


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_every_generator_scores_its_own_answers():
    from reasoning_gym.factory import DATASETS

    wrong = []
    for name in sorted(DATASETS.keys() - {"composite"}):
        for row in generated_rows(f"reasoning_gym:{name}", GeneratedSet(name, 1, 2, {})):
            truth = json.loads(json.dumps(row["reward_model"]["ground_truth"]))
            answer = f"<answer>{truth['answer']}</answer>"
            if truth["answer"] and not compute_score(row["data_source"], answer, truth)["acc"]:
                wrong.append(name)
    assert wrong == []
