from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import changed
from verl.trainer.ppo.batches import LearningSignal, mini_batches

from verl.batch import Batch
from verl.config import PPOConfig, load_config
from verl.config.rollout_correction import RolloutCorrectionConfig
from verl.protocol import PolicyBatch, PolicyScores, RankMetrics, RolloutBatch
from verl.trainer.logging.timing import PhaseTimer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.skipped_updates import SkippedUpdates
from verl.workers.policy_loss import PolicyLoss


def batch_of(mask: list[list[int]]) -> PolicyBatch:
    rows, columns = len(mask), len(mask[0])
    ids, values = torch.arange(rows)[:, None].expand(rows, columns), torch.zeros(rows, columns)
    return PolicyBatch(ids, torch.ones_like(ids), torch.tensor(mask), values, values, values, values, batch_size=[rows])


def test_mini_batches_of_filler_alone_leave_the_parameters_where_they_are():
    # Two mini-batches to learn from, a partly rejected one, and two in which nothing is left.
    batch = batch_of([[1, 1], [1, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0]])
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5)
    places, counts = [], []
    for mini, num_tokens, num_sequences in mini_batches(batch, 2):
        optimizer.zero_grad()
        (weight * mini.response_mask.sum()).backward()
        optimizer.step()
        places.append((mini.input_ids[:, 0].tolist(), weight.item()))
        counts.append((num_tokens, num_sequences))
    assert counts == [(3, 2), (1, 1)]
    assert [rows for rows, _ in places] == [[0, 1], [2, 3]]
    reached = places[-1][1]
    assert weight.item() == reached
    # What a step on gradients of 0 would do: moments and weight decay move the parameters.
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert abs(weight.item() - reached) > 0.1
    assert list(mini_batches(batch_of([[0, 0], [0, 0]]), 1)) == []


def test_rejected_tokens_and_responses_enter_no_loss():
    config = load_config(PPOConfig, "ppo_trainer", ["trainer.remove_clip=true"])
    correction = RolloutCorrectionConfig(["token_k1", "seq_max_k2"], ["0.5_2.0", "3.0"], None)
    config = replace(config, algorithm=replace(config.algorithm, rollout_correction=correction))
    # Log ratios 0, 1, 0.5 | 0, 0, 3 (a k2 of 4.5) | and two rows that are no longer learned from.
    rollout = SimpleNamespace(
        response_mask=torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]]),
        rollout_logprobs=torch.tensor([[-1.0, -2.0, -1.5], [-1.0, -1.0, -4.0], [-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]]),
        truncated=torch.tensor([False, False, False, True]),
    )
    sampled = SimpleNamespace(learned=torch.tensor([True, True, False, True]), rollout=rollout)
    trainer = SimpleNamespace(config=config, metrics={})
    scores = SimpleNamespace(logprobs=torch.full((4, 3), -1.0))
    mask = RayPPOTrainer._learned_mask(trainer, sampled, scores)
    assert mask.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert trainer.metrics["rollout_corr/rollout_rs_masked_fraction"] == 4 / 11
    assert trainer.metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 2 / 11
    assert trainer.metrics["rollout_corr/rollout_rs_seq_max_k2_seq_masked_fraction"] == 0.25


def test_updates_take_the_rows_that_were_drawn():
    config = load_config(PPOConfig, "ppo_trainer", ["rollout.n=1", "actor.ppo_mini_batch_size=3"])
    timer, metrics = SimpleNamespace(count=lambda *_: None), dict[str, float]()
    trainer = SimpleNamespace(config=config, metrics=metrics, timer=timer, step=1)
    skipped = SkippedUpdates("actor", "actor.optim", config.actor.optim)
    taken: list[list[int]] = []

    def update(mini: PolicyBatch, *_: int) -> dict[str, float]:
        taken.append(mini.input_ids[:, 0].tolist())
        return {"a": float(len(taken)), "actor/skipped_updates": 0.0}

    for rows in (torch.tensor([3, 3, 0, 1]), None):
        ones = torch.ones(4, 1)
        signal = LearningSignal(ones, ones, None, ones, ones[:, 0], None, rows)
        RayPPOTrainer._update(trainer, "x", signal.taken(batch_of([[1]] * 4)), config.actor, update, skipped)
    # The last mini-batch is smaller.
    assert taken == [[3, 3, 0], [1], [0, 1, 2], [3]]
    assert trainer.metrics == {"a": 3.5, "actor/skipped_updates": 0.0}


