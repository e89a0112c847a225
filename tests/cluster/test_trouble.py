"""What is wrong with a machine is one line that names it, before anything is loaded; and no process stays."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import small_overrides

from tests.cluster.machines import Machine, Process, cluster

pytestmark = pytest.mark.nightly

HEAD = "10.77.0.1"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
RAY = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def machines(shared: Path, tiny_model: Path, arithmetic_prompts: Path, tmp_path: Path) -> Iterator[tuple[Machine, ...]]:
    """A head, and a machine that has not joined; names resolve nowhere."""
    with cluster(2, tmp_path / "machines", [shared, tiny_model, arithmetic_prompts.parent], names="unknown") as found:
        head = ["--head", f"--node-ip-address={HEAD}", "--port=6379", "--include-dashboard=false", *RAY]
        code, text = found[0].run(["ray", "start", *head], **TOKEN)
        assert code == 0, text
        yield found


def join(machine: Machine, **variables: str) -> None:
    code, text = machine.run(["ray", "start", f"--address={HEAD}:6379", *RAY], **TOKEN | variables)
    assert code == 0, text


class Training:
    def __init__(self, shared: Path, model: Path, prompts: Path) -> None:
        self.shared = shared
        self.overrides = [*small_overrides(model, prompts, shared / "run"), "rollout.name=hf", "trainer.nnodes=2"]

    def start(self, machine: Machine, *more: str, **variables: str) -> Process:
        command = ["bash", "train.sh", *self.overrides, "trainer.total_training_steps=1", *more]
        return machine.start(command, self.shared / "log", **TOKEN | variables)


@pytest.fixture
def training(shared: Path, tiny_model: Path, arithmetic_prompts: Path) -> Training:
    return Training(shared, tiny_model, arithmetic_prompts)


def refusal(process: Process) -> str:
    """The last line of a run that fails."""
    assert process.wait() == 1, process.text
    return process.text.splitlines()[-1]


def test_a_machine_comes_late(machines, training):
    one, two = machines
    process = training.start(one)
    process.wait_for_line("1 of 2 machines here")
    join(two)
    assert process.wait() == 0, process.text


def older_torch(folder: Path) -> dict[str, str]:
    """Variables of a machine that finds another torch before its own."""
    other = folder / "older" / "torch-2.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")
    return {"PYTHONPATH": str(other.parent)}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("version", "torch is 2.0.1, on machine1 2."),
        ("folder", "is not the folder that the driver sees; name one that all"),
    ],
)
def test_what_is_wrong_with_a_machine(machines, training, shared, kind, words):
    """The other lines of a machine: tests/single_controller/test_probe.py."""
    one, two = machines
    two.kill()
    two.lacks = [shared] if kind == "folder" else []
    two.boot()
    join(two, **(older_torch(shared) if kind == "version" else {}))
    said = refusal(training.start(one))
    assert said.removeprefix("error: ").startswith("machine2 (10.77.0.2): ") and words in said, said
    # Nothing of the run is left: only what the user has started.
    for machine in machines:
        machine.run(["ray", "stop", "--force"])
        assert machine.survivors() == []
    assert not list((shared / "run").glob(".probe-*"))


def test_secrets_reach_workers_and_no_file(machines, training, shared):
    one, two = machines
    join(two)
    secret = "hush-9f8e7d"
    process = training.start(one, "trainer.env=[MY_*]", HF_TOKEN=secret, MY_KEY=secret, MY_CACHE="open-1a2b")
    process.wait_for_line("step 1/1")
    assert process.wait() == 0
    for machine in machines:
        code, found = machine.run(["grep", "-rl", secret, str(shared), "/tmp/ray"])
        assert (code, found) == (1, ""), found
