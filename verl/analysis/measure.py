"""Measures stored responses in a forward pass of the policy, and stores the measurements of each prompt.

The first line of ``measures.jsonl`` contains the settings that the measurements depend on. Each subsequent line
contains the measurements for one prompt, so that an interrupted analysis can resume.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from verl.config.analysis import AnalysisConfig
from verl.config.calculator import CalculatorConfig
from verl.evaluation.store import RecordFile, SampleStore, digest
from verl.evaluation.tasks import EvaluationTask
from verl.single_controller.worker_group import WorkerGroup
from verl.workers.measurements import ALONG, MeasuredPrompt, PromptResponses

MEASURES_FILE = "measures.jsonl"

PROMPTS_PER_CALL = 4
"""Number of prompts that each worker measures before the results are written."""


@dataclass(frozen=True)
class StoredMeasurement:
    """A policy's measurements of the responses to one prompt."""

    responses: str
    """Digest of the prompt and its responses."""
    measured: MeasuredPrompt


class MeasureFile(RecordFile[StoredMeasurement]):
    """On-disk store of measurements."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(folder / MEASURES_FILE, StoredMeasurement, settings)
        self._measured = {(record.measured.key, record.responses): record.measured for record in self.records}

    def get(self, prompt: PromptResponses) -> MeasuredPrompt | None:
        """Return the measurements of exactly the responses in ``prompt``, or None if they have not been measured."""
        return self._measured.get((prompt.key, _digest(prompt)))

    def append(self, prompt: PromptResponses, measured: MeasuredPrompt) -> None:
        """Add the measurements of ``prompt`` and write them to disk."""
        record = StoredMeasurement(_digest(prompt), measured)
        self._measured[prompt.key, record.responses] = measured
        self.write([record])


def measure_settings(config: AnalysisConfig, on_cpu: bool) -> dict[str, Any]:
    """Return the settings that the measurements depend on, excluding the prompts and responses."""
    model = config.policy.model_config("model", config.rollout.trust_remote_code, on_cpu)
    how = {"param_dtype": model.param_dtype, "attn_implementation": model.attn_implementation}
    calculator = asdict(measuring(config))
    return {"calculator": calculator, "layer": config.analysis.layer, "policy": how, "along": list(ALONG)}


def measuring(config: AnalysisConfig) -> CalculatorConfig:
    """Return the calculator config with prefix metrics enabled."""
    return replace(config.calculator, keep_prefixes=True)


def prompts_of(task: EvaluationTask, store: SampleStore, n: int) -> list[PromptResponses]:
    """Return the task's answered prompts, each with its first ``n`` responses."""
    return [
        PromptResponses(i, list(task.prompts[i]), [store.samples[i, j].token_ids for j in range(n)])
        for i in store.answered
    ]


def measure_missing(
    file: MeasureFile,
    prompts: Sequence[PromptResponses],
    temperature: float,
    workers: WorkerGroup,
    num_workers: int,
) -> None:
    missing = [prompt for prompt in prompts if file.get(prompt) is None]
    at_once = PROMPTS_PER_CALL * num_workers
    for start in range(0, len(missing), at_once):
        batch = missing[start : start + at_once]
        # Give all workers the same number of prompts, since they gather weights collectively; pad with the last prompt.
        size = -(-len(batch) // num_workers)
        filled = [batch[min(i, len(batch) - 1)] for i in range(size * num_workers)]
        shares = [filled[size * rank : size * (rank + 1)] for rank in range(num_workers)]
        replies = [measured for part in workers.run("measure", shares, temperature or 1.0) for measured in part]
        for prompt, measured in zip(batch, replies, strict=False):
            assert measured.key == prompt.key, "workers reply in the order of the prompts"
            file.append(prompt, measured)


def _digest(prompt: PromptResponses) -> str:
    return digest(json.dumps([prompt.prompt_ids, prompt.token_ids]).encode())
