"""Responses of engines on their way into the stores."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import shipped_config
from tests.evaluation.example_tasks import evaluation_config, make_task
from tests.single_controller.test_conversations import LENGTH, Engines, Environment
from verl.batch import Batch
from verl.evaluation.generation import finite_metrics, generate_missing
from verl.evaluation.report.publish import write_results
from verl.evaluation.results import sample_table
from verl.evaluation.scoring import score_samples
from verl.evaluation.statistics import summarise
from verl.rollout.environments.conversations import ConversationSetup
from verl.single_controller import generation


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_conversations_are_stored_as_the_policy_said_them(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, device: str
):
    monkeypatch.setattr(generation, "EngineCalls", lambda workers, method, copies: workers)
    engines, done = Engines(), list[int]()
    engines.device_type = device
    turns = replace(shipped_config().rollout.multi_turn, enable=True, environment="verl.rollout.programs:Programs")
    setup = ConversationSetup(turns, LENGTH, LENGTH, tiny_tokenizer, {}, [], Environment(turns=3))
    task = replace(make_task(tmp_path, ["1", "2", "3"]), settings={"temperature": 0.6, "stop": [], "tokens": True})
    display = SimpleNamespace(step=lambda step, metrics: done.append(step))
    with task.open_store() as store:
        generate_missing(
            {task: store}, evaluation_config(n_sampling=4, temperatures=[0.6]), engines, tiny_tokenizer, display, setup
        )
        samples = list(store.samples.values())
    # As in training's validation: rewards, turns and calls, and correct is what the environment rewards.
    result = score_samples(task, store.samples, 4, None, scored=False)
    rewarded = [(s.environment["reward"], s.environment["turns"]) for s in samples if not s.truncated]
    assert rewarded and all(reward == 0.5 * turns for reward, turns in rewarded)
    assert all(
        sample.correct for problem in result.problems for sample in problem.samples if sample.environment["reward"]
    )
    table = sample_table(result).to_pydict()
    assert table["environment/turns"] == [s.environment["turns"] for key, s in sorted(store.samples.items())]
    row = summarise([result]).table.iloc[0]
    assert row["environment/turns"] == pytest.approx(sum(s.environment["turns"] for s in samples) / 12)
    assert "environment/reward" in write_results(tmp_path / "report", [result]).table
    assert "environment/reward" in (tmp_path / "report" / "results.md").read_text()
    assert len(samples) == done[-1] == 12
    heard = 0
    for sample in samples:
        whole, said = tiny_tokenizer.decode(sample.token_ids), sample.response.split("\n")
        heard += whole.count("say ")
        # The environment's words are in the context and not in the response.
        assert "say" not in sample.response and len(said) == 1 + whole.count("say ")
        written = sum(
            len(tiny_tokenizer(f"<|user|>say {n}<|im_end|><|assistant|>").input_ids) for n in range(1, len(said))
        )
        assert sample.num_tokens == len(sample.token_ids) - written
        parts = sample.conversation
        assert [part["by"] for part in parts] == (["policy", "environment"] * len(said))[: 2 * len(said) - 1]
        assert "".join(part["text"] for part in parts) == whole
        assert all(("say" in part["text"]) == (part["by"] == "environment") for part in parts)
    assert heard > 12


def test_metrics_are_named_by_layer_and_finite():
    batch = Batch.of([[1], [1]], [[2], [3, 4]])
    one, two = torch.tensor([[1.5], [torch.nan]]), torch.tensor([[1.0, torch.inf], [2.0, 3.0]])
    columns = {"rank/Curvature": one.double(), "rank/Effective Rank": two.double(), "turn_rank/Curvature": two}
    assert finite_metrics(batch.fill(**columns)) == [
        {"Curvature": 1.5, "layer_1/Effective Rank": 1.0},
        {"layer_1/Effective Rank": 2.0, "layer_2/Effective Rank": 3.0},
    ]
