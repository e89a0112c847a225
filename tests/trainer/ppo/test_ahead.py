"""Sampling one step ahead, over engines that only count steps; and runs with engines of their own."""

import itertools
import os
import re
import shutil
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.runs import Run, records
from tests.kit import ROOT, changed, small_overrides, stored
from tests.trainer.ppo.test_carry_over import (
    GROUPS,
    PROMPTS,
    STEPS,
    CountingEngines,
    N,
    Verifiers,
    sampler_of,
    version_of,
)
from verl.batch import Batch
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.method.calls import MethodCalls
from verl.rollout.requests import response_stream
from verl.single_controller import roles
from verl.single_controller.pooled_policy import PooledPolicyWorkers
from verl.trainer.logging.speed import PhaseTimer
from verl.trainer.ppo.advantages import ResponseRewards
from verl.trainer.ppo.ahead import StepAhead
from verl.trainer.ppo.rollout_scheduler import RolloutScheduler


class Pool:
    """In place of the pool's worker group and of what samples with it; notes the threads that use it."""

    world_size, device_type = 1, "cpu"

    def __init__(self, background: Any) -> None:
        self.background = background
        self.threads: list[str] = []
        self.loaded: int | None = None
        """The version of the engines' weights."""

    def replace_lost(self) -> bool:
        return False

    def run_living(self, method: str, weights: int) -> None:
        assert method == "load_weights"
        self.loaded = weights

    def run(self, method: str) -> list[None]:
        assert method == "weight_dtype"
        return [None]

    def take_peak_memory(self) -> None:
        self.threads.append(threading.current_thread().name)

    def generate(
        self, records: list[PromptRecord], sampling: SamplingConfig, seed: int, on_finished: Any, settings: Any
    ) -> Batch:
        """Responses that say by what they were drawn."""
        self.threads.append(threading.current_thread().name)
        assert settings is None
        asked = [(record, i) for record in records for i in range(sampling.n)]
        batch = Batch.of(
            [record.input_ids for record, _ in asked],
            [[6] * (1 + response_stream(seed, record.uid, i) % 9) for record, i in asked],
            request=torch.arange(len(asked)),
            truncated=torch.zeros(len(asked), dtype=torch.bool),
        )
        on_finished(batch)
        return batch.fill(rollout_logprobs=torch.zeros(int(batch.response_lengths.sum()))).without("request")


class Trainer:
    """In place of the models' worker group, which publishes weights."""

    world_size, device_type = 1, "cpu"
    version = -1

    def run(self, method: str, dtype: None, version: int) -> list[int]:
        assert method == "publish_weights"
        self.version += 1
        return [self.version]


def ahead_of(config: PPOConfig, tokenizer: Any, pool: Pool) -> StepAhead:
    config = changed(
        config,
        data={"train_batch_size": GROUPS},
        rollout={"n": N, "nnodes": 1, "n_gpus_per_node": 1},
        algorithm={"rollout_correction": {"rollout_is": "token"}},
        async_training={"max_staleness": 1},
    )
    policy = PooledPolicyWorkers(Trainer(), config, pool)
    policy.generate = pool.generate
    method = MethodCalls(config, tokenizer)
    rewards = ResponseRewards(config, None, None)
    return StepAhead(
        RolloutScheduler(config, tokenizer, policy, Verifiers(), [], method, rewards, (), PROMPTS, STEPS), policy
    )


def prompts_from(step: int) -> Any:
    return iter([PROMPTS[start : start + GROUPS] for start in range((step - 1) * GROUPS, len(PROMPTS), GROUPS)])


