"""A study's file (benchmarks/study.py): what is asked, and which trainings answer it."""

from collections.abc import Sequence
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
        ValueError: a contrast names no arm, or arms that share no seed; those that are to decide share none, all
            together; or an arm is validated on fewer samples than a k.
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
    note: str = ""
    """What readers of the results should know."""
    records: list[str] = field(default_factory=list)
    """Records of others (NAME.jsonl of their studies), by paths from the study's file, whose runs join."""

    def __post_init__(self) -> None:
        for pair in self.contrasts:
            if len(pair) != 2 or not set(pair) <= self.arms.keys():
                raise ValueError(f"contrasts: {pair}: must be two of {', '.join(self.arms)}")
            if not self.shared_seeds(pair):
                raise ValueError(f"contrasts: {pair}: share no seed")
        if self.decisive_arms and not self.shared_seeds(self.decisive_arms):
            raise ValueError(f"contrasts: {', '.join(self.decisive_arms)}: share no seed; or call some exploratory")
        for name, arm in self.arms.items():
            told = [text.removeprefix(SAMPLES) for text in [*self.train, *arm.overrides] if text.startswith(SAMPLES)]
            samples = int(told[-1]) if told else 1
            if max(self.ks) > samples:
                raise ValueError(f"ks: {max(self.ks)}: {name} has {SAMPLES}{samples}; raise that")

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

    @property
    def decisive(self) -> list[list[str]]:
        """The contrasts of arms of which none is exploratory."""
        return [pair for pair in self.contrasts if not any(self.arms[arm].exploratory for arm in pair)]

    @property
    def decisive_arms(self) -> list[str]:
        """The arms of these."""
        return list(dict.fromkeys(arm for pair in self.decisive for arm in pair))

    def shared_seeds(self, arms: Sequence[str]) -> list[int]:
        """The seeds that all of these arms have."""
        return sorted(set.intersection(*(set(self.arms[arm].seeds) for arm in arms)))
