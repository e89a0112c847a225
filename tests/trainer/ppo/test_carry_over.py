"""Responses that outlive a step: the real scheduler over engines that only count steps, and real runs."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.runs import Run, assert_resumes, records
from tests.kit import ROOT, changed, small_overrides, stored
from verl.batch import Batch
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.method.calls import MethodCalls
from verl.rollout.requests import ResponseRequests
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.speed import PhaseTimer
from verl.trainer.ppo.advantages import ResponseRewards
from verl.trainer.ppo.partial_rollouts import PartialRolloutScheduler
from verl.trainer.ppo.ray_trainer import prompt_order
from verl.verifiers.verdict import Verdict

N, GROUPS, STEPS, ROUND = 2, 3, 7, 4
"""Responses to a prompt, groups of a step, steps of a run, engine steps of a round."""

PROMPTS = [
    PromptRecord(uid, [5] * (1 + uid % 3), "arithmetic", "7", {"uid": uid}, [], False) for uid in range(GROUPS * STEPS)
]


class Verifiers:
    """In place of the pool: every response is right, but to ``mixed`` prompts every other one only."""

    def __init__(self, mixed: Sequence[int] = ()) -> None:
        self.mixed = mixed
        self.num_seen = Counter[int]()

    def submit_batch(
        self, sources: list[str], texts: list[str], truths: list[str], infos: list[dict[str, int]], *others: Any
    ) -> Any:
        right = []
        for uid in [info["uid"] for info in infos]:
            right.append(uid not in self.mixed or self.num_seen[uid] % 2 == 0)
            self.num_seen[uid] += 1
        verdicts = [Verdict(r, True, "exact", score=float(r)) for r in right]

        class Pending:
            done, result = (lambda _: True), (lambda _: verdicts)

        return Pending()


class CountingEngines:
    """In place of :meth:`PolicyWorkers.generation`: a response ends at the length that its stream gives it.

    In the calls ``losses``, counted from 1, an engine is lost as responses are cut, with every other one of them.
    """

    def __init__(self, lengths: list[int], slots: int, losses: set[int] | None = None) -> None:
        self.lengths, self.slots = lengths, slots
        self.losses, self.num_calls = losses or set(), 0

    def finish_generation(self) -> None:
        pass

    def __call__(
        self,
        requests: ResponseRequests,
        take: Callable[[Batch], None],
        enough: Callable[[Sequence[int]], bool],
        _: None,
    ) -> tuple[list[Batch], None]:
        begun = requests.partial
        assert begun is not None and len(begun) == len(requests.rows)
        made = begun.response_lengths.tolist()
        rows = list(requests.rows)
        all_ended: list[int] = []
        while rows and not enough(all_ended):
            for row in rows[: self.slots]:
                made[row] = min(made[row] + ROUND, self.length(requests.streams[row]))
            ended = [row for row in rows if made[row] == self.length(requests.streams[row])]
            for row in ended:
                take(self.response(requests, row, made[row]).fill(truncated=torch.tensor([False])))
            all_ended += ended
            rows = [row for row in rows if row not in ended]
        self.num_calls += 1
        lost = {row for row in rows if row % 2 == 0} if self.num_calls in self.losses else set()
        returned = [self.response(requests, row, made[row]) for row in rows if row not in lost]
        return returned + [begun[[row]].fill(request=torch.tensor([row])) for row in sorted(lost)], None

    def length(self, stream: int) -> int:
        return self.lengths[stream % len(self.lengths)]

    def response(self, requests: ResponseRequests, row: int, length: int) -> Batch:
        assert requests.partial is not None
        before = requests.partial[[row]].version.tolist()
        assert length >= len(before)
        return Batch.of(
            [requests.prompt_ids[row]],
            [[6] * length],
            request=torch.tensor([row]),
            rollout_logprobs=torch.zeros(length),
            version=torch.tensor(before + [requests.version] * (length - len(before)), dtype=torch.int32),
        )


def sampler_of(
    config: PPOConfig,
    tokenizer: Any,
    engines: CountingEngines,
    staleness: int,
    read_at_once: int = 0,
    limit: int = 0,
    pool: bool = False,
) -> PartialRolloutScheduler:
    """With dynamic sampling where ``read_at_once``. ``pool``: engines of their own, which sample a step ahead."""
    filtering = {"enable": True, "metric": "acc", "max_num_gen_batches": limit}
    dynamic = {"filter_groups": filtering} if read_at_once else {}
    config = changed(
        config,
        data={"train_batch_size": GROUPS, "max_response_length": 64, "gen_batch_size": read_at_once or None},
        algorithm={"rollout_correction": {"rollout_is": "token"}, **dynamic},
        rollout={"n": N, "nnodes": int(pool), "n_gpus_per_node": int(pool)},
        async_training={"max_staleness": staleness, "partial_rollout": True},
    )
    method = MethodCalls(config, tokenizer)
    policy = PolicyWorkers(None, config)
    policy.generation = lambda *arguments: SimpleNamespace(run=lambda: engines(*arguments))
    policy.finish_generation = engines.finish_generation
    rewards = ResponseRewards(config, None, None)
    return PartialRolloutScheduler(config, tokenizer, policy, Verifiers(), [], method, rewards, (), PROMPTS, STEPS)


def version_of(step: int, pool: bool) -> int:
    """The version of the weights that sample a step, which a pool samples beside the one before."""
    return step - 1 - int(pool and step > 1)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 5, 8, 40, 64]), min_size=2, max_size=9),
    slots=st.integers(1, 50),
    carried=st.integers(1, 4),
    stop=st.integers(1, STEPS - 1),
    pool=st.booleans(),
    losses=st.sets(st.integers(1, 2 * STEPS), max_size=3),
)
def test_no_response_is_dropped_repeated_or_stale(
    small_config, tiny_tokenizer, lengths: list[int], slots: int, carried: int, stop: int, pool: bool, losses: set[int]
):
    staleness = carried + pool
    engines = CountingEngines(lengths, slots, losses)
    timer = PhaseTimer(lambda name: None)
    sampler = sampler_of(small_config, tiny_tokenizer, engines, staleness, pool=pool)
    stream = iter([PROMPTS[start : start + GROUPS] for start in range(0, len(PROMPTS), GROUPS)])
    seen: list[int] = []
    for step in range(1, STEPS + 1):
        batch, metrics, *_ = sampler.sample(stream, step, timer, version_of(step, pool))
        assert len(batch) == GROUPS * N and batch.step.tolist() == [step] * len(batch)
        groups = batch.group.tolist()
        # Whole groups side by side, in the order in which they were admitted.
        assert groups == sorted(groups) and groups[::N] == groups[1::N]
        seen += groups[::N]
        assert [record.uid for record in batch.records] == groups
        # Every token was sampled; none by weights older than the bound, nor by weights that are not there yet. A pool
        # samples a step while the models learn from the one before.
        assert batch.response_lengths.tolist() == [engines.length(int(s)) for s in batch.stream]
        lag = step - 1 - batch.version
        assert int(pool and step > 1) <= int(lag.min()) and int(lag.max()) <= staleness
        assert metrics["async/outstanding"] <= carried * GROUPS
        assert len(batch.texts) == len(batch.verdicts) == len(batch) and batch.correct.all()
        if step == stop:
            # A resumed run has the open responses as they were.
            saved = stored(sampler.state())
            sampler = sampler_of(small_config, tiny_tokenizer, engines, staleness, pool=pool)
            sampler.load_state(saved)
    assert sorted(seen) == list(range(GROUPS * STEPS)) and next(stream, None) is None
    assert sampler.groups.open is None and sampler.groups.ready is None


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 5, 8, 40, 64]), min_size=2, max_size=9),
    slots=st.integers(1, 50),
    staleness=st.integers(1, 4),
    stop=st.integers(1, STEPS - 1),
    mixed=st.sets(st.sampled_from(range(len(PROMPTS))), min_size=6),
    limit=st.sampled_from([0, 1, 3]),
    read_at_once=st.sampled_from([1, GROUPS, GROUPS + 2]),
    losses=st.sets(st.integers(1, 2 * STEPS), max_size=3),
)
def test_dynamic_sampling_replaces_groups_without_variance(
    small_config,
    tiny_tokenizer,
    lengths: list[int],
    slots: int,
    staleness: int,
    stop: int,
    mixed: set[int],
    limit: int,
    read_at_once: int,
    losses: set[int],
):
    engines = CountingEngines(lengths, slots, losses)
    timer = PhaseTimer(lambda name: None)
    verifiers = Verifiers(sorted(mixed))
    made = (small_config, tiny_tokenizer, engines, staleness, read_at_once, limit * GROUPS)
    # Drawn again and again: the data never end.
    drawn = itertools.cycle(PROMPTS)
    stream = iter(lambda: list(itertools.islice(drawn, read_at_once)), None)
    sampler = sampler_of(*made)
    sampler.verifiers = verifiers
    trained: list[int] = []
    total = Counter[str]()
    for step in range(1, STEPS + 1):
        batch, metrics, dropped_scores, *_ = sampler.sample(stream, step, timer)
        total.update({name: int(value) for name, value in metrics.items()})
        assert len(batch) == GROUPS * N and batch.group[::N].equal(batch.group[1::N])
        learned = batch[batch.learned]
        assert int(metrics["train/filler_groups"]) == GROUPS - len(learned) // N <= (GROUPS if limit else 0)
        # Those that are learned from differ, whole, in order and in time; those that fill up do not.
        assert learned.group.tolist() == sorted(learned.group.tolist())
        assert {record.uid for record in learned.records} <= mixed
        assert not mixed & {record.uid for record in batch[~batch.learned].records}
        assert learned.correct.view(-1, N).sum(dim=1).eq(N // 2).all()
        assert len(learned) == 0 or int((step - 1 - learned.version).max()) <= staleness
        trained += learned.group.tolist()[::N]
        # Every group is somewhere.
        outstanding = metrics["async/outstanding"]
        assert total["async/admitted"] == len(trained) + total["async/filtered"] + outstanding
        assert outstanding <= staleness * GROUPS
        assert len(dropped_scores) // N == metrics["async/filtered"] - metrics["train/filler_groups"]
        if step == stop:
            saved = stored(sampler.state())
            sampler = sampler_of(*made)
            sampler.verifiers = verifiers
            sampler.load_state(saved)
    assert len(set(trained)) == len(trained) and (limit or len(trained) == GROUPS * STEPS)
    # Nothing is left at the end of a run, but where it had to fill up.
    assert total["train/filler_groups"] or (sampler.groups.open is None and sampler.groups.ready is None)


def test_dynamic_sampling_without_anything_to_learn_ends(small_config, tiny_tokenizer, refused):
    sampler = sampler_of(small_config, tiny_tokenizer, CountingEngines([3], 8), 1, GROUPS)
    stream = itertools.repeat(PROMPTS[:GROUPS])
    with refused("...no prompt of 100 batches has responses that differ..."):
        sampler.sample(stream, 1, PhaseTimer(lambda name: None))


def test_options_of_open_responses_are_compared_on_resume(small_config, tiny_tokenizer):
    config = sampler_of(small_config, tiny_tokenizer, CountingEngines([1], 1), 2).config
    orders = [prompt_order(config, MethodCalls(config, tiny_tokenizer))]
    for options in (
        {"rollout": {"n": 4}},
        {"data": {"train_batch_size": 2}},
        {"data": {"max_response_length": 32}},
        {"rollout": {"multi_turn": {"enable": True, "environment": "mine.py:Env"}}},
        {"async_training": {"partial_rollout": False}, "rollout": {"nnodes": 1, "n_gpus_per_node": 1}},
    ):
        other = changed(config, **options)
        orders.append(prompt_order(other, MethodCalls(other, tiny_tokenizer)))
    assert len(set(orders)) == 6


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run of five steps, and its overrides."""
    folder = tmp_path_factory.mktemp("conversations") / "run"
    # Of the shipped model that calls a calculator. Its conversations are longer than the engines' first round.
    overrides = [
        *small_overrides(ROOT / "data/tiny_tool_model", ROOT / "data/arithmetic_tools/test.parquet", folder),
        *("experiment=arithmetic_tools", "data.max_response_length=48", "data.val_sample_size=8"),
        *("async_training.max_staleness=2", "async_training.partial_rollout=true"),
        "algorithm.rollout_correction.rollout_is=token",
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"),
        "calculator.compare_versions=true",
        *("trainer.total_training_steps=5", "trainer.except_save=[3]", "trainer.save_hf_model=false"),
        *("trainer.val_before_train=false", "trainer.test_freq=4", "actor.optim.lr=1e-4"),
    ]
    Run.complete(overrides, folder.with_name("whole.log"))
    return folder, overrides


