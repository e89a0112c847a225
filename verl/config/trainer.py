"""Options of the main job's run."""

from dataclasses import dataclass
from typing import Annotated, Any

from verl.config.checks import (
    Group,
    NotNegativeInt,
    PositiveFloat,
    Share,
    Step,
    require_custom_kwargs,
    require_import_path,
)
from verl.config.common import RunConfig


@dataclass(frozen=True)
class SamplesConfig(Group):
    """The responses kept in ``samples/`` of a run's folder; the group ``trainer.samples`` (docs/samples.md)."""

    freq: NotNegativeInt
    """Keep the responses of the first training step, of every so many, and of every validation; 0: none at all."""
    fraction: Share
    """Share of the prompts of a training step whose responses are kept, in (0, 1]; the same prompts whenever they are
    drawn. Validations are kept whole."""
    max_mb: PositiveFloat
    """Most MiB that the folder takes, above 0. Beyond it every other step that is left is removed, training before
    validations, so that the kept ones stay spread over the whole run. The newest is never removed."""

    tokens: bool
    """Also keep the tokens with their log-probabilities, entropies and the rank metrics up to them, for the page's
    colours. A response then takes some ten times as much."""


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """A run of the main job."""

    method: Annotated[str, require_import_path] | None
    """A subclass of ``verl.method.Method`` that changes places of the training step, as ``module:Class`` or
    ``file.py:Class`` (docs/extending.md): it chooses prompts, sets their sampling, samples some again, chooses
    the batch to learn from, or changes rewards. null: none of these."""
    method_kwargs: dict[str, Any]
    """Keyword arguments of that class."""
    val_before_train: bool
    """Validate the initial policy (step 0)."""
    val_only: bool
    """Validate the initial policy, or the one resumed from, and end the run."""
    except_save: list[Step]
    """Further steps to save a checkpoint after; ``max_ckpt_to_keep`` never removes these."""
    critic_warmup: NotNegativeInt
    """Number of first steps in which only the critic learns; ``gae`` only; in veRL one step fewer. The policy's
    learning rate starts with its first update."""
    remove_clip: bool
    """Leave responses that were cut at ``data.max_response_length`` out of the losses. They still count in the
    statistics of their group and in the logs."""
    deterministic: bool | None
    """Let no response depend on how long engines take: while requests wait for room, they are dealt to engines when all
    have replied, by counts of tokens alone. Which responses share a batch changes the last bits of their
    log-probabilities. ``null``: on a CPU. ``false`` deals each engine more as soon as it has room."""
    samples: SamplesConfig
    log_samples: NotNegativeInt
    """Show this many responses of every kept training step and validation on the console and, as tables, in wandb and
    TensorBoard; spread over the batch, so that every validation shows the same prompts. 0: none."""

    def check(self) -> None:
        require_custom_kwargs("method", self.method, self.method_kwargs)

    def deals_by_counts(self, device_type: str) -> bool:
        """Whether ``deterministic`` holds."""
        return device_type == "cpu" if self.deterministic is None else self.deterministic

    def saves_nothing(self, total_steps: int) -> bool:
        """Whether a training run of ``total_steps`` ends without a checkpoint."""
        saves = self.val_only or any(step <= total_steps for step in self.except_save)
        return super().saves_nothing(total_steps) and not saves
