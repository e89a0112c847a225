"""A batch made of this step's responses and earlier ones: what is learned from, by which ratio, and what is saved."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import changed, rank_metrics

from tests.extending.examples import example
from verl.config import ConfigError, PPOConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import PromptCollator, TokenizedPrompts
from verl.data.replay import ReplayBuffer, Responses
from verl.protocol import RolloutBatch
from verl.rewards import Score
from verl.trainer.ppo.hooks import SamplingHooks
from verl.trainer.ppo.recompose import Recomposer, behaviour_logprobs
from verl.trainer.ppo.sampled import Sampled, finished

ORIGINALS = [PromptRecord(uid, [1, uid + 2], "arithmetic", "7", {}, [], False) for uid in range(4)]
P, R = 32, 12

BROKEN = """
class ReturnsRows:
    def recompose(self, batch):
        return batch.responses.rollout

class Nothing:
    def recompose(self, batch):
        return batch.responses[[]]

class TooMany:
    def recompose(self, batch):
        return type(batch.responses).join([batch.responses] * 2)
"""


def sampled_of(uids: list[int], scores: list[list[float]], first: float = 0.0) -> Sampled:
    """Two responses to each prompt, of 1, 2, ... tokens; ``first``: the first log-probability, the next is 1 more."""
    prompts: TokenizedPrompts = PromptCollator(P, 0)([ORIGINALS[uid] for uid in uids])
    num = 2 * len(uids)
    mask = (torch.arange(R) < torch.arange(1, num + 1)[:, None]).long()
    tokens: Any = prompts.tokens.repeat_interleave(2)
    rollout = RolloutBatch(
        torch.cat([tokens.input_ids, mask * 3], dim=1),
        torch.cat([tokens.attention_mask, mask], dim=1),
        mask,
        mask * (first + torch.arange(num)[:, None].float()),
        tokens.uid,
        torch.zeros(num, dtype=torch.bool),
        rank_metrics({"m": first + torch.arange(num).double()}),
        batch_size=[num],
    )
    results = [
        Score(score=s, correctness=s > 0, boxed=False, reason="exact", answer="7", reward_extra_info={"a": 1.0})
        for pair in scores
        for s in pair
    ]
    texts = [f"text {first + i:.0f}" for i in range(num)]
    return Sampled(prompts, rollout, texts, finished(results), torch.ones(num, dtype=torch.bool))


def recomposer_of(config: PPOConfig, path: Path, name: str, capacity: int = 8, **kwargs: Any) -> Recomposer:
    own = replace(config.algorithm, recompose=f"{path}:{name}", recompose_kwargs=kwargs, recompose_buffer=capacity)
    config = changed(replace(config, algorithm=own), rollout={"n": 2}, data={"train_batch_size": 2})
    return Recomposer(config, 10, ORIGINALS)


ALIKE, DIFFERENT = [0.0, 0.0], [1.0, 0.0]


def test_the_example_replays_what_was_informative(tmp_path, small_config):
    recomposer = recomposer_of(small_config, example(tmp_path, "replay.py"), "ReplayInformative", oldest=1)
    learned, metrics = recomposer.recompose(sampled_of([0, 1], [DIFFERENT, ALIKE]), 1)
    assert learned.texts == ["text 0", "text 1"]
    assert metrics == {
        "recompose/responses": 2.0,
        "recompose/learned": 2.0,
        "recompose/replayed": 0.0,
        "recompose/buffer": 2.0,
    }
    learned, metrics = recomposer.recompose(sampled_of([0, 2], [ALIKE, DIFFERENT], first=10.0), 2)
    assert learned.texts == ["text 12", "text 13", "text 0", "text 1"]
    # The same prompt in another step is another group.
    assert learned.rollout.group_ids.tolist() == [(2 << 32) + 1] * 2 + [1 << 32] * 2
    assert [record.uid for record in learned.prompts.records] == [2, 2, 0, 0]
    assert learned.replayed is not None and learned.replayed.tolist() == [False, False, True, True]
    assert learned.rollout.rollout_logprobs[:, 0].tolist() == [12.0, 13.0, 0.0, 1.0]
    assert learned.rollout.rank_metrics.by_name["m"].flatten().tolist() == [12.0, 13.0, 0.0, 1.0]
    assert torch.equal(learned.prompts.tokens.input_ids, learned.rollout.input_ids[:, :P])
    assert learned.sources == ["arithmetic"] * 4
    assert metrics["recompose/replayed"] == 2.0 and metrics["recompose/age/mean"] == 1.0
    # What was sampled two steps ago is too old.
    learned, metrics = recomposer.recompose(sampled_of([0, 1], [ALIKE, ALIKE]), 4)
    assert metrics["recompose/replayed"] == 0.0 and len(learned.texts) == 4


def test_the_ratio_is_to_the_policy_that_sampled():
    current, sampling = torch.tensor([[-1.0], [-2.0]]), torch.tensor([[-1.5], [-3.0]])
    assert behaviour_logprobs(current, sampling, None) is current
    assert behaviour_logprobs(current, sampling, torch.tensor([False, True])).tolist() == [[-1.0], [-3.0]]


def test_a_group_may_be_learned_from_in_part(tmp_path, small_config):
    (tmp_path / "part.py").write_text(
        "class Part:\n"
        "    def recompose(self, batch):\n"
        "        return batch.responses.learning(batch.responses.correct)\n"
    )
    learned, metrics = recomposer_of(small_config, tmp_path / "part.py", "Part").recompose(
        sampled_of([0, 1], [DIFFERENT, [0.0, 1.0]]), 1
    )
    assert learned.learned.tolist() == [True, False, False, True]
    assert learned.updated is not None and learned.updated.tolist() == [0, 3]
    assert metrics["recompose/responses"] == 4.0 and metrics["recompose/learned"] == 2.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ReturnsRows", "its recompose returned RolloutBatch.*; it must return a verl.data.replay.Responses"),
        ("Nothing", "its recompose returned 0 responses, 0 of them to learn from; must be from 1 to 8, and at most 4"),
        ("TooMany", "its recompose returned 8 responses, 8 of them to learn from; must be from 1 to 8, and at most 4"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, small_config, name, message):
    (tmp_path / "broken.py").write_text(BROKEN)
    recomposer = recomposer_of(small_config, tmp_path / "broken.py", name)
    with pytest.raises(ConfigError, match=rf"(?s)^algorithm.recompose='.*broken.py:{name}': {message}"):
        recomposer.recompose(sampled_of([0, 1], [ALIKE, ALIKE]), 1)


def test_remax_compares_with_this_step_alone(small_config):
    with pytest.raises(ConfigError, match=r"^recompose='a:B': remax compares with a greedy response"):
        changed(small_config, algorithm={"recompose": "a:B", "adv_estimator": "remax"})


def responses_of(sampled: Sampled, step: int) -> Responses:
    records = [record for record in sampled.prompts.records for _ in range(2)]
    num = len(records)
    steps, learned = torch.full((num,), step), torch.arange(num) % 2 == 0
    return Responses(sampled.rollout, records, sampled.texts, sampled.pending.result(), steps, learned)


def test_a_buffer_is_bounded_and_comes_back_from_a_checkpoint_to_the_bit():
    buffer = ReplayBuffer(5)
    assert buffer.state(ORIGINALS) is None
    buffer.add(responses_of(sampled_of([0, 1], [ALIKE, DIFFERENT], first=0.1), 1))
    edited = replace(ORIGINALS[2], input_ids=[1, 9, 9], messages=[{"role": "user", "content": "hint"}])
    second = responses_of(sampled_of([2], [DIFFERENT], first=1 / 3), 2)
    buffer.add(replace(second, records=[edited, ORIGINALS[2]], texts=["\ud800\x00", "ü"]))
    # Six of two each: the oldest group falls out as a whole.
    assert len(buffer) == 4 and buffer.responses.steps.tolist() == [1, 1, 2, 2]
    assert len(buffer.take([])) == 0
    taken = buffer.take([0])
    assert taken.texts == ["text 2"] and buffer.responses.steps.tolist() == [1, 2, 2]
    again = ReplayBuffer(5)
    again.load_state(json.loads(json.dumps(buffer.state(ORIGINALS))), ORIGINALS, (P + R, R))
    held, found = buffer.responses, again.responses
    assert found.records == held.records and found.records[1] == edited
    assert (found.texts, found.results) == (held.texts, held.results)
    assert torch.equal(found.steps, held.steps) and torch.equal(found.learned, held.learned)
    for name in ("input_ids", "attention_mask", "response_mask", "rollout_logprobs", "group_ids", "truncated"):
        before, after = getattr(held.rollout, name), getattr(found.rollout, name)
        assert torch.equal(before, after) and before.dtype == after.dtype
    assert torch.equal(found.rollout.rank_metrics.by_name["m"], held.rollout.rank_metrics.by_name["m"])
    assert torch.equal(found.rollout.rank_metrics.mean_states, held.rollout.rank_metrics.mean_states)
    with pytest.raises(
        ConfigError, match=r"^data.max_prompt_length=30, data.max_response_length=12: the replay buffer"
    ):
        again.load_state(json.loads(json.dumps(buffer.state(ORIGINALS))), ORIGINALS, (42, 12))
    strange = buffer.state(ORIGINALS)
    for uid in (-1, 4):
        strange["uids"][0] = uid
        with pytest.raises(ConfigError, match=r"^data.train_files: the replay buffer of the checkpoint has prompts"):
            again.load_state(json.loads(json.dumps(strange)), ORIGINALS, (P + R, R))
    # Once it is empty, it is as a new one, which is what is saved of it.
    buffer.take([0, 1, 2])
    assert len(buffer) == 0 and buffer.state(ORIGINALS) is None
    with pytest.raises(ValueError, match="the buffer is empty"):
        _ = buffer.responses


def test_what_is_told_how_steps_went_says_that_it_forgets(tmp_path, small_config, tiny_tokenizer):
    (tmp_path / "own.py").write_text(
        "class Forgetting:\n"
        "    def recompose(self, batch):\n"
        "        return batch.responses\n"
        "    def update(self, outcome):\n"
        "        pass\n"
    )
    config = changed(small_config, algorithm={"recompose": f"{tmp_path}/own.py:Forgetting"})
    (note,) = SamplingHooks(config, 10, ORIGINALS, tiny_tokenizer).notes
    assert note == (
        f"algorithm.recompose='{tmp_path}/own.py:Forgetting': has update but no state_dict, so a resumed run forgets "
        "what update was told"
    )
