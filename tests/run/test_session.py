"""The skeleton of a run, with a Ray cluster and workers that only record what happens to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, raise_signal

import pytest
from conftest import changed
from ray.exceptions import RaySystemError

from verl.checkpoint.attempts import Attempt, StaleAttempt, run_lock
from verl.checkpoint.resume import Resumption
from verl.cluster.failures import HeadLost, MachineError, NoRoom, OutOfMemory, RequeueError, WorkerError
from verl.config import ConfigError, PPOConfig
from verl.run import session as session_module
from verl.run.exit_codes import Preempted
from verl.run.session import TrainingRun


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started and stopped, in order."""
    found: list[str] = []

    @contextmanager
    def ray_cluster(world_size: int, device_type: str, object_store_mb: int) -> Iterator[None]:
        found.append(f"ray for {world_size} on {device_type}")
        assert object_store_mb == 256
        try:
            monkeypatch.setattr("ray.is_initialized", lambda: True)
            yield
        finally:
            monkeypatch.setattr("ray.is_initialized", lambda: False)
            found.append("ray ends")

    class WorkerGroup:
        def __init__(self, worker: str, *_: object, supervision: object, check_devices: object) -> None:
            found.append(worker)

        def close(self) -> None:
            found.append("workers end")

    monkeypatch.setattr(session_module, "ray_cluster", ray_cluster)
    monkeypatch.setattr(session_module, "WorkerGroup", WorkerGroup)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(session_module, "gather_machines", lambda nnodes, *_: nnodes)
    return found


def training_run(config: PPOConfig, folder: Path, **changes: object) -> TrainingRun:
    trainer = replace(config.trainer, default_local_dir=str(folder), **changes)
    return TrainingRun(replace(config, trainer=trainer), 4, {}, "cpu")


def test_everything_ends_in_order(small_config, tmp_path, events, monkeypatch, capsys):
    removed = session_module.remove_unfinished
    monkeypatch.setattr(session_module, "remove_unfinished", lambda *of: (events.append("clean"), removed(*of)))
    with pytest.raises(KeyboardInterrupt), training_run(small_config, tmp_path) as run:
        message = r"^trainer\.default_local_dir=.*: another run is using this folder; wait until it ends or name"
        with pytest.raises(ConfigError, match=message), run_lock(tmp_path):
            pass
        tracker, _ = run.start("workers", (), {})
        tracker.log(1, {"a": 1.0})
        (tmp_path / ".global_step_1.attempt_1.abc.unfinished").mkdir()
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


def attempts(run: TrainingRun, failures: list[tuple[int, Exception | None]]) -> int:
    """One attempt after the other records some steps and ends with an error, or with None; how many there were."""
    count = 0

    def train() -> int:
        nonlocal count
        tracker, _ = run.start("workers", (), {})
        steps, error = failures[count]
        count += 1
        for step in range(1, steps + 1):
            tracker.log(step, {"attempt": float(run.attempt.number)})
        if error is not None:
            raise error
        return count

    return run.attempts(train)


LOST = MachineError("worker 1 died", "")
SAME = MachineError("worker 1 died", "worker 1 in generate")
FULL = OutOfMemory("start: worker 0 ran out of GPU memory")
OTHER = MachineError("worker 0 died", "worker 0 in generate")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([(0, None)], 1),
        ([(2, LOST), (2, LOST), (2, LOST), (3, None)], 4),  # machines may be lost in the same step
        ([(2, SAME), (3, SAME), (2, SAME), (4, None)], 4),  # another step each time
        ([(2, SAME), (2, OTHER), (2, SAME), (4, None)], 4),  # another worker each time
        ([(2, SAME), (2, SAME)], "^worker 1 died\nthe attempt before this one ended in the same step with the same"),
        ([(0, LOST), (1, LOST), (2, LOST), (3, LOST)], "^worker 1 died$"),  # one more than max_restarts
        ([(0, RaySystemError("the node is gone")), (3, None)], 2),
        ([(1, LOST), (1, NoRoom("2 machines are needed")), (3, None)], 3),
        ([(0, NoRoom("2 machines are needed"))], "^2 machines are needed$"),
        # The attempt before may not have given the memory back yet; after a step it is this one's own.
        ([(2, LOST), (0, FULL), (0, FULL), (4, None)], 4),
        ([(2, LOST), (1, FULL)], "^start: worker 0 ran out of GPU memory$"),
        ([(0, FULL)], "^start: worker 0 ran out of GPU memory$"),
        ([(1, WorkerError("worker 0 failed in generate: shapes differ"))], "shapes differ"),
        ([(1, ConfigError("data.x=1: too much"))], "^data.x=1"),
        ([(1, HeadLost("the head is gone"))], "^the head is gone$"),
    ],
)
def test_machine_failure_ends_an_attempt_only(small_config, tmp_path, events, failures, expected):
    with training_run(small_config, tmp_path, max_restarts=3) as run:
        if isinstance(expected, int):
            assert attempts(run, failures) == expected
        else:
            with pytest.raises((WorkerError, ConfigError), match=expected) as raised:
                attempts(run, failures)
            assert isinstance(raised.value, RequeueError) == isinstance(failures[-1][1], HeadLost)
        assert run.attempt.number == len(failures)
    # Each attempt released everything before the next one began.
    assert [event for event in events if event == "ray ends"] == ["ray ends"] * len(failures)
    assert events.index("workers end") < events.index("ray ends")
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(f'"attempt": {len(failures)}.0' in line for line in last) and len(last) == failures[-1][0]
    assert not list(tmp_path.glob("metrics.jsonl.*"))


