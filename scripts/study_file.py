"""A study's file (scripts/study.py): what is asked, and which trainings answer it."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

SAMPLES = "rollout.val_kwargs.n="


@dataclass(frozen=True)
class Arm:
    """A method under study."""

    overrides: list[str]
    seeds: list[int]
    exploratory: bool = False
    """Named before, but tried with too few seeds to decide anything."""


@dataclass(frozen=True)
class Study:
    """A study's file.

    Raises:
        ValueError: a contrast names no arm, or arms that share no seed; or a k is larger than the number of samples.
    """

    question: str
    ks: list[int]
    """The first is the one that the question is about."""
    train: list[str]
    """Overrides of all arms."""
    arms: dict[str, Arm]
    contrasts: list[list[str]]
    """Pairs of arms, the second taken from the first."""
    prepare: dict[str, list[str]] = field(default_factory=dict)
    """Folder -> arguments of Python that make it, as ``{out}``."""

    def __post_init__(self) -> None:
        for pair in self.contrasts:
            if len(pair) != 2 or not set(pair) <= self.arms.keys():
                raise ValueError(f"contrasts: {pair}: must be two of {', '.join(self.arms)}")
            if not self.pairs(*pair):
                raise ValueError(f"contrasts: {pair}: share no seed")
        samples = [int(override.removeprefix(SAMPLES)) for override in self.train if override.startswith(SAMPLES)]
        if samples and max(self.ks) > samples[-1]:
            raise ValueError(f"ks: {max(self.ks)}: must be at most {SAMPLES}{samples[-1]}")

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Raises ``SystemExit`` with one line for a file that is no study."""
        try:
            given = yaml.safe_load(path.read_text())
            shared = {"seeds": given.pop("seeds")}
            arms = {name: Arm(**(shared | options)) for name, options in given.pop("arms").items()}
            return cls(**given, arms=arms)
        except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise SystemExit(f"error: {path}: {type(error).__name__}: {' '.join(str(error).split())}") from None

    def pairs(self, arm: str, other: str) -> list[int]:
        """The seeds that both arms have."""
        return sorted(set(self.arms[arm].seeds) & set(self.arms[other].seeds))

    def exploratory(self, pair: list[str]) -> bool:
        """Whether a contrast can decide nothing."""
        return any(self.arms[arm].exploratory for arm in pair)
