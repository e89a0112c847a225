"""The published benchmarks: source, licence and verifier of each, from published.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

OPEN = "open_answer"
CHOICE = "multiple_choice"

RELEASE = "https://github.com/hf618/VERL/tree/main/examples/simplelr_math_eval/data"
"""The data folder of the paper's release: every benchmark of ``FULL_PASS1`` as ``<name>/test.jsonl``."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    name: str
    hub_id: str | None = None
    """Data set on the Hugging Face hub; None if no copy there is known, see ``home``."""
    hub_split: str = "test"
    hub_config: str | None = None
    """Configuration on the hub; None for the default."""
    hub_revision: str | None = None
    """Branch on the hub; None for ``main``."""
    home: str = ""
    """Where to get ``<name>/test.jsonl`` if not from the hub."""
    fields: Mapping[str, str] | None = None
    """Our field (``rows.FIELD_NAMES``) -> theirs, if recognition would choose the wrong one."""
    verifier: str = OPEN
    """Data source, a key of ``verl.rewards.registry.VERIFIERS``. In any benchmark, a problem with options whose answer
    is letters is scored by ``multiple_choice``."""
    relative_tolerance: float = 0.0
    """Relative error up to which a decimal number is correct; 0 leaves it to the verifier."""
    licence: str = "unknown"
    """As published: an SPDX identifier if there is one."""
    language: str = "en"
    """``en`` or ``zh``."""
    demonstrations: str | None = None
    """Few-shot examples for base models, a key of ``verl.data.demonstrations.DEMONSTRATIONS``; None if this benchmark
    is usually evaluated without."""


def _read() -> dict[str, Benchmark]:
    entries = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
    for entry in entries.values():
        entry["home"] = RELEASE if entry.get("home") == "release" else entry.get("home", "")
    return {name: Benchmark(name, **entry) for name, entry in entries.items()}


BENCHMARKS: dict[str, Benchmark] = _read()
"""Name, as in ``benchmarks=...`` -> benchmark."""
