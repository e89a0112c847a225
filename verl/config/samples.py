"""Which responses a run keeps."""

from dataclasses import dataclass

from verl.config.checks import Group, NotNegativeInt, PositiveFloat, Share


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
