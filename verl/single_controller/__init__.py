"""Ray worker groups: spawn, dispatch, collect."""

from verl.single_controller.worker_group import WorkerError, WorkerGroup

__all__ = ["WorkerError", "WorkerGroup"]
