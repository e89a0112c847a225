"""Dynamic sampling and rewards with the real verifiers; a worker group that answers from a list."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from conftest import changed, rank_columns

from verl.batch import Batch
from verl.config import ConfigError, PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.method.calls import MethodCalls
from verl.rewards.pool import VerifierPool
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import data_sources
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.trainer.ppo.advantages import ResponseRewards
from verl.trainer.ppo.rollout_scheduler import REFILL_STEP, REPEATED, RolloutScheduler

pytestmark = pytest.mark.slow

N = 2


class ScriptedWorkers:
    """Answers the prompt ``uid`` with the tokens of ``answers[uid]``, one entry per response."""

    world_size = 1

    def __init__(self, tokenizer, answers: dict[int, list[str]]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.steps: list[int] = []

    def run(self, method):
        assert method == "finish_generation"

    def run_split(self, method, batch, *arguments, ranks_per_share=1):
        assert method == "reward_model.compute_scores"
        return [batch.columns().fill(scores=torch.arange(len(batch)).float())]

    def generate(self, records, sampling, seed, on_finished, settings):
        """In place of the engines: responses end one by one, the last ones first."""
        self.steps.append(seed & 0xFFFFFFFF)
        prompts = [record.input_ids for record in records for _ in range(sampling.n)]
        texts = [text for record in records for text in self.answers[record.uid][: sampling.n]]
        ids, ranks = [self.tokenizer.encode(text) for text in texts], torch.arange(len(texts)).double()
        for row in reversed(range(len(texts))):
            on_finished(Batch.of([prompts[row]], [ids[row]], request=torch.tensor([row])))
        metrics, truncated = rank_columns({"m": ranks}), torch.zeros(len(texts), dtype=torch.bool)
        return Batch.of(prompts, ids, truncated=truncated, **metrics)


def prompts_of(*uids: int, source: str = "arithmetic") -> list[PromptRecord]:
    return [PromptRecord(uid, [5], source, "7", {}, [{"role": "user", "content": f"{uid}"}], False) for uid in uids]


@pytest.fixture(scope="module")
def pool(small_config: PPOConfig) -> Iterator[VerifierPool]:
    with VerifierPool(small_config.reward_score) as pool:
        yield pool


def make_sampler(config: PPOConfig, tokenizer, pool, answers: dict[int, list[str]], **changes) -> RolloutScheduler:
    """A step of 2 prompts, 2 responses each; ``changes`` in the group ``algorithm.filter_groups``."""
    filtering = {"filter_groups": {"enable": True, **changes}}
    config = changed(config, data={"train_batch_size": 2}, rollout={"n": N}, algorithm=filtering)
    workers = ScriptedWorkers(tokenizer, answers)
    policy = PolicyWorkers(workers, config)
    policy.generate = workers.generate
    rewards = ResponseRewards(config, tokenizer, workers)
    return RolloutScheduler(config, tokenizer, policy, pool, [], MethodCalls(config, tokenizer), rewards)


PENALTY = {"overlong_buffer": {"enable": True, "len": 4, "penalty_factor": 0.5}}
MIXED, RIGHT, WRONG = ["7", "8"], ["7", "7"], ["8", "9"]


def test_groups_without_variance_are_replaced(small_config, tiny_tokenizer, pool):
    answers = {0: RIGHT, 1: MIXED, 2: WRONG, 3: RIGHT, 4: MIXED, 5: ["8", "7"]}
    sampler = make_sampler(small_config, tiny_tokenizer, pool, answers)
    sampler.sources = ["gsm8k", "arithmetic"]
    stream = iter([prompts_of(0, 1), prompts_of(2, 3, source="gsm8k"), prompts_of(4, 5), prompts_of(9, 9)])
    batch, metrics, dropped_scores, greedy, verifications = sampler.sample(
        stream, 3, timer := PhaseTimer(lambda name: None)
    )
    assert greedy is None and not verifications
    # Of the third batch only one group is still needed; the fourth is not touched.
    assert [record.uid for record in batch.records] == [1, 1, 4, 4]
    assert batch.correct.tolist() == [True, False, True, False] and batch.step.tolist() == [3] * 4
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rank_metrics["m"].flatten().tolist() == [2.0, 3.0, 0.0, 1.0]
    assert batch.texts == ["7", "8", "7", "8"]
    assert sampler.policy.workers.steps == [3, 3 + REFILL_STEP, 3 + 2 * REFILL_STEP]
    # All that was sampled counts in the log: 12 responses of 6 prompts, 7 of them right, 3 groups alike.
    expected = {"score/mean": 7 / 12, "train/pass@1": 7 / 12, "train/groups_without_variance": 0.5}
    expected |= {"train/num_gen_batches": 3.0, "train/filler_groups": 0.0}
    expected |= {"verifier/exact": 7.0, "verifier/different": 5.0}
    # By source too, whatever was kept of it.
    expected |= {"train/arithmetic/pass@1": 5 / 8, "train/arithmetic/score/mean": 5 / 8}
    assert metrics == expected | {"train/gsm8k/pass@1": 0.5, "train/gsm8k/score/mean": 0.5}
    assert data_sources(batch) == ["arithmetic"] * 4
    assert batch.learned.all() and dropped_scores.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert set(timer.totals) == {"gen", "reward"}
    # Each response is one token after a prompt of one.
    assert timer.take_step().work == {"gen": Work(12.0, 12 * (2**2 - 1**2))}
    assert next(stream)[0].uid == 9


def test_prompt_twice_in_a_batch_makes_two_groups(small_config, tiny_tokenizer, pool):
    sampler = make_sampler(small_config, tiny_tokenizer, pool, {0: MIXED, 3: MIXED})
    batch, _ = sampler.generate(prompts_of(3, 0, 3), sampler.config.rollout.train_kwargs, step=1)
    assert batch.group.tolist() == [3, 3, 0, 0, 3 + REPEATED, 3 + REPEATED]
    # The trainer's check takes them for two groups of n.
    assert batch.group.unique(return_counts=True)[1].tolist() == [N, N, N]


def test_limit_of_batches_fills_up_with_dull_groups(small_config, tiny_tokenizer, pool):
    answers = {0: RIGHT, 1: WRONG, 2: RIGHT, 3: MIXED}
    sampler = make_sampler(small_config, tiny_tokenizer, pool, answers, max_num_gen_batches=2)
    stream = iter([prompts_of(0, 1), prompts_of(2, 3)])
    batch, metrics, dropped_scores, *_ = sampler.sample(stream, 1, PhaseTimer(lambda name: None))
    assert [record.uid for record in batch.records] == [3, 3, 0, 0]
    # Nothing is learned from a filler.
    assert batch.learned.tolist() == [True, True, False, False]
    assert dropped_scores.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert (metrics["train/num_gen_batches"], metrics["train/filler_groups"]) == (2.0, 1.0)
    # A prompt drawn twice makes two groups.
    stream = iter([prompts_of(0, 3), prompts_of(1, 3)])
    batch, *_ = sampler.sample(stream, 2, PhaseTimer(lambda name: None))
    assert [record.uid for record in batch.records] == [3] * 4
    assert batch.group.tolist() == [0, 0, 1, 1]


def test_teacher_alone_needs_no_ground_truth(small_config, tiny_tokenizer, pool):
    taught = {"model": {"path": "data/tiny_teacher"}, "use_task_rewards": False}
    config = changed(small_config, teacher=taught, reward_manager={"add_adv": False, "add_reward": False})
    assert not config.needs_verdicts and small_config.needs_verdicts
    # One prompt has an answer, one has none, and one has a source that nobody knows.
    records = [
        *prompts_of(0),
        *(replace(record, ground_truth=None) for record in prompts_of(1)),
        *prompts_of(2, source="me"),
    ]
    sampler = make_sampler(config, tiny_tokenizer, pool, {0: MIXED, 1: RIGHT, 2: RIGHT}, enable=False)
    verification = sampler._verification([record for record in records for _ in range(N)])
    texts = ["7", "8", "7", "7", "7", "7"]
    for row, text in enumerate(texts):
        ids = tiny_tokenizer.encode(text)
        verification.add(Batch.of([[5]], [ids], request=torch.tensor([row])))
    verification.submit()
    found = verification.verdicts()
    assert [verdict.reason for verdict in found] == ["exact", "different"] + ["unscored"] * 4
    assert [verdict.score for verdict in found] == [1.0] + [0.0] * 5


def sampled_uids(sampler: RolloutScheduler, *batches: list[PromptRecord]) -> tuple[list[int], dict[str, float]]:
    batch, metrics, *_ = sampler.sample(iter(batches), 1, PhaseTimer(lambda name: None))
    return [record.uid for record in batch.records[::N]], metrics


def test_generation_batch_may_be_of_another_size(small_config, tiny_tokenizer, pool):
    answers = {0: MIXED, 1: RIGHT, 2: MIXED, 3: MIXED, 4: WRONG}
    # Larger: one round is enough, and what is left over is dropped. Smaller: more rounds.
    sampler = make_sampler(small_config, tiny_tokenizer, pool, answers)
    found, metrics = sampled_uids(sampler, prompts_of(1, 0, 2, 3))
    assert (found, metrics["train/num_gen_batches"], metrics["score/mean"]) == ([0, 2], 1.0, 5 / 8)
    found, metrics = sampled_uids(sampler, prompts_of(1), prompts_of(3), prompts_of(4), prompts_of(2))
    assert (found, metrics["train/num_gen_batches"], metrics["train/filler_groups"]) == ([3, 2], 4.0, 0.0)


def test_unlimited_batches_fill_the_step(small_config, tiny_tokenizer, pool, monkeypatch):
    answers = {0: RIGHT, 1: MIXED}
    sampler = make_sampler(small_config, tiny_tokenizer, pool, answers, max_num_gen_batches=0)
    dull, good = [prompts_of(0, 0)] * 12, [prompts_of(0, 1)] * 2
    found, metrics = sampled_uids(sampler, *dull, *good)
    assert (found, metrics["train/num_gen_batches"]) == ([1, 1], 14.0)
    monkeypatch.setattr("verl.trainer.ppo.rollout_scheduler.MAX_FRUITLESS_BATCHES", 3)
    with pytest.raises(ConfigError, match="metric='acc': no prompt of 3 batches has responses that differ"):
        sampled_uids(sampler, *dull)


@pytest.mark.parametrize(
    ("metric", "expected"), [("acc", [2, 3]), ("seq_reward", [0, 2]), ("seq_final_reward", [0, 2])]
)
def test_groups_are_compared_by_verls_metrics(small_config, tiny_tokenizer, pool, metric: str, expected: list[int]):
    # Both responses to prompt 0 are wrong, but one is so long that it is punished.
    answers = {0: ["8", "8" * 12], 1: RIGHT, 2: MIXED, 3: MIXED}
    sampler = make_sampler(small_config, tiny_tokenizer, pool, answers, metric=metric)
    sampler.config = sampler.rewards.config = changed(sampler.config, reward_score=PENALTY)
    assert sampled_uids(sampler, prompts_of(0, 1), prompts_of(2, 3))[0] == expected


def test_rewards_add_up(small_config, tiny_tokenizer, pool):
    sampler = make_sampler(small_config, tiny_tokenizer, pool, {0: ["7", "8" * 12], 1: ["7", "8"]})
    batch, verification = sampler.generate(prompts_of(0, 1), sampler.config.rollout.train_kwargs, step=1)
    verification.finish()
    rewards, metrics = sampler.rewards.compute(batch)
    assert rewards.tolist() == [1.0, 0.0, 1.0, 0.0] and metrics == {}
    judge = {"enable": True, "rule_weight": 2.0, "weight": 0.25}
    sampler.config = sampler.rewards.config = changed(sampler.config, reward_score=PENALTY, reward_model=judge)
    # Twice the verifier's score, a quarter of 0, 1, 2, 3, and the full penalty for 12 tokens of at most 12.
    lengths = batch.response_lengths.tolist()
    assert lengths[1] == 12 and lengths[0] < 8
    rewards, metrics = sampler.rewards.compute(batch)
    assert rewards.tolist() == [2.0, 0.25 - 0.5, 2.5, 0.75]
    opinion = {"score/mean": 1.5, "score/std": 1.25**0.5, "clip_ratio": 0.0}
    expected = {f"reward_model/{name}": value for name, value in opinion.items()}
    assert metrics == expected | {"train/overlong_penalty/mean": -0.125}