def test_pf_ppo_draws_by_the_rewards_the_seed_and_the_step():
    options = ["algorithm=gae", "algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_min", "seed=5"]
    trainer = SimpleNamespace(config=load_config(PPOConfig, "ppo_trainer", options), step=2)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25] * 50)
    learned = torch.ones(200, dtype=torch.bool)
    first, again = (RayPPOTrainer._resampled(trainer, rewards, learned) for _ in range(2))
    assert torch.equal(first, again) and set((first % 4).tolist()) == {0, 1}
    for other, step in ((5, 3), (6, 2)):
        other_trainer = SimpleNamespace(config=changed(trainer.config, seed=other), step=step)
        assert not torch.equal(RayPPOTrainer._resampled(other_trainer, rewards, learned), first)
    # Filler, here the responses with rewards of 1 and 0, is never drawn; the extremes are those of the others.
    learned = (rewards > 0) & (rewards < 1)
    drawn = RayPPOTrainer._resampled(trainer, rewards, learned)
    assert len(drawn) == 100 and set((drawn % 4).tolist()) == {2, 3}
    assert RayPPOTrainer._resampled(trainer, rewards, ~learned & learned).tolist() == list(range(200))


def test_with_bypass_mode_ratios_are_to_the_engine():
    config = load_config(PPOConfig, "ppo_trainer", ["actor.bypass_mode=true"])
    work: dict[str, float] = {}
    timer = SimpleNamespace(count=lambda name, done: work.update({name: done.tokens}))
    loss = PolicyLoss(config.actor)
    trainer = SimpleNamespace(config=config, timer=timer, reference=None, critic=None, loss=loss)
    engine = torch.tensor([[-1.0, -2.0]])
    rollout = SimpleNamespace(
        attention_mask=torch.ones(1, 3), rollout_logprobs=engine, rank_metrics=RankMetrics.none(1)
    )
    outputs = RayPPOTrainer._compute_outputs(trainer, rollout)
    assert outputs.scores is None and outputs.old_logprobs is engine and outputs.ref_logprobs is engine
    # The tokens of the batch are counted although no model reads them.
    assert work == {"batch": 3.0}


def test_the_policy_learns_after_the_warm_up_from_weights_with_a_mean_of_1():
    options = ["algorithm=gae", "trainer.critic_warmup=2", "actor.tis_level=token", "actor.tis_normalize=true"]
    config = load_config(PPOConfig, "ppo_trainer", [*options, "actor.tis_cap=8", "rollout.n=1"])
    # Weights 2 and 4, whose mean is 3; the second token is rejected, but counts in the mean.
    ids, values, mask = torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, 2), torch.tensor([[1, 0]])
    rollout = SimpleNamespace(
        input_ids=ids, attention_mask=ids, response_mask=ids, rollout_logprobs=-torch.tensor([[2.0, 4.0]]).log()
    )
    rollout = type("Rollout", (SimpleNamespace,), {"__len__": lambda _: 1})(**vars(rollout))
    learned: list[PolicyBatch] = []
    trainer = SimpleNamespace(
        config=config,
        metrics={},
        timer=SimpleNamespace(phase=lambda _: nullcontext()),
        policy=SimpleNamespace(update=None),
        loss=PolicyLoss(config.actor),
        actor_skipped=None,
        _num_scored_in_update=0,
        _update=lambda phase, batch, *_: learned.append(batch),
    )
    outputs = SimpleNamespace(old_logprobs=values, ref_logprobs=values, scores=SimpleNamespace(logprobs=values))
    advantages = torch.tensor([[6.0, 6.0]])
    signal = LearningSignal(mask, advantages, None, advantages, torch.ones(1), None)
    for trainer.step in (1, 2, 3):
        RayPPOTrainer._update_actor(trainer, SimpleNamespace(rollout=rollout), outputs, signal)
    assert [batch.advantages.tolist() for batch in learned] == [[[2.0, 2.0]]]
    assert trainer.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 3.0


