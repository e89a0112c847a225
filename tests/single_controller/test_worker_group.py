"""What a worker group settles before it starts, what it leaves if it cannot start, and how it measures calls."""

import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from verl.checkpoint.shards import CheckpointWorker
from verl.cluster.failures import (
    BESIDE_GPU,
    FIXES,
    ON_CPU,
    ON_GPU,
    OutOfMemory,
    WorkerError,
    driver_memory_line,
    fix,
    is_network_error,
    is_out_of_memory,
    killed_for_memory_line,
    out_of_memory_line,
)
from verl.cluster.machines import MachineSetup
from verl.config import ConfigError, PPOConfig, SFTConfig
from verl.config.load import option_names
from verl.rollout.base import Rollout
from verl.single_controller import profiling
from verl.single_controller.profiling import PeakMemory, resident_bytes
from verl.single_controller.worker_group import (
    THREAD_VARIABLES,
    WAIT_VARIABLES,
    WorkerGroup,
    cpu_threads,
    thread_variables,
)
from verl.workers.actor import Actor
from verl.workers.critic import Critic, RewardModel
from verl.workers.hybrid import HybridWorker
from verl.workers.sft import SFTWorker


@pytest.mark.parametrize(
    ("wanted", "workers", "threads"),
    [(None, 2, 4), (None, 3, 2), (None, 16, 1), ("", 2, 4), ("6", 2, 6), ("3,2", 4, 3), ("many", 4, 2)],
)
def test_threads_of_a_worker(wanted, workers, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert cpu_threads(workers, cores=8) == threads


@pytest.mark.parametrize("name", WAIT_VARIABLES)
def test_user_decides_how_threads_wait(name: str, monkeypatch):
    for each in WAIT_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    assert thread_variables(2, {name: "active"}).keys() == {*THREAD_VARIABLES}
    monkeypatch.setenv(name, "active")
    assert thread_variables(2, {}).keys() == {*THREAD_VARIABLES}


def test_a_group_that_cannot_start_frees_its_workers(start):
    with pytest.raises(WorkerError, match="(?s)worker 1 on .* failed in start.*no model here"):
        start("FailingWorker", 2)
    # What a user can fix is said as if it had been found in this process.
    with pytest.raises(ConfigError, match="^model.path='x': no model there$"):
        start("FailingWorker", 2, ConfigError("model.path='x': no model there"))
    deadline = time.monotonic() + 60
    while (free := ray.available_resources().get("CPU")) != (every := ray.cluster_resources()["CPU"]):
        assert time.monotonic() < deadline, f"{free} of {every} CPUs are free"
        time.sleep(0.2)


CACHE = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."


def test_out_of_memory_names_place_and_fix(workers):
    with pytest.raises(OutOfMemory) as raised:
        workers.run("actor.update")
    reason = "Tried to allocate 2.00 GiB. See the docs."
    lower = r"lower actor\.micro_batch_size_per_gpu .*; set model\.gradient_checkpointing=true"
    pattern = rf"update_actor: worker 3 ran out of host memory at a peak of \d\.\d GiB; {lower} .*{re.escape(reason)}\)"
    assert re.fullmatch(pattern, str(raised.value))


def test_full_disk_of_a_worker_is_one_line(workers, tmp_path):
    workers.run("save", tmp_path)
    free = r"\(No space left on device, [\d,.]+ MB free\)"
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: cannot be written {free}; make room, and start it again$"):
        workers.run("finish_save")


def test_an_engine_without_memory_names_its_options():
    assert not is_out_of_memory(ValueError("block_size must be a multiple of 16"))
    assert is_out_of_memory(RuntimeError("CUDA out of memory occurred when warming up sampler with"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."))
    error = ValueError(CACHE)
    assert is_out_of_memory(error)
    line = out_of_memory_line(error, "start", 1, 5 << 29, "cpu")
    assert line.startswith(
        "start of models and engine: worker 1 ran out of host memory at a peak of 2.5 GiB; lower "
        "rollout.kv_cache_memory_mb (0 is 512) for the models, or raise it for the engine; use fewer workers on each"
    )
    assert line.endswith(f"({CACHE})")


RAY_REPORT = """1 worker(s) were killed due to the node running low on memory.
Memory on the node was 22.95GB used / 23.54GB limit (0.975116)
OOM kill reason: Memory usage 24636848768B exceeded threshold of 24012684984B (95.0% of 25276510208B limit)
Selected to kill: (Task: job ID=01, task name=_Host.__init__, pid=19216, actual memory used=9.05GB, worker ID=619e)
"""


def test_host_memory_that_runs_out_is_one_line():
    assert killed_for_memory_line(RAY_REPORT, "rollout.advance", "cpu") == (
        "ran out of host memory in gen at 9.05 GiB: Ray ended it as 22.95 of its machine's 23.54 GiB were in use; "
        "lower rollout.max_num_seqs, rollout.kv_cache_memory_mb (0 is 512) or the longest response; "
        "docs/memory.md tells what takes how much"
    )
    # A Ray that says it in other words.
    line = killed_for_memory_line("low on memory", "critic.compute_values", "cpu")
    assert line.startswith("ran out of host memory in values: Ray ended it; lower critic.micro")
    # Nothing that lowers a GPU's memory.
    beside = killed_for_memory_line(RAY_REPORT, "rollout.advance", "cuda")
    assert "GiB were in use; set model.fsdp.param_offload=false and" in beside and "kv_cache" not in beside
    driver = driver_memory_line(MemoryError(), "adv")
    pattern = r"adv: the driver ran out of host memory at a peak of \d+\.\d GiB; lower data\.train_.* \(MemoryError\)"
    assert re.fullmatch(pattern, driver)


def test_every_phase_has_its_options():
    """A method of a worker without an entry would tell to use more workers, whatever it is."""
    methods = {
        name for name in vars(HybridWorker) | vars(SFTWorker) | vars(CheckpointWorker) if not name.startswith("_")
    }
    assert methods - set(FIXES) == {"finish_generation", "finish_save", "not_deterministic", "update_teacher"}
    parts = {"actor": Actor, "critic": Critic, "reward_model": RewardModel, "rollout": Rollout}
    dotted = [name.split(".") for name in FIXES if "." in name]
    assert len(dotted) == 7 and all(hasattr(parts[part], method) for part, method in dotted)
    options = {*option_names(PPOConfig, ""), *option_names(SFTConfig, "")}
    advice = " ".join(fix(method, terms) for method in FIXES for terms in (ON_GPU, ON_CPU)) + BESIDE_GPU
    named = {*re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice)}
    assert len(named) > 10 and named <= options


def test_the_peak_is_that_of_the_largest_worker_since_last_asked(workers):
    workers.take_peak_memory()
    assert workers.run("hold", [1] * 4) == [0, 1, 2, 3]
    small = workers.take_peak_memory()
    workers.run("hold", [1, 1, 1, 300])
    workers.run("hold", [1] * 4)
    large = workers.take_peak_memory()
    assert 250 << 20 < large.used - small.used < 350 << 20
    assert workers.take_peak_memory() is None
    # What was given back counts no more.
    workers.run("hold", [1] * 4)
    assert workers.take_peak_memory().used < small.used + (100 << 20)


def test_each_machine_has_its_own_threads_and_variables(ray_session, monkeypatch):
    for name in ("OMP_NUM_THREADS", *WAIT_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    environment = {"PYTHONPATH": str(Path(__file__).parent), "NCCL_DEBUG": "INFO", "HF_TOKEN": "hush"}
    setup = MachineSetup(cores=3, environment={"GLOO_SOCKET_IFNAME": "ib0"})
    place = (1, 1, "cpu", environment)
    names = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "HF_TOKEN")
    group = WorkerGroup("example_workers:ExampleWorker", None, (), *place, survey=lambda placement: [setup])
    try:
        found = group.run("surroundings", *names)
    finally:
        group.close()
    shown = {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "20000", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO"}
    # What Ray has written down is in its logs and on its pages.
    assert found == [(shown | {"HF_TOKEN": "hush"}, shown)]


def test_where_peaks_cannot_be_reset_what_is_resident_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(profiling, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    memory, size = PeakMemory("cpu"), 256 << 20
    memory.reset()
    torch.ones(size, dtype=torch.uint8)
    used, reserved = memory.read()
    assert used == reserved and abs(used - resident_bytes()) < size * 0.1


def caused_by(cause: BaseException) -> RuntimeError:
    error = RuntimeError("saving failed")
    error.__cause__ = cause
    return error


GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GLOO, True),
        (dist.DistNetworkError("The client socket has failed to connect"), True),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (caused_by(GLOO), True),
        (CheckpointException("write", {1: _wrap_exception(GLOO)}), True),
        (CheckpointException("write", {1: _wrap_exception(OSError(28, "No space left on device"))}), False),
        (ValueError("Connection closed by peer"), False),  # a user's own words
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_which_errors_are_the_networks(error: BaseException, expected: bool):
    assert is_network_error(error) is expected


def test_on_one_machine_nothing_can_be_reached_from_others(start: Callable[..., WorkerGroup]):
    group = start("MeetingWorker", 2)
    try:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sockets = [
            (p.name(), s) for p in processes for s in p.net_connections("inet") if s.status == psutil.CONN_LISTEN
        ]
        addresses = {name: socket.laddr.ip.removeprefix("::ffff:") for name, socket in sockets}
        assert {"gcs_server", "raylet"} <= addresses.keys()
        assert any(20000 <= s.laddr.port < 30000 and "_Host" in name for name, s in sockets)  # torch's store
        elsewhere = [(name, s.laddr) for name, s in sockets if s.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"]
        assert elsewhere == []
        # Ray's files are this user's alone, those of workers have the user's own permissions.
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        assert stat.S_IMODE(session.parents[1].stat().st_mode) == 0o700
        logs = [path for path in session.glob("logs/*.log")]
        assert logs and all(path.stat().st_mode & 0o077 == 0 for path in logs)
        os.umask(own := os.umask(0o022))
        assert group.run("umask") == [own, own]
    finally:
        group.close()
