"""Batches of episodes in flat columns, which are passed from the engine to the loss and to checkpoints."""

from verl.batch.batch import Batch
from verl.batch.columns import (
    ENVIRONMENT,
    EPISODE,
    POLICY,
    PREFIX,
    RANK,
    RESPONSE_TOKEN,
    TEACHER_RANK,
    TOKEN,
    TRAINER_RANK,
    TURN_RANK,
)

__all__ = [
    "ENVIRONMENT",
    "EPISODE",
    "POLICY",
    "PREFIX",
    "RANK",
    "RESPONSE_TOKEN",
    "TEACHER_RANK",
    "TOKEN",
    "TRAINER_RANK",
    "TURN_RANK",
    "Batch",
]
