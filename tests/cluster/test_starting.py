"""The ways to start on two machines: each gives the numbers of one machine with two workers, to the bit."""

import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import ROOT, small_overrides

from tests.cluster.machines import HEAD, NETWORK, Machine, Process, cluster
from tests.e2e.runs import records

pytestmark = pytest.mark.nightly

RAY = ["--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def machines(shared: Path, tiny_model: Path, arithmetic_prompts: Path) -> Iterator[tuple[Machine, ...]]:
    """Two machines whose own names resolve to 127.0.1.1, and which do not know each other's."""
    folders = [shared, tiny_model, arithmetic_prompts.parent]
    with cluster(2, shared / "machines", folders, names="loopback") as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(machines: tuple[Machine, ...], request: pytest.FixtureRequest) -> Iterator[None]:
    """No process of a run or of its cluster is left on any machine."""
    yield
    for machine in machines:
        left = machine.survivors()
        if left:  # the next test must not find them
            machine.kill()
            machine.boot()
        assert left == []


class Jobs:
    """The two commands of the proof, and what they gave on one machine."""

    def __init__(self, shared: Path, model: Path, prompts: Path) -> None:
        self.shared, self.model, self.prompts = shared, model, prompts

    def train(self, folder: Path, *more: str) -> list[str]:
        overrides = small_overrides(self.model, self.prompts, folder)
        overrides += ["rollout.name=hf", "actor.optim.lr=1e-3", "reward_manager.add_reward=true", *more]
        return ["bash", "train.sh", *overrides]

    def evaluate(self, folder: Path, *more: str) -> list[str]:
        options = ["evaluation=embedded", f"model.path={self.model}", "data.max_problems=8", "n_sampling=2"]
        options += ["model.max_response_length=12", "rollout.kv_cache_memory_mb=32", f"runs_dir={self.shared}"]
        options += ["temperatures=[1.0]", "device=cpu", "trainer.n_gpus_per_node=1"]
        return ["bash", "eval.sh", *options, f"trainer.default_local_dir={folder}", *more]


@pytest.fixture(scope="module")
def jobs(shared: Path, tiny_model: Path, arithmetic_prompts: Path) -> Jobs:
    return Jobs(shared, tiny_model, arithmetic_prompts)


@pytest.fixture(scope="module")
def trained(machines: tuple[Machine, ...], jobs: Jobs, shared: Path) -> list[dict[str, float]]:
    code, text = machines[0].run(jobs.train(shared / "one", "trainer.n_gpus_per_node=2"))
    assert code == 0, text
    assert len(records(shared / "one")) == 3
    return records(shared / "one")


@pytest.fixture(scope="module")
def evaluated(machines: tuple[Machine, ...], jobs: Jobs, shared: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    code, text = machines[0].run(jobs.evaluate(shared / "eval1", "trainer.n_gpus_per_node=2"))
    assert code == 0, text
    assert samples(shared / "eval1")
    return samples(shared / "eval1"), records(shared / "eval1")


def samples(folder: Path) -> dict[str, str]:
    """Responses and verdicts of an evaluation, by file."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("samples*.jsonl"))}


def on_both(
    machines: Sequence[Machine], command: list[str], folder: Path, variables: Sequence[dict[str, str]]
) -> list[Process]:
    """The same command on each machine, each with its own variables; the last machine first."""
    pairs = list(zip(machines, variables, strict=True))
    started = [m.start(command, folder / f"{m.name}.log", **own) for m, own in reversed(pairs)]
    return started[::-1]


def succeed(*processes: Process) -> None:
    assert [process.wait() for process in processes] == [0] * len(processes), [process.text for process in processes]


def by_number(shared: Path) -> list[dict[str, str]]:
    common = {"NNODES": "2", "MASTER_ADDR": HEAD, "VERL_CLUSTER_DIR": str(shared / "cluster")}
    return [common | {"NODE_RANK": str(rank)} for rank in range(2)]


def test_one_command_on_every_machine(machines, jobs, trained, evaluated, shared, tmp_path):
    processes = on_both(machines, jobs.train(shared / "two"), tmp_path, by_number(shared))
    succeed(*processes)
    assert records(shared / "two") == trained
    assert f"machine 1 of 2 (machine2, {NETWORK}.2) has joined {HEAD}:6379" in processes[1].text
    # The token is gone with the cluster, and was nowhere but there.
    assert not (shared / "cluster").exists()
    assert machines[0].run(["ls", "/tmp/home/.ray"])[0] == 2
    succeed(*on_both(machines, jobs.evaluate(shared / "eval2"), tmp_path, by_number(shared)))
    assert (samples(shared / "eval2"), records(shared / "eval2")) == evaluated


SCONTROL = f"""#!/bin/sh
[ "$*" = "show hostnames machine[1-2]" ] && printf '{HEAD}\\n{NETWORK}.2\\n'
"""
SRUN = """#!/bin/sh
printf '%s\\n' "$@" >"$SRUN_CALL"
"""


def test_slurm(machines, jobs, trained, shared, tmp_path):
    """Stand-ins: ``srun`` writes its arguments down, ``scontrol`` lists the hosts, the test sets Slurm's variables."""
    tools = shared / "tools"
    tools.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    overrides = jobs.train(shared / "slurm")[2:]
    path = f"{tools}:{Path(shutil.which('python') or '').parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    called = shared / "srun-call"
    batch = ["bash", "scripts/slurm/train.sbatch", *overrides]
    variables = {"SLURM_JOB_ID": "41", "SLURM_SUBMIT_DIR": str(ROOT), "SRUN_CALL": str(called), "PATH": path}
    assert machines[0].run(batch, **variables) == (0, "")
    words = called.read_text().splitlines()
    command = words[words.index("bash") :]
    assert command == ["bash", "train.sh", *overrides]
    step = {
        "SLURM_JOB_ID": "41",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "machine[1-2]",
        "VERL_CLUSTER_DIR": str(shared / "cluster"),
        "PATH": path,
    }
    succeed(*on_both(machines, command, tmp_path, [step | {"SLURM_NODEID": str(rank)} for rank in range(2)]))
    assert records(shared / "slurm") == trained


@pytest.fixture
def head(machines: tuple[Machine, ...]) -> Iterator[dict[str, str]]:
    """A cluster that the user has started with ``ray start``, without the second machine; its token's variables."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    options = ["--head", f"--node-ip-address={HEAD}", "--port=6379", f"--dashboard-host={HEAD}", *RAY]
    assert machines[0].run(["ray", "start", *options], **token)[0] == 0
    yield token
    for machine in machines:
        machine.run(["ray", "stop", "--force"])


def join(machine: Machine, token: dict[str, str], **variables: str) -> None:
    code, text = machine.run(["ray", "start", f"--address={HEAD}:6379", *RAY], **token | variables)
    assert code == 0, text


def test_a_running_cluster(machines, jobs, trained, evaluated, shared, head, tmp_path):
    """The training on its head, which waits for a machine, and the evaluation as a job from elsewhere."""
    one, two = machines
    secret = "hush-9f8e7d"
    variables = head | {"HF_TOKEN": secret, "MY_KEY": secret, "MY_CACHE": "open-1a2b"}
    command = [*jobs.train(shared / "head"), "trainer.nnodes=2", "trainer.env=[MY_*]"]
    process = one.start(command, tmp_path / "train.log", **variables)
    process.wait_for_line("1 of 2 machines here")
    join(two, head)
    succeed(process)
    assert "step 2/2" in process.text and records(shared / "head") == trained
    # Secrets reach the workers, and no file.
    for machine in machines:
        assert machine.run(["grep", "-rl", secret, str(shared / "head"), "/tmp/ray"]) == (1, "")
    dashboard = head | {"RAY_ADDRESS": f"http://{HEAD}:8265"}
    code, text = two.run(jobs.evaluate(shared / "job", "trainer.nnodes=2"), **dashboard)
    assert code == 0, text
    assert (samples(shared / "job"), records(shared / "job")) == evaluated


def older_torch(folder: Path) -> dict[str, str]:
    """Variables of a machine that finds another torch before its own."""
    other = folder / "older" / "torch-2.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")
    return {"PYTHONPATH": str(other.parent)}


def test_what_is_wrong_with_a_machine(machines, jobs, shared, head):
    """One line that names it. The other lines of a machine: tests/single_controller/test_machines.py."""
    one, two = machines
    join(two, head, **older_torch(shared))
    code, text = one.run([*jobs.train(shared / "refused"), "trainer.nnodes=2"], **head)
    said = text.splitlines()[-1].removeprefix("error: ")
    assert code == 1 and said.startswith(f"machine2 ({NETWORK}.2): torch is 2.0.1, on machine1 2."), text
    assert not list((shared / "refused").glob(".probe-*"))


def test_a_job_that_is_stopped_or_refused(machines, jobs, shared, head, tmp_path):
    _, two = machines
    join(two, head)
    dashboard = head | {"RAY_ADDRESS": f"http://{HEAD}:8265"}
    endless = ["trainer.nnodes=2", "trainer.total_training_steps=1000", "trainer.total_epochs=1000"]
    process = two.start(jobs.train(shared / "stopped", *endless), tmp_path / "job.log", **dashboard)
    process.wait_for_line("step 2/")
    process.signal(signal.SIGINT)
    assert process.wait(60) == 130, process.text
    last = len(records(shared / "stopped"))
    assert two.run(["sleep", "5"])[0] == 0
    assert len(records(shared / "stopped")) == last
    # A wrong token is one line.
    wrong = dashboard | {"RAY_AUTH_TOKEN": "f" * 64}
    code, text = two.run([*jobs.train(shared / "refused"), "trainer.nnodes=2"], **wrong)
    assert code == 1 and text.startswith(f"error: RAY_ADDRESS=http://{HEAD}:8265: ") and len(text.splitlines()) == 1
