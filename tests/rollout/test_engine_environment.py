"""The environment that worker processes get for their engine."""

import pytest
from vllm.distributed.device_communicators import cpu_communicator

from verl.rollout import engine_environment, shared_memory
from verl.rollout.shared_memory import private_shared_memory
from verl.utils.distributed import WorkerPlace

SHARED_MEMORY = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER")


def test_engines_on_gpus_do_without_memory_shared_between_them(monkeypatch):
    for name in SHARED_MEMORY:
        monkeypatch.delenv(name, raising=False)
    on_gpu = engine_environment("cuda")
    assert [on_gpu[name] for name in SHARED_MEMORY] == ["0", "0"] and "TORCHDYNAMO_DISABLE" not in on_gpu
    on_cpu = engine_environment("cpu")
    assert not set(SHARED_MEMORY) & set(on_cpu) and on_cpu["TORCHDYNAMO_DISABLE"] == "1"
    monkeypatch.setenv(SHARED_MEMORY[0], "1")
    assert engine_environment("cuda")[SHARED_MEMORY[0]] == "1"
    assert engine_environment("cuda", "hf") == {}


def test_an_engine_that_fails_to_start_leaves_no_shared_memory(tmp_path, monkeypatch):
    class Memory:
        """vLLM's, whose workers find each other by a file."""

        def __init__(self) -> None:
            self.group_name = self.make_group_name("tp:0")
            self._init_cpu_shm()

        @staticmethod
        def make_group_name(unique_name: str) -> str:
            return f"/ident-{unique_name}-[0-1]-cpushm"

        def _init_cpu_shm(self) -> int:
            (tmp_path / f"{self.group_name}_0").touch()
            raise RuntimeError("a worker was killed")

    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(cpu_communicator, "_CPUSHMDistributed", Memory)
    of_another = tmp_path / "verl-2-ident-tp:0-[0-1]-cpushm_0"
    of_another.touch()
    place = WorkerPlace(0, 2, "127.0.0.1", 1, "cpu", cpu_threads=1, workers_per_machine=2)
    with pytest.raises(RuntimeError, match="a worker was killed"), private_shared_memory(place):
        cpu_communicator._CPUSHMDistributed()
    assert Memory.make_group_name("tp:0") == "/ident-tp:0-[0-1]-cpushm"
    assert [*tmp_path.iterdir()] == [of_another]
