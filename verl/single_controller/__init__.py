"""Ray worker groups: spawn, dispatch, collect."""

from verl.single_controller.worker_group import WorkerError, WorkerGroup, concat

__all__ = ["WorkerError", "WorkerGroup", "concat"]