@pytest.mark.parametrize("stop", [None, 1, 4])
def test_step_is_sampled_while_the_one_before_is_learned(small_config, tiny_tokenizer, stop: int | None):
    timer, seen = PhaseTimer(lambda name: None), []
    with ThreadPoolExecutor(1, "sampling") as background:
        pool = Pool(background)
        ahead = ahead_of(small_config, tiny_tokenizer, pool)
        prompts = prompts_from(1)
        for step in range(1, STEPS + 1):
            batch, metrics, *_ = ahead.take(prompts, step, timer)
            assert batch.step.tolist() == [step] * GROUPS * N and batch.correct.all()
            # The first step finds nothing that was sampled ahead.
            assert set((step - 1 - batch.version).tolist()) == {int(step > 1)}
            assert metrics["async/outstanding"] == GROUPS * (step < STEPS)
            seen.append((batch.group.tolist(), batch.response_lengths.tolist()))
            ahead.finish(timer)
            record = timer.take_step()
            # What engines do beside an update is no part of its time.
            assert ("gen" in record.seconds, "gen" in record.background) == (step == 1, step < STEPS)
            if step == stop:
                # A checkpoint holds the next step's responses.
                saved = stored(ahead.state())
                ahead, prompts = ahead_of(small_config, tiny_tokenizer, pool), prompts_from(step + 2)
                ahead.load_state(saved)
    assert [sorted(set(groups)) for groups, _ in seen] == [
        list(range(first, first + GROUPS)) for first in range(0, GROUPS * STEPS, GROUPS)
    ]
    assert [name.startswith("sampling") for name in pool.threads].count(False) == 1
    # By their seeds alone, as in a run whose engines wait.
    plain, prompts = ahead.scheduler, prompts_from(1)
    batches = [plain.sample(prompts, step, timer).batch for step in range(1, STEPS + 1)]
    assert seen == [(batch.group.tolist(), batch.response_lengths.tolist()) for batch in batches]


def test_error_while_sampling_ends_the_step(small_config, tiny_tokenizer):
    timer = PhaseTimer(lambda name: None)
    with ThreadPoolExecutor(1) as background:
        ahead = ahead_of(small_config, tiny_tokenizer, Pool(background))
        ahead.take(iter([PROMPTS[:GROUPS], [None] * GROUPS]), 1, timer)
        with pytest.raises(AttributeError, match="input_ids"):
            ahead.finish(timer)


@pytest.mark.parametrize("publishes_first", [False, True])
def test_weights_stay_fixed_while_a_step_is_sampled(small_config, tiny_tokenizer, monkeypatch, publishes_first: bool):
    """With dynamic sampling engines begin several times a step, and the trainer may publish between two of these."""
    published, used = threading.Event(), list[tuple[int, int | None]]()
    engines = CountingEngines([1, 40, 3, 64, 8], 6)
    scheduler = sampler_of(small_config, tiny_tokenizer, engines, 3, read_at_once=GROUPS, pool=True)
    drawn = itertools.cycle(PROMPTS)
    prompts = iter(lambda: list(itertools.islice(drawn, GROUPS)), None)
    timer = PhaseTimer(lambda name: None)

    with ThreadPoolExecutor(1, "sampling") as background:
        pool = Pool(background)

        def generation(
            workers: Any, copies: int, requests: Any, deterministic: bool, take: Any, *more: Any, version: int
        ) -> Any:
            used.append((requests.version, pool.loaded))
            assert version == requests.version
            cut = engines(requests, take, *more)
            if publishes_first and threading.current_thread().name.startswith("sampling"):
                assert published.wait(60)
            return SimpleNamespace(run=lambda: cut)

        monkeypatch.setattr(roles, "Generation", generation)
        policy = scheduler.policy = PooledPolicyWorkers(Trainer(), scheduler.config, pool)
        scheduler.verifiers = Verifiers(range(0, len(PROMPTS), 2))
        ahead = StepAhead(scheduler, policy)
        for step in range(1, STEPS + 1):
            published.clear()
            ahead.take(prompts, step, timer)
            if ahead.running is not None and not publishes_first:
                ahead.running.exception()
            policy.sync_weights(step)
            published.set()
            ahead.finish(timer)
    assert len(used) > STEPS and all(stamped == loaded for stamped, loaded in used), used


@pytest.mark.parametrize("lengths", [[1, 40, 3, 64, 8]])
def test_carry_over_continues_in_the_background(small_config, tiny_tokenizer, lengths: list[int]):
    timer, runs = PhaseTimer(lambda name: None), []
    for in_background in (False, True):
        scheduler = sampler_of(small_config, tiny_tokenizer, CountingEngines(lengths, 6), 3, pool=True)
        with ThreadPoolExecutor(1) as background:
            pooled = SimpleNamespace(pool=Pool(background), hold_weights=lambda: None, release_weights=lambda: None)
            ahead = StepAhead(scheduler, pooled)
            prompts, steps = prompts_from(1), list[Any]()
            for step in range(1, STEPS + 1):
                if in_background:
                    sampled = ahead.take(prompts, step, timer)
                    ahead.finish(timer)
                else:
                    sampled = scheduler.sample(prompts, step, timer, version_of(step, True))
                steps.append((sampled.batch.group.tolist(), sampled.batch.version.tolist(), sampled.metrics))
        runs.append(steps)
    assert runs[0] == runs[1]