def test_machine_lost_twice_is_no_mistake_in_the_options(small_config, tmp_path, events, monkeypatch):
    waits: list[int] = []
    monkeypatch.setattr(session_module, "cluster_address", lambda: "head:6379")
    monkeypatch.setattr(session_module, "wait_for_machines", lambda nnodes, *_: waits.append(nnodes))
    with training_run(small_config, tmp_path, nnodes=2, max_restarts=3) as run:
        assert attempts(run, [(1, LOST), (1, LOST), (3, None)]) == 3
    # It ends the run with a ConfigError; restarts wait in their own way.
    assert waits == [2]


def test_failure_after_the_scheduler_signal_ends_the_run(small_config, tmp_path, events):
    with training_run(small_config, tmp_path) as run:

        def train() -> None:
            run.start("workers", (), {})
            raise_signal(SIGTERM)
            raise LOST

        with pytest.raises(Preempted, match="^SIGTERM while the run was starting$"):
            run.attempts(train)


def test_a_stale_attempt_takes_nothing_back(small_config, tmp_path, events):
    with training_run(small_config, tmp_path) as run:

        def train() -> None:
            tracker, _ = run.start("workers", (), {})
            Attempt.claim(tmp_path)
            (tmp_path / ".global_step_1.attempt_2.abc.unfinished").mkdir()
            with pytest.raises(StaleAttempt, match=r"metrics\.jsonl: not written by attempt 1"):
                tracker.log(1, {})
            raise LOST

        with pytest.raises(StaleAttempt, match="since attempt 2 has taken over"):
            run.attempts(train)
        with pytest.raises(StaleAttempt, match=r"summary\.json"):
            run.write_summary({})
    assert (tmp_path / ".attempt").read_text() == "2\n" and not (tmp_path / "summary.json").exists()
    assert (tmp_path / ".global_step_1.attempt_2.abc.unfinished").is_dir()


def test_more_workers_than_cores_are_warned_of_or_refused(small_config, tmp_path, events, monkeypatch, capsys):
    monkeypatch.setattr(session_module, "available_cores", lambda: 2)
    line = "warning: trainer.n_gpus_per_node=6: 6 workers on 2 cores, each a process with models and an engine of its "
    for workers in (6, 2):
        folder = tmp_path / str(workers)
        with training_run(small_config, folder, n_gpus_per_node=workers) as run:
            run.start("workers", (), {})
        told = [text for text in capsys.readouterr().out.splitlines() if text.startswith("warning: trainer.n_gpus")]
        assert [text[: len(line)] for text in told] == ([line] if workers == 6 else [])
    refusal = "trainer.n_gpus_per_node=8: 8 workers on 2 cores, of which at most 3 can share one; set trainer."
    with training_run(small_config, tmp_path / "8", n_gpus_per_node=8) as run, pytest.raises(ConfigError) as refused:
        run.start("workers", (), {})
    assert str(refused.value) == f"{refusal}n_gpus_per_node=2"
    # Engines of their own are workers too, and fewer models alone would not do.
    small_config = changed(small_config, rollout={"nnodes": 1, "n_gpus_per_node": 2})
    with training_run(small_config, tmp_path / "pool", n_gpus_per_node=1) as run:
        run.pool = (1, 2)
        run.start("workers", (), {})
    assert (
        "warning: trainer.n_gpus_per_node=1 rollout.nnodes=1 rollout.n_gpus_per_node=2: 3 workers on 2 cores, each a "
        "process with models and an engine of its own: minutes to start, and perhaps all memory; lower both, or "
        "set both options of rollout to 0"
    ) in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        # As with the defaults of veRL, whose checkpoints hold no export.
        (
            ["shards"],
            ["model: {step}", "to have it as transformers and vLLM load it: {export} {step} --out NEW_FOLDER"],
        ),
        (["huggingface", "lora_adapter"], ["model: {actor}/huggingface", "adapters: {actor}/lora_adapter"]),
    ],
)
def test_the_last_lines_say_where_the_model_is(small_config, tmp_path, monkeypatch, capsys, parts, told):
    step = tmp_path / "global_step_4"
    for part in parts:
        (step / "actor" / part).mkdir(parents=True)
    monkeypatch.setattr(session_module, "latest_checkpoint", lambda folder: step)
    training_run(small_config, tmp_path).report({"gen": 1.0})
    export = "python -m verl.trainer.main_export"
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("model:", "to have", "adapters"))
    ]
    assert lines == [line.format(actor=step / "actor", step=step, export=export) for line in told]
