"""Ray worker groups: spawn, dispatch, collect."""

from verl.single_controller.failures import MachineError, WorkerError
from verl.single_controller.worker_group import WorkerGroup

__all__ = ["MachineError", "WorkerError", "WorkerGroup"]
