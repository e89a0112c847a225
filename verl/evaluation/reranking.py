"""Scores stored samples with a reward model and saves the scores next to the samples.

The first line of ``reward_model.jsonl`` contains the settings that the scores depend on. Each subsequent line contains
a score and the digest of the scored response.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from verl.config.evaluation import EvaluationConfig
from verl.config.rewards import RewardModelConfig
from verl.evaluation.results import TaskResult
from verl.evaluation.scoring import digest_of
from verl.evaluation.store import RecordFile, SampleKey, SampleStore
from verl.evaluation.tasks import EvaluationTask, Job
from verl.models.checks import check_sequence_fits, check_value_architecture
from verl.models.hub import fetch_model, model_digest
from verl.models.tokenizer import (
    check_embeds_tokens,
    check_reward_model_template,
    load_tokenizer,
    reward_model_batch,
)
from verl.single_controller.roles import ModelWorkers

SCORES_FILE = "reward_model.jsonl"

BATCH_SIZE = 256
"""Number of responses that are scored and saved at a time."""


@dataclass(frozen=True)
class StoredScore:
    """Reward model score of one sample."""

    problem: int
    sample: int
    response: str
    """Digest of the response."""
    score: float


class Judge(NamedTuple):
    """Worker configuration and tokenizer of a reward model."""

    held: RewardModelConfig
    tokenizer: PreTrainedTokenizerBase


def load_reward_model(config: EvaluationConfig, device_type: str) -> Judge:
    """Load the reward model in ``config``. Raises ``ConfigError`` if the model is missing or unusable."""
    options, field = config.reward_model, "reward_model.path"
    held = options.held(device_type == "cpu")
    path = held.model.path
    fetch_model(path, field)
    tokenizer = load_tokenizer(path, options.trust_remote_code, field)
    check_value_architecture(held.model, field)
    check_sequence_fits("reward_model.max_length", options.max_length, field, held.model)
    check_embeds_tokens(held.model, field, tokenizer)
    check_reward_model_template([[{"role": "user", "content": "a question"}]], tokenizer, f"{field}={path!r}")
    return Judge(held, tokenizer)


def score_by_reward_model(
    job: Job, stores: Mapping[EvaluationTask, SampleStore], judge: Judge
) -> dict[EvaluationTask, dict[SampleKey, float]]:
    """Return the scores of the first ``n_sampling`` samples of every problem.

    Only missing and outdated scores are computed. Raises ``WorkerError`` if the reward model fails.
    """
    held, tokenizer = judge
    settings = {"model": model_digest(held.model.path), "max_length": held.max_length, "dtype": held.model.param_dtype}
    found: dict[EvaluationTask, dict[SampleKey, float]] = {}
    with ExitStack() as stack:

        @cache
        def model() -> ModelWorkers:
            worker = "verl.workers.reward_model:RewardModelWorker"
            workers = job.session.start_workers(worker, held, (), {}, [held.model.path])
            stack.callback(workers.close)
            return ModelWorkers(workers)

        for task, store in stores.items():
            file = stack.enter_context(RecordFile(task.folder / SCORES_FILE, StoredScore, settings))
            keys = [(i, j) for i in store.answered for j in range(job.config.n_sampling)]
            digests = {key: digest_of(store.samples[key].response) for key in keys}
            stored = [s for s in file.records if digests.get((s.problem, s.sample)) == s.response]
            scores = {(s.problem, s.sample): s.score for s in stored}
            missing = [key for key in keys if key not in scores]
            if missing:
                job.display.say(f"{task.label}: the reward model reads {len(missing)} responses")
            for start in range(0, len(missing), BATCH_SIZE):
                batch = missing[start : start + BATCH_SIZE]
                chats = [[{"role": "user", "content": task.problems[i].question}] for i, _ in batch]
                responses = [store.samples[key].response for key in batch]
                texts, _ = reward_model_batch(chats, responses, tokenizer, held.max_length)
                scored = model().map_rows("reward_model.compute_scores", texts)
                new = dict(zip(batch, scored.scores.tolist(), strict=True))
                file.write([StoredScore(*key, digests[key], score) for key, score in new.items()])
                scores |= new
            found[task] = scores
    return found


def with_scores(result: TaskResult, scores: Mapping[SampleKey, float]) -> TaskResult:
    """Return ``result`` with ``scores`` attached to its samples. Samples that were not generated have no score."""
    problems = [
        replace(problem, samples=[replace(s, score=scores.get((i, j))) for j, s in enumerate(problem.samples)])
        for i, problem in enumerate(result.problems)
    ]
    return replace(result, problems=problems)
