"""Runs on machines that are lost, cut off, stopped or taken away have the numbers of a run that was left alone."""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, Process, cluster
from tests.cluster.training import (
    DETECTION_S,
    Training,
    ray_head,
    ray_join,
    ray_leave,
    stopped_in,
    wait_until,
    workers_gone,
)
from verl.cluster.environment import REQUEUE

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("VERL_RECOVERY_SEED", "17"))
"""Of the random moments; a failure says which it was."""

BUSY_S = 40
"""What a machine that shares its core with others may take longer. On a quiet one it is a second or two."""

LONG = ("trainer.total_training_steps=12", "trainer.max_restarts=20")

Machines = Callable[[int], AbstractContextManager[tuple[Machine, ...]]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, arithmetic_prompts: Path) -> Path:
    """A folder that all machines see, with ``model`` and ``prompts.parquet``."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(tiny_model, folder / "model")
    shutil.copy(arithmetic_prompts, folder / "prompts.parquet")
    return folder


@pytest.fixture
def machines(shared: Path, tmp_path: Path) -> Machines:
    return lambda count: cluster(count, tmp_path / "machines", shared=[shared])


@pytest.fixture
def two_machines(machines: Machines) -> Callable[..., AbstractContextManager[tuple[Machine, Machine, Process]]]:

    @contextmanager
    def start(run: Training, **variables: str) -> Iterator[tuple[Machine, Machine, Process]]:
        with machines(2) as (one, two):
            ray_head(one)
            ray_join(two, one)
            yield one, two, run.start(one, one, **variables)

    return start


@pytest.fixture
def training(shared: Path, request: pytest.FixtureRequest) -> Callable[..., Training]:
    return lambda *options, name="run": Training(
        shared / re.sub(r"\W+", "_", f"{request.node.name}_{name}"),
        shared / "model",
        shared / "prompts.parquet",
        options,
    )


@pytest.fixture(scope="module")
def undisturbed(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, float]]]:
    """The records of the first steps of a run that is left alone, by the time that they are asked for."""

    @cache
    def records() -> list[dict[str, float]]:
        alone = Training(shared / "alone", shared / "model", shared / "prompts.parquet", LONG)
        with cluster(2, tmp_path_factory.mktemp("alone"), shared=[shared]) as (one, two):
            ray_head(one)
            ray_join(two, one)
            assert alone.start(one, one).wait(400) == 0
        found = alone.records()
        assert [record["step"] for record in found] == list(range(1, 13))
        assert len({record["actor/grad_norm"] for record in found}) == 12
        return found

    return lambda steps: records()[:steps]


def test_a_machine_that_dies_and_comes_back(two_machines, training):
    run = training("trainer.total_training_steps=4", "trainer.save_freq=2")
    # Users have several threads a worker.
    with two_machines(run, OMP_NUM_THREADS="2") as (one, two, process):
        wait_until(lambda: len(run.records()) == 3, process)
        before = run.records()
        two.kill()
        process.wait_for_line("attempt 1 ended: worker")
        two.boot()
        ray_join(two, one)
        assert process.wait() == 0, process.text
        assert f"resuming from {run.folder}/global_step_2" in process.text
        # Step 3 was done twice, with the same numbers.
        assert run.records()[:3] == before and len(run.records()) == 4
        # A machine that is busy with other tests may answer so late that the run starts over once more.
        assert int((run.folder / ".attempt").read_text()) >= 2
        assert "on machine2 died in " in process.text
        logs = [path.read_text() for path in run.folder.glob("logs/attempt_1/rank_*.log")]
        assert len(logs) == 2 and any(" on machine2, process " in log for log in logs)
        run.assert_intact()
        assert workers_gone(one, 10) and workers_gone(two, 10)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_random_kills_of_a_machine(machines, training, undisturbed):
    kills, rng = int(os.environ.get("VERL_KILLS", "10")), random.Random(SEED)
    run = training(*LONG)
    with machines(3) as (one, *others):
        ray_head(one)
        spare, used = others
        ray_join(used, one)
        process = run.start(one, one)
        for number in range(kills):
            if number:
                process.wait_for_line(f"restart {number} of")
            moment = rng.choice(("starting", "training", "training", "saving"))
            if moment != "starting":
                # One step further at least, so that the run comes to an end.
                further = min(len(run.records()) + 1, 11)
                wait_until(lambda least=further: len(run.records()) >= least, process)
            if moment == "saving":
                wait_until(run.saving, process)
            else:
                time.sleep(rng.uniform(0, 2))
            silent, comes_back = rng.random() < 0.5, rng.random() < 0.5
            print(f"kill {number + 1}: {used.name} {moment} after step {len(run.records())}", end=" ")
            print("silently" if silent else "", "and comes back" if comes_back else "and is replaced", flush=True)
            assert process.running(), process.text
            used.power_off() if silent else used.kill()
            used.boot()
            if not comes_back:
                spare, used = used, spare
            ray_join(used, one)
        assert process.wait(400) == 0, process.text
        assert process.text.count("ended: ") == kills
        assert run.records() == undisturbed(12)
        run.assert_intact()
        assert workers_gone(one, 10) and workers_gone(used, 10)


@pytest.mark.nightly
def test_the_heads_machine_dies_and_the_job_is_requeued(machines, training, undisturbed):
    run = training("trainer.total_training_steps=5")
    with machines(2) as (one, two):
        for attempt in (1, 2):
            ray_head(one)
            ray_join(two, one)
            process = run.start(one, one)
            if attempt == 2:
                assert process.wait() == 0, process.text
                break
            wait_until(lambda: len(run.records()) >= 2 and run.saving(), process)
            one.power_off()
            # Nobody tells the worker on the other machine.
            assert workers_gone(two, DETECTION_S + BUSY_S)
            ray_leave(two)
            one.boot()
        assert run.records() == undisturbed(5)
        run.assert_intact()
        assert (run.folder / ".attempt").read_text() == "2\n"


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["saving", "healing while saving"])
def test_a_machine_without_network(two_machines, training, undisturbed, moment):
    run = training("trainer.total_training_steps=5")
    with two_machines(run) as (one, two, process):
        wait_until(lambda: len(run.records()) >= 2 and run.saving(), process)
        two.cut()
        if moment == "healing while saving":
            time.sleep(2)
            two.heal()
        else:
            # Both sides know within the same time.
            process.wait_for_line("attempt 1 ended: ", DETECTION_S + BUSY_S)
            assert workers_gone(two, DETECTION_S + BUSY_S)
            two.heal()
            ray_leave(two)
            ray_join(two, one)
        assert process.wait() == 0, process.text
        assert run.records() == undisturbed(5)
        assert ("attempt 1 ended" in process.text) == (moment != "healing while saving")
        run.assert_intact()


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "number"), [("actor.update", signal.SIGTERM), ("finish_save", signal.SIGUSR1)])
def test_a_job_is_cancelled_and_requeued(machines, shared, training, undisturbed, method, number):
    """A signal to every process of all machines, as scancel sends it; the step is finished and saved."""
    run = training("trainer.total_training_steps=5", f"trainer.save_freq={2 if method == 'finish_save' else 0}")
    with machines(2) as both:
        processes = run.start_everywhere(both, shared)
        wait_until(lambda: len(run.records()) >= 1, processes[0])
        with stopped_in(method, run, both, processes[0]):
            assert run.saving() == (method == "finish_save")
            for machine in both:
                for pid in machine.processes():
                    os.kill(pid, number)
            time.sleep(1)  # for what would die of it
        assert [process.wait() for process in processes] == [REQUEUE, REQUEUE], [p.text for p in processes]
        run.assert_intact()
        saved = len(run.records())
        assert saved > 0 and f"{number.name}: step {saved} is saved; exit code 75" in processes[0].text
        assert all(machine.survivors() == [] for machine in both)
        processes = run.start_everywhere(both, shared)
        assert [process.wait() for process in processes] == [0, 0], [p.text for p in processes]
        assert f"resuming from {run.folder}/global_step_{saved}" in processes[0].text
        assert run.records() == undisturbed(5)


@pytest.mark.nightly
def test_going_on_with_fewer_machines(two_machines, training, undisturbed):
    run = training("trainer.total_training_steps=4", "trainer.min_nnodes=1", "trainer.machines_timeout_s=3")
    with two_machines(run) as (one, two, process):
        wait_until(lambda: len(run.records()) >= 2, process)
        two.kill()
        assert process.wait() == 0, process.text
        assert "going on with 1 of 2 machines" in process.text
        alone, found = undisturbed(4), run.records()
        resumed = int(process.text.partition(f"resuming from {run.folder}/global_step_")[2].split()[0])
        assert found[:resumed] == alone[:resumed]
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
            assert found[resumed][name] == pytest.approx(alone[resumed][name], abs=1e-5), name
        run.assert_intact()
