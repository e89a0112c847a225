"""Prompts that are sampled again with a hint: which, how often, what is learned from and what is logged."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import changed

from tests.extending.examples import example
from tests.trainer.ppo.test_sampling import ScriptedWorkers
from verl.config import ConfigError, PPOConfig
from verl.data.prompts import PromptDataset, train_loader
from verl.data.regeneration import Regenerator
from verl.rewards.pool import VerifierPool
from verl.trainer.logging.timing import PhaseTimer
from verl.trainer.ppo.hooks import SamplingHooks
from verl.trainer.ppo.sampling import ROUND_STEP, Sampler, step_outcome

BROKEN = """
class Nothing:
    def regenerate(self, round):
        return None

class Outside:
    def regenerate(self, round):
        return {2: "text"}

class Number:
    def regenerate(self, round):
        return {0: 7}

class Empty:
    def regenerate(self, round):
        return {0: " "}

class Long:
    def regenerate(self, round):
        return {1: "7" * 200}
"""


def small(config: PPOConfig, path: Path, name: str, rounds: int = 3) -> PPOConfig:
    """Two prompts a step, two responses each."""
    rollout = replace(config.rollout, n=2, regenerate=f"{path}:{name}", regenerate_rounds=rounds)
    data = {"train_batch_size": 2, "shuffle": False, "max_prompt_length": 128}
    return changed(replace(config, rollout=rollout), data=data)


def prompts_of(config: PPOConfig, tokenizer: Any) -> tuple[PromptDataset, Any]:
    dataset = PromptDataset(config.data.train_files, tokenizer, config.data)
    return dataset, train_loader(dataset, config.data, tokenizer.pad_token_id, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Nothing",
            "^rollout.regenerate='.*:Nothing': its regenerate returned None; it must return a mapping from places",
        ),
        (
            "Outside",
            r"its regenerate returned \{2: 'text'\}; it must return a mapping from places of round.records, 0 to 1",
        ),
        (
            "Number",
            "its prompt for 0 is 7; it must be text, or a list of messages with role and content, and not empty$",
        ),
        ("Empty", "its prompt for 0 is .*; it must be text, or a list of messages"),
        ("Long", r"^data.max_prompt_length=128: rollout.regenerate='.*' edited prompt 1 to 2\d\d tokens; raise it, or"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, small_config, tiny_tokenizer, name, message):
    (tmp_path / "broken.py").write_text(BROKEN)
    config = small(small_config, tmp_path / "broken.py", name)
    records = prompts_of(config, tiny_tokenizer)[0].records[:2]
    judged = (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool), [["", ""]] * 2)
    with pytest.raises(ConfigError, match=message):
        Regenerator(config, tiny_tokenizer, 10).edit(1, 1, records, records, judged)


class InRounds(ScriptedWorkers):
    """Answers prompt ``uid`` with ``answers[uid][round]``, and notes which prompts it was given."""

    def generate(self, prompts, sampling, seed, pad_token_id, on_finished):
        self.answers = self.rounds[len(self.steps)]
        self.given = [*getattr(self, "given", []), prompts.input_ids.clone()]
        return super().generate(prompts, sampling, seed, pad_token_id, on_finished)


@pytest.fixture(scope="module")
def pool(small_config: PPOConfig) -> Iterator[VerifierPool]:
    with VerifierPool(small_config.reward_score) as pool:
        yield pool


@pytest.mark.slow
def test_what_no_response_solved_is_sampled_again_with_longer_hints(tmp_path, small_config, tiny_tokenizer, pool):
    config = small(small_config, example(tmp_path, "hints.py"), "Hints")
    dataset, loader = prompts_of(config, tiny_tokenizer)
    # Answers of four digits, so that each round gives away another one.
    for i, truth in enumerate(["1234", "5678"]):
        dataset.records[i] = replace(dataset.records[i], ground_truth=truth)
    loader = train_loader(dataset, config.data, tiny_tokenizer.pad_token_id, 0)
    workers = InRounds(tiny_tokenizer, {})
    workers.rounds = [
        {0: ["9", "9"], 1: ["5678", "9"]},
        {0: ["9", "8"]},
        {0: ["1234", "8"]},
    ]
    hooks = SamplingHooks(config, 10, dataset.records, tiny_tokenizer)
    sampler = Sampler(config, tiny_tokenizer, None, workers, pool, [], hooks=hooks)
    sampler.policy.generate = workers.generate
    sample = sampler.sample_step(iter(loader), 3, PhaseTimer(lambda name: None))
    assert workers.steps == [3, 3 + ROUND_STEP, 3 + 2 * ROUND_STEP]
    question = dataset.records[0].messages[-1]["content"]
    edited = sample.sampled.prompts.records[0]
    assert edited.messages[-1]["content"] == f"{question} A solution begins with 12"
    assert edited.ground_truth == "1234" and sample.sampled.prompts.records[1] is dataset.records[1]
    # The responses of the last round, as responses to the edited prompt; the other group is as it was.
    assert sample.sampled.texts == ["1234", "8", "5678", "9"]
    assert [result["correctness"] for result in sample.sampled.pending.result()] == [True, False, True, False]
    columns = sample.sampled.rollout.input_ids[:, :128]
    assert columns[0][-len(edited.input_ids) :].tolist() == edited.input_ids
    assert torch.equal(columns[::2], sample.sampled.prompts.tokens.input_ids)
    assert torch.equal(workers.given[2][0], columns[0])
    assert sample.sampled.rollout.group_ids.tolist() == [0, 0, 1, 1]
    added = len(edited.input_ids) - len(dataset.records[0].input_ids)
    expected = {"regenerate/groups": 1.0, "regenerate/pass@1/before": 0.0, "regenerate/pass@1/after": 0.5}
    expected |= {"regenerate/prompt_tokens_added/mean": float(added), "train/pass@1": 0.25, "score/mean": 0.25}
    assert expected.items() <= sample.metrics.items()
    # Selectors are told of the data set's prompts, without hints.
    outcome = step_outcome(3, sample.fresh, {})
    assert outcome.accuracy == [0.0, 0.5] and outcome.records == tuple(dataset.records[:2])