def overrides_of(prompts: Path, folder: Path, *more: str) -> list[str]:
    """Of a run of the shipped model with longer responses, in which every step changes the weights."""
    return [
        *small_overrides(ROOT / "data/tiny_model", prompts, folder),
        *("data.max_response_length=48", "actor.optim.lr=1e-3", "trainer.save_hf_model=false", *more),
    ]


ENGINES = ("rollout.nnodes=1", "rollout.n_gpus_per_node=2")
WEIGHTED = "algorithm.rollout_correction.rollout_is=token"


@pytest.mark.slow
@pytest.mark.nightly
def test_engine_pool_gives_the_numbers_of_a_colocated_run(arithmetic_prompts, tmp_path):
    runs = []
    for name, pool in (("colocated", ()), ("pool", ("rollout.nnodes=1", "rollout.n_gpus_per_node=1"))):
        run = Run(overrides_of(arithmetic_prompts, tmp_path / name, *pool), tmp_path / f"{name}.log")
        assert run.finish() == 0, run.log.read_text()
        runs.append(records(tmp_path / name))
        run.assert_nothing_left(tmp_path / name)
    assert runs[0] == runs[1] and [record["step"] for record in runs[0]] == [0, 1, 2]
    assert len(list((tmp_path / "pool/logs/attempt_1/engines").glob("rank_*.log"))) == 1


def kill_engine(folder: Path) -> None:
    log = (folder / "logs/attempt_1/engines/rank_1.log").read_text()
    os.kill(int(re.search(r"process (\d+)", log)[1]), signal.SIGKILL)


@pytest.mark.nightly
def test_lost_engine_costs_an_attempt_and_no_bit(arithmetic_prompts, tmp_path):
    folder = tmp_path / "run"
    options = (*ENGINES, "async_training.max_staleness=1", WEIGHTED, "trainer.save_freq=1")
    overrides = overrides_of(arithmetic_prompts, folder, *options, "trainer.total_training_steps=5")
    run = Run.complete(overrides, tmp_path / "whole.log")
    whole = records(folder)
    assert [record.get("async/lag/max") for record in whole] == [None, 0, 1, 1, 1, 1]
    shutil.rmtree(folder)

    run = Run(overrides, tmp_path / "killed.log")
    run.wait_until(lambda: len(records(folder)) == 3)
    kill_engine(folder)
    assert run.finish() == 0, run.log.read_text()
    assert "attempt 1 ended: engine worker 1 on " in run.log.read_text()
    assert records(folder) == whole
    run.assert_nothing_left(folder)


@pytest.mark.nightly
def test_run_continues_without_an_engine_and_loses_no_group(arithmetic_prompts, tmp_path):
    folder, steps = tmp_path / "run", 10
    options = ("async_training.max_staleness=3", "async_training.partial_rollout=true", WEIGHTED)
    filtering = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score")
    # With a higher rate the policy soon answers nothing, and no group differs.
    more = (*filtering, "trainer.deterministic=false", "actor.optim.lr=1e-5")
    overrides = overrides_of(arithmetic_prompts, folder, *ENGINES, *options, *more)
    run = Run([*overrides, f"trainer.total_training_steps={steps}", "trainer.test_freq=-1"], tmp_path / "run.log")
    run.wait_until(lambda: len(records(folder)) == 3)
    kill_engine(folder)
    assert run.finish() == 0, run.log.read_text()
    assert "going on with 1 engines" in run.log.read_text() and "attempt 1 ended" not in run.log.read_text()
    trained, total = 0, Counter[str]()
    for record in records(folder)[1:]:
        trained += 4 - int(record["train/filler_groups"])
        total.update({name: int(record[f"async/{name}"]) for name in ("admitted", "filtered")})
        # Each group that was admitted is learned from once, was left out, or is still there.
        assert total["admitted"] == trained + total["filtered"] + int(record["async/outstanding"])
    # A step that has compared as many groups as it may fills up with filtered ones.
    assert 4 <= trained <= steps * 4 and total["filtered"] > 0 and records(folder)[-1]["async/outstanding"] == 0
    run.assert_nothing_left(folder)