class RecordedPolicy:
    """Says -i of the tokens of row i, and notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[float]]] = []

    def _scores(self, batch: Batch | RolloutBatch) -> PolicyScores:
        ids = batch.padded("response_tokens") if isinstance(batch, Batch) else batch.input_ids
        values = -ids.float()
        return PolicyScores(values, -values, RankMetrics.none(len(batch)), batch_size=[len(batch)])

    def compute_logprobs(self, rollout: RolloutBatch) -> PolicyScores:
        self.calls.append(("score", rollout.input_ids[:, 0].tolist()))
        return self._scores(rollout)

    def update(self, batch: Batch, *_: int) -> dict[str, float]:
        self.calls.append(("update", batch.padded("old_logprobs")[:, 0].tolist()))
        return {"actor/skipped_updates": 0.0}

    def update_on_policy(self, batch: Batch, *_: int) -> tuple[dict[str, float], PolicyScores]:
        assert batch.old_logprobs.isnan().all()
        self.calls.append(("update on policy", batch.padded("response_tokens")[:, 0].tolist()))
        return {"actor/skipped_updates": 0.0}, self._scores(batch)


@pytest.mark.parametrize(
    ("options", "learned", "calls"),
    [
        (
            ["actor.ppo_mini_batch_size=2"],
            [1, 1, 1],
            [("score", [2]), ("update on policy", [0, 1]), ("update", [-2.0])],
        ),
        # Later epochs have ratios to what the first found.
        (
            ["actor.ppo_mini_batch_size=3", "actor.ppo_epochs=2"],
            [1, 1, 1],
            [("update on policy", [0, 1, 2]), ("update", [0.0, -1.0, -2.0])],
        ),
        (
            ["actor.ppo_mini_batch_size=2", "actor.tis_level=token", "actor.tis_normalize=true"],
            [1, 1, 1],
            [("score", [0, 1, 2]), ("update", [0.0, -1.0]), ("update", [-2.0])],
        ),
        # Nothing can be learned from the first mini-batch, whose update is left out.
        (
            ["actor.ppo_mini_batch_size=2"],
            [0, 0, 1],
            [("score", [2]), ("score", [0, 1]), ("update", [-2.0])],
        ),
        # The last row was sampled by an earlier policy, and its ratio is to that: here all were sampled at -1.
        (
            ["actor.ppo_mini_batch_size=2", "algorithm.recompose=own:Batch"],
            [1, 1, 1],
            [("score", [0, 1, 2]), ("update", [0.0, -1.0]), ("update", [-1.0])],
        ),
        # With weights, the policy's own are the old ones of every row.
        (
            ["actor.ppo_mini_batch_size=2", "algorithm.recompose=own:Batch", "actor.tis_level=token"],
            [1, 1, 1],
            [("score", [0, 1, 2]), ("update", [0.0, -1.0]), ("update", [-2.0])],
        ),
        # The policy does not learn yet.
        (["algorithm=gae", "trainer.critic_warmup=1"], [1, 1, 1], [("score", [0, 1, 2])]),
    ],
)
def test_the_first_mini_batch_is_scored_as_it_is_learned_from(options, learned, calls):
    trainer = object.__new__(RayPPOTrainer)
    trainer.config = load_config(PPOConfig, "ppo_trainer", ["rollout.n=1", *options])
    trainer.loss = PolicyLoss(trainer.config.actor)
    trainer.policy, trainer.reference, trainer.critic = RecordedPolicy(), None, None
    trainer.timer, trainer.step, trainer.metrics = PhaseTimer(lambda _: nullcontext(), lambda: None), 1, {}
    trainer.actor_skipped = SkippedUpdates("actor", "actor.optim", trainer.config.actor.optim)
    ids, ones = torch.arange(3)[:, None].expand(3, 2), torch.ones(3, 2, dtype=torch.int64)
    rollout = RolloutBatch(
        ids, ones, ones, -ones.float(), ids[:, 0], torch.zeros(3, dtype=torch.bool), RankMetrics.none(3), batch_size=[3]
    )
    outputs = trainer._compute_outputs(rollout, torch.tensor([False, False, True]) if "own" in str(options) else None)
    mask = ones * torch.tensor(learned)[:, None]
    signal = LearningSignal(mask, ones.float(), None, ones.float(), torch.ones(3), None)
    trainer._update_actor(SimpleNamespace(rollout=rollout), outputs, signal)
    assert trainer.policy.calls == calls
    assert torch.equal(outputs.scores.logprobs, -ids.float()) and torch.equal(outputs.scores.entropy, ids.float())


def test_the_samples_of_a_step_are_on_the_disk_before_its_checkpoint():
    done: list[str] = []
    trainer = SimpleNamespace(
        step=3,
        validations={},
        timer=SimpleNamespace(phase=lambda name: nullcontext()),
        samples=SimpleNamespace(store=SimpleNamespace(flush=lambda: done.append("samples"))),
        saver=SimpleNamespace(save=lambda *_: done.append("checkpoint")),
        _state=dict,
    )
    RayPPOTrainer._save(trainer)
    assert done == ["samples", "checkpoint"]
