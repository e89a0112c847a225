"""Which responses a run keeps."""

from dataclasses import dataclass

from verl.config.checks import require, require_not_negative, require_positive


@dataclass(frozen=True)
class SamplesConfig:
    """The responses kept in ``samples/`` of a run's folder; the group ``trainer.samples`` (docs/samples.md)."""

    freq: int
    """Keep the responses of the first training step, of every so many, and of every validation; 0: none at all."""
    fraction: float
    """Share of the prompts of a training step whose responses are kept, in (0, 1]; the same prompts whenever they are
    drawn. Validations are kept whole."""
    max_mb: float
    """Most MiB that the folder takes, above 0. Beyond it every other step that is left is removed, training before
    validations, so that the kept ones stay spread over the whole run. The newest is never removed."""

    tokens: bool
    """Also keep the tokens with their log-probabilities, entropies and the rank metrics up to them, for the page's
    colours. A response then takes some ten times as much."""

    def __post_init__(self) -> None:
        require_not_negative("trainer.samples.freq", self.freq)
        require(0 < self.fraction <= 1, "trainer.samples.fraction", self.fraction, "must be in (0, 1]")
        require_positive("trainer.samples.max_mb", self.max_mb)
