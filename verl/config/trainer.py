"""Run options of the main job."""

from dataclasses import dataclass
from typing import Annotated, Any

from verl.config.checks import (
    Group,
    NotNegativeInt,
    PositiveFloat,
    Share,
    StepNumber,
    require_custom_kwargs,
    require_import_path,
)
from verl.config.common import RunConfig


@dataclass(frozen=True)
class SamplesConfig(Group):
    """Options of the group ``trainer.samples``, for storing responses in the run's ``samples/`` (docs/samples.md)."""

    freq: NotNegativeInt
    """Store the responses of the first training step, of every Nth step and of all validations; 0 stores none."""
    fraction: Share
    """Fraction of prompts whose responses are stored in training, in (0, 1]; the selection is the same in every step.
    Validations are stored completely."""
    max_mb: PositiveFloat
    """Maximum size of the folder in MiB. If the folder grows larger, stored steps other than the newest are removed,
    training steps first. Each pass removes every other step, so the remaining steps cover the whole run."""

    tokens: bool
    """Also store tokens with their log-probabilities, entropies and cumulative rank metrics, which determine the token
    colours in the report. This makes a stored response about ten times larger."""


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """Run options of the main job."""

    method: Annotated[str, require_import_path] | None
    """Subclass of ``verl.method.Method`` that customises the training step, as ``module:Class`` or ``file.py:Class``
    (docs/extending.md), or null. A method can choose prompts, set their sampling options, resample responses, choose
    the training batch, or change rewards."""
    method_kwargs: dict[str, Any]
    """Keyword arguments of ``method``."""
    val_before_train: bool
    """Validate the initial policy before training (step 0)."""
    val_only: bool
    """Validate the initial or the resumed policy, then end the run without training."""
    except_save: list[StepNumber]
    """Additional steps after which to save a checkpoint that ``max_ckpt_to_keep`` never removes."""
    critic_warmup: NotNegativeInt
    """Number of initial steps that train only the critic, with ``gae``. For the same value, veRL runs one fewer warm-up
    step. The policy's learning-rate schedule starts with its first update."""
    remove_clip: bool
    """Exclude responses that were cut at ``data.max_response_length`` from the losses. Truncated responses are still
    included in group statistics and logs."""
    deterministic: bool | None
    """Make responses independent of engine speed. Waiting requests are assigned only once all engines have replied, and
    based only on token counts. Otherwise, each engine receives requests as soon as it has room, and the last bits of
    log-probabilities depend on which responses are batched together. Null means true on a CPU. True also makes torch
    use deterministic operations in updates; operations without a deterministic implementation are listed after the
    first update."""
    samples: SamplesConfig
    log_samples: NotNegativeInt
    """Number of responses from every stored training step and validation to show on the console and as tables in wandb
    and TensorBoard. They are evenly spaced in the batch, so every validation shows the same prompts. 0 shows none."""

    def check(self) -> None:
        require_custom_kwargs("method", self.method, self.method_kwargs)

    def deals_by_counts(self, device_type: str) -> bool:
        """Return whether requests are assigned deterministically, resolving a null ``deterministic``."""
        return device_type == "cpu" if self.deterministic is None else self.deterministic

    def saves_nothing(self, total_steps: int) -> bool:
        """Return whether a training run of ``total_steps`` steps ends without saving a checkpoint."""
        saves = self.val_only or any(step <= total_steps for step in self.except_save)
        return super().saves_nothing(total_steps) and not saves
