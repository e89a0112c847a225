"""The skeleton of a run, with a Ray cluster and workers that only record what happens to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from verl.checkpoint.resume import Resumption
from verl.checkpoint.run_lock import run_lock
from verl.config import ConfigError, PPOConfig
from verl.run import session as session_module
from verl.run.session import RaySession, TrainingRun


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started and stopped, in order."""
    found: list[str] = []

    @contextmanager
    def ray_cluster(world_size: int, device_type: str) -> Iterator[None]:
        found.append(f"ray for {world_size} on {device_type}")
        try:
            monkeypatch.setattr("ray.is_initialized", lambda: True)
            yield
        finally:
            found.append("ray ends")

    class WorkerGroup:
        def __init__(self, worker: str, *_: object) -> None:
            found.append(worker)

        def close(self) -> None:
            found.append("workers end")

    monkeypatch.setattr(session_module, "ray_cluster", ray_cluster)
    monkeypatch.setattr(session_module, "WorkerGroup", WorkerGroup)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    return found


def training_run(config: PPOConfig, folder: Path, **changes: object) -> TrainingRun:
    trainer = replace(config.trainer, default_local_dir=str(folder), **changes)
    return TrainingRun(replace(config, trainer=trainer), 4, {}, "cpu")


def test_one_cluster_serves_all_groups_of_a_session(events: list[str]):
    with RaySession(2, 3, "cpu") as session:
        assert events == []
        for name in ("first", "second"):
            session.start_workers(name, None, (), {}).close()
    assert events == ["ray for 6 on cpu", "first", "workers end", "second", "workers end", "ray ends"]


def test_everything_ends_in_order(small_config, tmp_path, events, monkeypatch, capsys):
    removed = session_module.remove_unfinished
    monkeypatch.setattr(session_module, "remove_unfinished", lambda root: (events.append("clean"), removed(root)))
    with pytest.raises(KeyboardInterrupt), training_run(small_config, tmp_path) as run:
        message = r"^trainer\.default_local_dir=.*: another run is using this folder; wait until it ends or name"
        with pytest.raises(ConfigError, match=message), run_lock(tmp_path):
            pass
        tracker, _ = run.start("workers", (), {})
        tracker.log(1, {"a": 1.0})
        (tmp_path / ".global_step_1.abc.unfinished").mkdir()
        raise KeyboardInterrupt
    # Workers may write into the checkpoint until Ray has ended.
    assert events == ["ray for 1 on cpu", "workers", "workers end", "ray ends", "clean"]
    assert not list(tmp_path.glob(".global_step*"))
    hint = f"run the same command with trainer.default_local_dir={tmp_path}\n"
    assert capsys.readouterr().err == f"to start again (there is no checkpoint yet), {hint}"
    with run_lock(tmp_path):
        pass


KEEPS_NOTHING = ({"save_freq": -1}, {"save_freq": -1, "except_save": [5]})
NEEDS_NO_WARNING = ({"save_freq": 0}, {"save_freq": -1, "except_save": [4, 5]}, {"save_freq": -1, "val_only": True})


@pytest.mark.parametrize("changes", [*KEEPS_NOTHING, *NEEDS_NO_WARNING])
def test_a_run_that_keeps_nothing_warns_at_its_start(small_config, tmp_path, events, capsys, changes):
    with training_run(small_config, tmp_path, **changes) as run:
        run.start("workers", (), {})
        lines = capsys.readouterr().out.splitlines()
    warnings = ["warning: trainer.save_freq=-1: the model is lost when the run ends; set it to 0 to keep it"]
    assert [line for line in lines if line.startswith("warning")] == warnings * (changes in KEEPS_NOTHING)


@pytest.mark.parametrize(("steps", "complete"), [(3, False), (4, True)])
def test_a_finished_run_is_complete_without_its_last_checkpoint(
    small_config, tmp_path, events, capsys, steps, complete
):
    """Its ``except_save`` may have kept an earlier one alone."""
    (tmp_path / "summary.json").write_text(f'{{"steps": {steps}}}')
    earlier = Resumption(tmp_path / "global_step_1", 1, {})
    with training_run(small_config, tmp_path, save_freq=-1, except_save=[1]) as run:
        assert run.is_complete(earlier) == complete
        assert not run.is_complete(Resumption(tmp_path.parent / "other" / "global_step_1", 1, {}))
        assert run.is_complete(Resumption(tmp_path / "global_step_4", 4, {}))
        run.report_complete(earlier, {})
    last = "step 4 was its last; raise trainer.total" if complete else "step 1 was its last\n"
    assert f"the run is complete: {last}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folders", "model"),
    [
        ([], None),
        (["global_step_2/actor"], "global_step_2"),
        (["global_step_2/actor/huggingface", "global_step_4/actor"], "global_step_4"),
        (["global_step_2/actor", "global_step_10/actor/huggingface"], "global_step_10/actor/huggingface"),
    ],
)
def test_the_report_names_a_model_that_exists(small_config, tmp_path, capsys, folders, model):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    training_run(small_config, tmp_path).report({"train": 1.0})
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith("model: ")]
    assert found == ([f"model: {tmp_path}/{model}"] if model else [])
    assert lines[-1] == f"metrics: {tmp_path}/metrics.jsonl"
