from typing import Any

import pytest
import ray

from verl.config import ConfigError
from verl.single_controller import machines
from verl.single_controller.failures import RequeueError
from verl.single_controller.machines import gather_machines, wait_for_machines


def machine(rank: int, gpus: int, alive: bool = True) -> dict[str, Any]:
    """A machine that scripts/cluster.sh has started, as Ray lists it."""
    resources = {"CPU": 64.0} | ({"GPU": float(gpus)} if gpus else {})
    labels = {"verl-rank": str(rank)}
    return {
        "NodeID": f"node{rank}",
        "Alive": alive,
        "NodeManagerHostname": f"host{rank}",
        "Resources": resources,
        "Labels": labels,
    }


def test_machines_come_late(monkeypatch: pytest.MonkeyPatch):
    first, second = machine(0, 8), machine(1, 8)
    states = [[first], [first], [first, machine(1, 8, alive=False)], [first, second]]
    monkeypatch.setattr(ray, "nodes", lambda: states.pop(0) if len(states) > 1 else states[0])
    monkeypatch.setattr("verl.single_controller.machines.LOOK_S", 0.0)
    said: list[str] = []
    wait_for_machines(2, 8, "cuda", 60.0, said.append)
    assert said == ["1 of 2 machines here"]


@pytest.mark.parametrize(
    ("hosts", "missing"), [("", "NODE_RANK 2, NODE_RANK 3"), ("host0 host1 host2 host3", "host2, host3")]
)
def test_machines_that_never_come_are_named(hosts: str, missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_HOSTS", hosts)
    monkeypatch.setattr(ray, "nodes", lambda: [machine(0, 8), machine(1, 4)])
    with pytest.raises(ConfigError) as raised:
        wait_for_machines(4, 8, "cuda", -1.0, lambda text: None)
    assert str(raised.value) == (
        "trainer.nnodes=4: 1 of 4 machines with 8 GPUs each were there within trainer.machines_timeout_s=-1: "
        f"host0 (8 GPUs), host1 (4 GPUs); missing: {missing}"
    )


@pytest.mark.parametrize(
    ("found", "limit_s", "expected", "said"),
    [
        ([4], 60.0, 4, []),
        ([1, 1, 4], 60.0, 4, ["1 of 4 machines here; waiting for the others"]),
        ([2], 0.0, 2, ["going on with 2 of 4 machines"]),
        ([1], 0.0, RequeueError("1 of 4 machines are left after 0 s; 2 are needed"), []),
    ],
)
def test_a_restart_goes_on_with_fewer_machines_or_gives_up(monkeypatch, found, limit_s, expected, said):
    monkeypatch.setattr(machines, "LOOK_S", 0.0)
    monkeypatch.setattr(machines, "_answering", lambda *_: found.pop(0) if len(found) > 1 else found[0])
    lines: list[str] = []
    arguments = (4, 2, 8, "cuda", limit_s, lines.append, lambda: None)
    if isinstance(expected, int):
        assert gather_machines(*arguments) == expected
    else:
        with pytest.raises(RequeueError, match=f"^{expected}$"):
            gather_machines(*arguments)
    assert lines == said
