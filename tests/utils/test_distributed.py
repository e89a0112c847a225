import pytest
import torch
import torch.distributed as dist

from verl.utils import distributed
from verl.utils.distributed import WorkerPlace, join_world

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(("device", "backend", "chosen"), [("cpu", "gloo", []), ("cuda", "cpu:gloo,cuda:nccl", [0])])
def test_world_is_on_its_device(device: str, backend: str, chosen: list[int], monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored at the end
    backends, devices = list[str](), list[int]()
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: backends.append(name))
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    for name in ("_timeout", "TCPStore", "keep_freed_memory"):
        monkeypatch.setattr(distributed, name, lambda *_, **__: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(distributed, "init_device_mesh", lambda *arguments, **_: arguments)
    mesh = join_world(WorkerPlace(0, 1, "127.0.0.1", 0, device, 1))
    assert (mesh, backends, devices) == ((device, (1,)), [backend], chosen)
