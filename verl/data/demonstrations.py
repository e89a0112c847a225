"""Worked examples that show a base model the form of an answer; the texts are in ``demonstrations.yaml``."""

from pathlib import Path

import yaml

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

DEMONSTRATIONS: dict[str, list[tuple[str, str]]] = {
    name: [(shown["question"], shown["answer"]) for shown in examples] for name, examples in _TEXTS.items()
}
"""Name, as in ``Benchmark.demonstrations`` -> questions with their worked answers."""
