"""Optimizer steps that were skipped because their gradient was not finite: counted, and too many in a row end a run."""

from collections.abc import Mapping, Sequence

from verl.config.common import OptimConfig
from verl.config.errors import ConfigError


class SkippedUpdates:
    """Those of one learner, since the run was started or resumed.

    Args:
        prefix: of the learner's metrics, such as ``actor``.
        field: where ``config`` stands in the run's, such as ``actor.optim``.
    """

    def __init__(self, prefix: str, field: str, config: OptimConfig) -> None:
        self.name = f"{prefix}/skipped_updates"
        self.field = field
        self.config = config
        self.in_a_row = 0

    def summarise(self, updates: Sequence[Mapping[str, float]], step: int) -> dict[str, float]:
        """The mean of the metrics of ``updates`` that were applied, and how many were skipped.

        Raises:
            ConfigError: more than ``max_skipped_updates`` in a row were skipped, the last in training step ``step``.
        """
        for update in updates:
            self.in_a_row = self.in_a_row + 1 if update[self.name] else 0
            limit = self.config.max_skipped_updates
            if self.in_a_row > limit:
                raise ConfigError(
                    f"{self.field}.max_skipped_updates={limit}: the gradients of {self.in_a_row} optimizer steps in a "
                    f"row were not finite, the last in step {step}; lower {self.field}.lr={self.config.lr:g}, or look "
                    "at the data and the precision of the model (param_dtype)"
                )
        applied = [update for update in updates if not update[self.name]]
        means = {name: sum(u[name] for u in applied) / len(applied) for name in applied[0]} if applied else {}
        return means | ({self.name: float(len(updates) - len(applied))} if updates else {})
