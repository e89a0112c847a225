"""Which models a configuration names."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation.example_tasks import evaluation_config
from verl.config.evaluation import TargetConfig
from verl.evaluation.targets import PROMPTING, newest_run, select_targets
from verl.run.display import RunDisplay

MODEL = Path("actor", "huggingface")


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def make_run(folder: Path, base: Path, steps: Sequence[int]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model: {{path: {base}}}\ntrainer: {{experiment_name: verl_grpo}}\n")
    for step in steps:
        make_model(folder / f"global_step_{step}" / MODEL)
    if steps:
        (folder / "latest_checkpointed_iteration.txt").write_text(f"{max(steps)}\n")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model(tmp_path / "base")


def entry(path: Path | str | None, *steps: int, base: Path | str | None = None) -> TargetConfig:
    paths = [None if value is None else str(value) for value in (path, base)]
    return TargetConfig(
        *paths,
        steps=list(steps) or [0, -1],
        **(dict.fromkeys(PROMPTING) | {"template": "chat", "max_response_length": 8}),
    )


class Selection(RunDisplay):
    """What was selected, and what the user is told."""

    def __init__(self, model: TargetConfig | None, runs_dir: Path | str, runs: dict[str, TargetConfig]) -> None:
        super().__init__("", 0, {})
        self.said: list[str] = []
        config = evaluation_config(model=model or entry("unused/model"), runs=runs, runs_dir=str(runs_dir))
        self.targets, self.folder_name = select_targets(config, self)

    def say(self, text: str) -> None:
        self.said.append(text)


def select(model: TargetConfig | None = None, runs_dir: Path | str = "unused", **runs: TargetConfig) -> Selection:
    return Selection(model, runs_dir, runs)


def labels(selection: Selection) -> list[str]:
    return [target.label for target in selection.targets]


def test_a_run_gives_its_steps(tmp_path, base):
    run = make_run(tmp_path / "2026", base, [40, 80])
    found = select(entry(run))
    assert labels(found) == ["verl_grpo@0", "verl_grpo@80"]
    assert [target.path for target in found.targets] == [str(base), str(run / "global_step_80" / MODEL)]
    assert (found.errors, found.folder_name) == ([], "verl_grpo_2026")
    # 80 is the newest: named twice, evaluated once.
    found = select(mine=entry(run, -1, 40, 80, base="elsewhere"))
    assert (labels(found), found.errors, found.folder_name) == (["mine@80", "mine@40"], [], "mine")
    # A checkpoint of a run is that step.
    for checkpoint in ("global_step_40", "global_step_40" / MODEL):
        assert labels(select(entry(run / checkpoint))) == ["verl_grpo@40"]


def test_a_run_is_prompted_as_it_was_trained(tmp_path, base):
    run = make_run(tmp_path / "run", base, [40])
    data = "{template: abel, max_response_length: 128, apply_chat_template_kwargs: {}}"
    with (run / "config.yaml").open("a") as config:
        config.write(f"data: {data}\nrollout: {{stop: ['##'], stop_token_ids: [7], temperature: 1.0}}\n")
    unset = replace(entry(run), **dict.fromkeys(PROMPTING))
    found = select(unset)
    settings = [(t.template, t.max_response_length, t.stop, t.stop_token_ids) for t in found.targets]
    assert settings == [("abel", 128, ("##",), (7,))] * 2  # of the base model, too
    assert found.said == [
        f"verl_grpo: template='abel', max_response_length=128, stop=['##'], stop_token_ids=[7], as in "
        f"{run}/config.yaml; temperatures, top_p and n_sampling are the evaluation's own"
    ]
    # What the command sets wins, and a model that is not from a run has the defaults.
    (target, *_) = select(replace(unset, template="chat", stop=[])).targets
    assert (target.template, target.max_response_length, target.stop) == ("chat", 128, ())
    (target,) = select(replace(unset, path=str(base))).targets
    assert (target.template, target.max_response_length, target.chat_arguments) == ("qwen-boxed", 1536, {})
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("abel", "3"))
    assert select(unset).errors == [f"{config}: template=3: must be text, not int"]
    config.write_text(config.read_text().partition("data:")[0] + "data: {messages_key: messages}\n")
    assert {target.template for target in select(unset).targets} == {"chat"}


def test_a_missing_step_or_model_is_an_error_of_its_own(tmp_path, base):
    run = make_run(tmp_path / "run", base, [40, 80])
    found = select(a=entry(run, 60, 80), b=entry(tmp_path / "nowhere"))
    assert labels(found) == ["a@80"]
    missing, nowhere = found.errors
    assert missing == f"runs.a.steps=60: no model in {run}/global_step_60/{MODEL}; the run's steps are 40, 80"
    assert nowhere.startswith(f"runs.b.path='{tmp_path}/nowhere': no config.json there")
    (run / "global_step_80" / MODEL / "config.json").unlink()
    (run / "global_step_80" / "actor" / "shards").mkdir()
    assert select(entry(run, -1)).errors == [
        f"model.steps=-1: no model in {run}/global_step_80/{MODEL}; `python -m verl.trainer.main_export` creates it; "
        "the run's steps are 40, 80"
    ]
    run = make_run(tmp_path / "without_base", tmp_path / "gone", [8])
    found = select(entry(run))
    assert labels(found) == ["verl_grpo@8"]
    assert found.errors[0].startswith(f"model.base='{tmp_path}/gone': no config.json there")
    assert labels(select(entry(run, base=base))) == ["verl_grpo@0", "verl_grpo@8"]


@pytest.mark.parametrize(
    ("path", "name"), [("base", "base"), ("my model (v2)!", "my_model_v2"), ("Qwen/Qwen2.5-1.5B", "Qwen2.5-1.5B")]
)
def test_a_model_by_itself_is_step_0(path: str, name: str, tmp_path):
    model = path if "/" in path else str(make_model(tmp_path / path))
    found = select(entry(model))
    assert [(target.label, target.path) for target in found.targets] == [(f"{name}@0", model)]
    assert (found.errors, found.folder_name) == ([], name)


def test_a_base_model_that_the_run_changed_is_not_taken_for_it(tmp_path, base):
    run = make_run(tmp_path / "run", base, [2])
    config = f"model: {{path: {base}, override_config: {{rope_theta: 9}}}}\ntrainer: {{experiment_name: verl_grpo}}\n"
    (run / "config.yaml").write_text(config)
    found = select(entry(run, 0, 2), tmp_path)
    assert labels(found) == ["verl_grpo@2"]
    assert "changed its base model by model.override_config={'rope_theta': 9}" in found.errors[0]
    assert labels(select(entry(run, 0, 2, base=base), tmp_path)) == ["verl_grpo@0", "verl_grpo@2"]


def test_the_newest_run_from_the_base_model(tmp_path, base):
    runs = tmp_path / "outputs"
    starts = {"verl/a": base, "verl/b/0": base, "verl/c": make_model(tmp_path / "other")}
    for age, (name, start) in enumerate(starts.items()):
        pointer = make_run(runs / name, start, [age + 1]) / "latest_checkpointed_iteration.txt"
        os.utime(pointer, (age, age))
    make_run(runs / "without_checkpoint", base, [])
    assert newest_run(runs, str(base)) == runs / "verl" / "b" / "0"
    assert newest_run(runs, str(tmp_path)) is None
    assert newest_run(tmp_path / "nowhere", str(base)) is None
    found = select(entry(None, base=base), runs)
    assert labels(found) == ["verl_grpo@0", "verl_grpo@2"]
    assert (found.said, found.folder_name) == ([], "verl_grpo_0")
    # Of any base.
    found = select(entry(None), runs)
    assert (found.said, found.folder_name) == ([f"evaluating the newest run, {runs}/verl/c"], "verl_grpo_c")
    assert select(entry(None), tmp_path / "none").errors == [
        f"model.path=None: {tmp_path}/none/ holds no training run with a checkpoint; name a run or a model"
    ]
    # Without a run, the base model alone.
    runs = tmp_path / "nowhere"
    found = select(entry(None, base=base), runs)
    assert labels(found) == ["base@0"]
    reason = f"{runs}/ holds no training run from {base} with a checkpoint"
    assert found.said == [f"note: {reason}; evaluating that model alone (`bash train.sh` trains it)"]


@pytest.mark.parametrize(
    "config",
    [
        b"\x00\xff",
        b"[1]",
        b"model: 3",
        b"model: {path: 3}",
        b"model: {path: [x]}",
        b'model: {path: "a\\0b"}',
        b"{a: " * 999,
    ],
    ids=lambda config: repr(config[:24]),
)
def test_a_damaged_config_of_some_run_costs_that_run_alone(config: bytes, tmp_path, base):
    good, bad = make_run(tmp_path / "good", base, [2]), make_run(tmp_path / "bad", base, [3])
    (bad / "config.yaml").write_bytes(config)
    assert newest_run(tmp_path, str(base)) == good
    found = select(entry(bad, 0, 3))
    assert labels(found) == ["bad@3"] and len(found.errors) == 1
    assert found.errors[0].endswith("config.yaml does not name model.path; name the base model")