@pytest.mark.slow
def test_run_with_open_conversations(conversations):
    whole = records(conversations[0])
    assert [record["step"] for record in whole] == [1, 2, 3, 4, 5]
    assert all(record["environment/calls"] > 0 < record["critic/score/mean"] for record in whole)
    assert all(record["environment/failures"] == 0 for record in whole)
    assert whole[2]["async/carried_over_tokens"] > 0 and whole[3]["async/reread_tokens"] > 0
    assert whole[0]["async/lag/max"] == 0 and 1 <= max(record["async/lag/max"] for record in whole) <= 2
    # Every group that was admitted is learned from, four a step, or was left out; one at least was.
    admitted, filtered = (int(sum(record[f"async/{name}"] for record in whole)) for name in ("admitted", "filtered"))
    assert admitted == 4 * 5 + filtered > 4 * 5 and whole[0]["async/outstanding"] <= 8
    assert whole[4]["async/outstanding"] == 0 and not any(record["train/filler_groups"] for record in whole)
    # Under the same weights the engine's rank metrics are the trainer's.
    for record in whole:
        assert 0 < record["async/lag_0/layer_1/Effective Rank/abs_change"] < 1e-3
        assert record["async/lag_0/kl"] < 1e-6 and record.get("async/lag_1/kl", 1) > record["async/lag_0/kl"]
    # Of the same version, engine and trainer agree; of an older one they need not.
    assert whole[0]["rollout/logprob_abs_diff"] < 1e-3 < max(record["rollout/logprob_abs_diff"] for record in whole)


@pytest.mark.slow
@pytest.mark.nightly
def test_run_with_open_conversations_resumes_to_the_bit(conversations, tmp_path):
    folder, overrides = conversations
    assert_resumes(overrides, folder, 5, 3, tmp_path / "resumed.log")
