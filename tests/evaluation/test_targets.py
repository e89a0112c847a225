"""Which models a configuration names."""

import os
from pathlib import Path

import pytest

from tests.evaluation.fakes import evaluation_config
from verl.config.evaluation import CandidateConfig
from verl.evaluation.targets import newest_run, select_targets


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def make_run(folder: Path, base: Path, steps: list[int], experiment: str = "verl_grpo") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model: {{path: {base}}}\ntrainer: {{experiment_name: {experiment}}}\n")
    for step in steps:
        make_model(folder / f"global_step_{step}" / "actor" / "huggingface")
    if steps:
        (folder / "latest_checkpointed_iteration.txt").write_text(f"{max(steps)}\n")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model(tmp_path / "base")


def candidate(path: Path | str | None, steps: list[int] = [0, -1], **changes: object) -> CandidateConfig:  # noqa: B006
    values = {"base": None, "template": "chat", "max_response_length": 8} | changes
    return CandidateConfig(path=None if path is None else str(path), steps=steps, **values)


def labels(*candidates: CandidateConfig, **named: CandidateConfig) -> tuple[list[tuple[str, str]], list[str], str]:
    model = candidates[0] if candidates else candidate("unused/model")
    selection = select_targets(evaluation_config(model=model, runs=named))
    return [(target.label, target.path) for target in selection.targets], selection.problems, selection.name


def test_a_run_gives_its_steps(tmp_path, base):
    run = make_run(tmp_path / "2026", base, [40, 80])
    model = "actor/huggingface"
    assert labels(candidate(run)) == (
        [("verl_grpo@0", str(base)), ("verl_grpo@80", f"{run}/global_step_80/{model}")],
        [],
        "verl_grpo_2026",
    )
    # 80 is the newest: named twice, evaluated once.
    found, problems, name = labels(mine=candidate(run, [-1, 40, 80], base="elsewhere"))
    assert [label for label, _ in found] == ["mine@80", "mine@40"]
    assert (problems, name) == ([], "mine")


def test_a_step_that_is_not_there_costs_itself_alone(tmp_path, base):
    run = make_run(tmp_path / "run", base, [40, 80])
    found, problems, _ = labels(a=candidate(run, [60, 80]), b=candidate(tmp_path / "nowhere"))
    assert [label for label, _ in found] == ["a@80"]
    assert problems[0] == (f"runs.a.steps=60: no model in {run}/global_step_60/actor/huggingface; there are 40, 80")
    assert problems[1].startswith(f"runs.b.path='{tmp_path}/nowhere': no config.json there")
    assert len(problems) == 2
    young = make_run(tmp_path / "young", base, [8])
    (young / "global_step_8" / "actor" / "huggingface" / "config.json").unlink()
    assert labels(candidate(young, [-1]))[1] == [
        f"model.steps=-1: no model in {young}/global_step_8/actor/huggingface; there are 8"
    ]


def test_a_base_model_that_is_gone_is_named(tmp_path, base):
    run = make_run(tmp_path / "run", tmp_path / "gone", [8])
    found, problems, _ = labels(candidate(run))
    assert [label for label, _ in found] == ["verl_grpo@8"]
    assert problems[0].startswith(f"model.base='{tmp_path}/gone': no config.json there")
    assert [label for label, _ in labels(candidate(run, base=str(base)))[0]] == ["verl_grpo@0", "verl_grpo@8"]


@pytest.mark.parametrize(
    ("inner", "label"), [("global_step_40", "verl_grpo@40"), ("global_step_40/actor/huggingface", "verl_grpo@40")]
)
def test_a_checkpoint_of_a_run_is_that_step(inner, label, tmp_path, base):
    run = make_run(tmp_path / "run", base, [40, 80])
    assert [found for found, _ in labels(candidate(run / inner))[0]] == [label]


def test_a_model_by_itself_is_step_0(tmp_path, base):
    assert labels(candidate(base)) == ([("base@0", str(base))], [], "base")
    assert labels(candidate("Qwen/Qwen2.5-1.5B")) == ([("Qwen2.5-1.5B@0", "Qwen/Qwen2.5-1.5B")], [], "Qwen2.5-1.5B")
    odd = make_model(tmp_path / "my model (v2)!")
    assert labels(candidate(odd)) == ([("my_model_v2@0", str(odd))], [], "my_model_v2")


def test_the_newest_run_from_the_base_model(tmp_path, base):
    other = make_model(tmp_path / "other")
    runs = tmp_path / "outputs"
    for age, (name, start) in enumerate([("verl/a", base), ("verl/b/0", base), ("verl/c", other)]):
        pointer = make_run(runs / name, start, [age + 1]) / "latest_checkpointed_iteration.txt"
        os.utime(pointer, (age, age))
    make_run(runs / "without_checkpoint", base, [])
    assert newest_run(runs, str(base)) == runs / "verl" / "b" / "0"
    assert newest_run(runs, str(tmp_path)) is None
    assert newest_run(tmp_path / "nowhere", str(base)) is None
    selection = select_targets(evaluation_config(model=candidate(None, base=str(base)), runs_dir=str(runs)))
    assert [target.label for target in selection.targets] == ["verl_grpo@0", "verl_grpo@2"]
    assert (selection.notes, selection.name) == ([], "verl_grpo_0")


def test_without_a_run_the_base_model_alone(tmp_path, base):
    runs = str(tmp_path / "outputs")
    selection = select_targets(evaluation_config(model=candidate(None, base=str(base)), runs_dir=runs))
    assert [target.label for target in selection.targets] == ["base@0"]
    assert selection.notes == [
        f"no run of train.sh from {base} with a checkpoint below {runs}/: evaluating that model alone; `bash train.sh` "
        "trains it"
    ]
