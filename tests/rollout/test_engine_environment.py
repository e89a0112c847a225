"""The environment that worker processes get for their engine."""

from verl.rollout.engines import engine_environment

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
