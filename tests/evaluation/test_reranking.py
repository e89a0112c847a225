"""Scores of a reward model: made once, and again for other responses."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.evaluation.example_tasks import evaluation_config, make_task
from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.evaluation import reranking
from verl.evaluation.reranking import Judge, load_reward_model, score_by_reward_model
from verl.evaluation.store import StoredSample

N = 2


class Workers:
    """A reward model whose score is the number of tokens."""

    def __init__(self, *_: Any) -> None:
        self.read = 0

    def map_rows(self, method: str, batch: Batch) -> Batch:
        assert method == "reward_model.compute_scores"
        self.read += len(batch)
        return batch.fill(scores=batch.response_lengths.float())


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    workers = Workers()
    monkeypatch.setattr(reranking, "ModelWorkers", lambda group: workers)
    group = SimpleNamespace(close=lambda: None)
    session = SimpleNamespace(start_workers=lambda *_: group)
    display = SimpleNamespace(say=lambda text: None)
    yield SimpleNamespace(session=session, display=display, config=SimpleNamespace(n_sampling=N), workers=workers)


def test_scores_are_made_once(tmp_path: Path, job, reward_model, tiny_tokenizer):
    config = evaluation_config(f"reward_model.path={reward_model}", "reward_model.max_length=64")
    judge = load_reward_model(config, "cpu")
    task = make_task(tmp_path, ["4", "9"])

    def scores(judge: Judge, *responses: str) -> dict:
        with ExitStack() as stack:
            store = stack.enter_context(task.open_store())
            places = [(i, j) for i in range(2) for j in range(N)]
            kept = zip(places, responses, strict=True)
            store.samples = {(i, j): StoredSample(i, j, text, 1, False, {}) for (i, j), text in kept}
            (found,) = score_by_reward_model(job, {task: store}, judge).values()
        return found

    first = scores(judge, "a", "b b", "c c c", "d d d d")
    assert list(first) == [(0, 0), (0, 1), (1, 0), (1, 1)] and job.workers.read == 4
    assert first[0, 0] < first[0, 1] < first[1, 0] < first[1, 1] < 64
    assert scores(judge, "a", "b b", "c c c", "d d d d") == first and job.workers.read == 4
    # Only what is new is read.
    assert scores(judge, "a", "b b", "c c c", "e") != first and job.workers.read == 5
    # The model reads less of each: all are read again.
    shorter = Judge(replace(judge.held, max_length=8), judge.tokenizer)
    assert set(scores(shorter, "a", "b b", "c c c", "e").values()) == {8.0} and job.workers.read == 9


def test_a_model_that_cannot_read_is_refused(tiny_model, tmp_path):
    limit = "^reward_model.max_length=4096: reward_model.path=.* takes sequences of"
    for path, message in ((tmp_path / "none", "^reward_model.path=.*none"), (tiny_model, limit)):
        with pytest.raises(ConfigError, match=message):
            load_reward_model(evaluation_config(f"reward_model.path={path}"), "cpu")
