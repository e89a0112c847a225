import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.kit import rank_columns
from tests.trainer.ppo.trainers import batch_of, estimation, flat, three, trainer_of, weighted
from verl.batch import ENVIRONMENT, POLICY, Batch
from verl.checkpoint.resume import Resumption
from verl.rank.shuffling import shuffle_within_groups
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, prefix_note, step_note
from verl.trainer.ppo.rollout_scheduler import SampledStep
from verl.trainer.ppo.updates import mini_batches


def test_mini_batches_of_filler_are_skipped():
    # Two mini-batches to learn from, a partly rejected one, and two in which nothing is left.
    batch = batch_of([[1, 1], [1, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0]])
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5)
    places, counts = [], []
    for mini, num_tokens, num_sequences in mini_batches(batch, 2):
        optimizer.zero_grad()
        (weight * mini.learn_mask.sum()).backward()
        optimizer.step()
        places.append((mini.tokens[::2].tolist(), weight.item()))
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
    rules = ["algorithm.rollout_correction.rollout_rs=[token_k1,seq_max_k2]"]
    rules += ["algorithm.rollout_correction.rollout_rs_threshold=['0.5_2.0','3.0']"]
    # Log ratios 0, 1, 0.5 | 0, 0, 3 (a k2 of 4.5) | and two rows that are no longer learned from.
    engine = flat([-1.0, -2.0, -1.5, -1.0, -1.0, -4.0, -1.0, -1.0, -1.0, -1.0, -1.0])
    batch = batch_of([[1] * 3, [1] * 3, [1] * 2, [1] * 3], rollout_logprobs=engine, logprobs=torch.full((11,), -1.0))
    batch.fill(learned=torch.tensor([1, 1, 0, 1]).bool(), truncated=torch.tensor([0, 0, 0, 1]).bool())
    metrics = estimation("trainer.remove_clip=true", *rules).fill_learn_mask(batch)
    assert batch.padded("learn_mask").int().tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 4 / 11
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 2 / 11
    assert metrics["rollout_corr/rollout_rs_seq_max_k2_seq_masked_fraction"] == 0.25


def test_tokens_of_an_environment_enter_no_loss():
    written = torch.tensor([POLICY, ENVIRONMENT, POLICY, POLICY, ENVIRONMENT], dtype=torch.uint8)
    batch = batch_of([[1] * 3, [1] * 2], source=written).fill(learned=torch.tensor([True, True]))
    estimation().fill_learn_mask(batch)
    assert batch.padded("learn_mask").int().tolist() == [[1, 0, 1], [1, 0, 0]]


def test_gae_skips_tokens_of_the_environment():
    written = torch.tensor([POLICY, ENVIRONMENT, ENVIRONMENT, POLICY, POLICY], dtype=torch.uint8)
    talked = batch_of([[1] * 5], source=written, values=flat([0.5, 9.0, 9.0, 0.25, 0.125]))
    spoken = batch_of([[1] * 3], values=flat([0.5, 0.25, 0.125]))
    found = []
    for batch in (talked, spoken):
        batch.fill(learned=torch.tensor([True]), group=torch.tensor([0]), scores=flat([1.0]))
        estimate = estimation("reward_manager=unshaped", adv_estimator="gae", gamma=1.0, lam=0.5)
        estimate.fill_learn_mask(batch)
        estimate.estimate(batch, torch.tensor([1.0], dtype=torch.float64), None)
        found.append(batch)
    assert talked.padded("token_rewards").tolist() == [[0, 0, 0, 0, 1]]
    assert talked.advantages[talked.by_policy].tolist() == spoken.advantages.tolist()
    assert talked.advantages[1:3].tolist() == talked.returns[1:3].tolist() == [0.0, 0.0]
    assert talked.returns[talked.by_policy].tolist() == spoken.returns.tolist()


SOURCE = """
import torch

def by_response(batch, scale):
    assert batch.rewards.tolist() == [2, 4, 6, 0] and batch.padded("token_rewards")[0].tolist() == [0, 0, 2]
    return scale * batch.rewards

def by_token(batch):
    return torch.where(batch.mask, 2.0, torch.nan)

def integers(batch):
    return torch.ones(4, dtype=torch.int64)

def wide(batch):
    return torch.ones(4, 2)

"""


def estimated(tmp_path, name: str, *options: str) -> Batch:
    (tmp_path / "mine.py").write_text(SOURCE)
    path = f"algorithm.adv_estimator={tmp_path}/mine.py:{name}"
    rewards = torch.tensor([2.0, 4.0, 6.0, 0.0], dtype=torch.float64)
    batch = batch_of([[1] * 3, [1] * 3, [1] * 2, [1]], scores=rewards.float())
    estimation(path, "reward_manager=unshaped", *options).estimate(batch, rewards, None)
    return batch


def test_custom_estimator_returns_one_number_a_response_or_token(tmp_path):
    batch = estimated(tmp_path, "by_response", "++algorithm.adv_estimator_kwargs.scale=2")
    assert batch.padded("advantages").tolist() == [[4, 4, 4], [8, 8, 8], [12, 12, 0], [0, 0, 0]]
    assert batch.advantages.dtype == torch.float32 and "returns" not in batch
    assert estimated(tmp_path, "by_token").advantages.tolist() == [2.0] * 9


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("integers", "...returned torch.int64; expected floating..."),
        ("wide", "...[4, 2]; expected a tensor of shape [4] or [4, 3]..."),
    ],
)
def test_return_value_of_an_estimator_is_checked(tmp_path, refused, name, line):
    with refused(f"algorithm.adv_estimator='TMP/mine.py:{name}': {line}", ValueError):
        estimated(tmp_path, name)


def test_variances_of_weighted_tokens():
    options = [*weighted(rollout_is="token", rollout_is_threshold=3.0), "algorithm=optimal_token_baseline"]
    # Probabilities of 1/2 and 1/4 here, 1/4 and 1/16 in the engine: weights of 2 and, capped, 3.
    engine, squares = flat([0.25, 0.0625]).log(), flat([0.5, 0.75])
    batch = batch_of([[1, 1]], logprobs=flat([0.5, 0.25]).log(), rollout_logprobs=engine, sum_pi_squared=squares)
    for given, expected in ((options, [[2.0, 11.25]]), (options[2:], [[0.5, 1.25]])):
        torch.testing.assert_close(estimation(*given)._variances(batch), torch.tensor(expected))
    assert estimation()._variances(batch) is None


def test_pf_ppo_draws_by_the_rewards_the_seed_and_the_step():
    options = ["algorithm=gae", "algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_min"]
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25] * 50)
    batch = batch_of([[1]] * 200, scores_with_phi=rewards).fill(learned=torch.ones(200, dtype=torch.bool))

    def drawn(seed: int, step: int) -> torch.Tensor:
        return estimation(*options, f"seed={seed}").resampled_rows(batch, step)

    first = drawn(5, 2)
    assert torch.equal(first, drawn(5, 2)) and set((first % 4).tolist()) == {0, 1}
    assert not torch.equal(drawn(5, 3), first) and not torch.equal(drawn(6, 2), first)
    # Filler, here the responses with rewards of 1 and 0, is never drawn; the extremes are those of the others.
    batch.fill(learned=(rewards > 0) & (rewards < 1))
    assert len(drawn(5, 2)) == 100 and set((drawn(5, 2) % 4).tolist()) == {2, 3}
    batch.fill(learned=torch.zeros(200, dtype=torch.bool))
    assert drawn(5, 2).tolist() == list(range(200))


SCORE, ON_POLICY, UPDATE = "score", "update on policy", "update"
MEASURED = "calculator.metric_indices_add=[avg_logits_entropy]"
BY_TWO = "actor.ppo_mini_batch_size=2"


@pytest.mark.parametrize(
    ("options", "replays", "learned", "calls"),
    [
        (BY_TWO, False, [1, 1, 1], [(SCORE, [2]), (ON_POLICY, [0, 1]), (UPDATE, [-2.0])]),
        # Later epochs have ratios to what the first update says.
        (
            "actor.ppo_mini_batch_size=3 actor.ppo_epochs=2",
            *(False, [1, 1, 1], [(ON_POLICY, [0, 1, 2]), (UPDATE, [0.0, -1.0, -2.0])]),
        ),
        (
            " ".join([BY_TWO, *weighted(rollout_is="token", rollout_is_batch_normalize=True)]),
            *(False, [1, 1, 1], [(SCORE, [0, 1, 2]), (UPDATE, [0.0, -1.0]), (UPDATE, [-2.0])]),
        ),
        # Nothing can be learned from the first mini-batch, whose update is left out.
        (BY_TWO, False, [0, 0, 1], [(SCORE, [2]), (SCORE, [0, 1]), (UPDATE, [-2.0])]),
        # The last row was sampled by an earlier policy, and its ratio is to that: here all were sampled at -1.
        (BY_TWO, True, [1, 1, 1], [(SCORE, [0, 1, 2]), (UPDATE, [0.0, -1.0]), (UPDATE, [-1.0])]),
        # With weights, the policy's own are the old ones of every row.
        (
            " ".join([BY_TWO, *weighted(rollout_is="token")]),
            *(True, [1, 1, 1], [(SCORE, [0, 1, 2]), (UPDATE, [0.0, -1.0]), (UPDATE, [-2.0])]),
        ),
        # The policy does not learn yet.
        ("algorithm=gae trainer.critic_warmup=1", False, [1, 1, 1], [(SCORE, [0, 1, 2])]),
    ],
)
def test_first_mini_batch_is_scored_as_it_is_learned(options, replays, learned, calls):
    trainer, batch = trainer_of([options], replays), three(replays)
    trainer._compute_outputs(batch)
    batch.fill(learn_mask=torch.tensor(learned).bool().repeat_interleave(2))
    trainer._update_actor(batch, None)
    assert trainer.policy.calls == calls
    assert torch.equal(batch.logprobs, -batch.tokens.float()) and torch.equal(batch.entropy, batch.tokens.float())


@pytest.mark.parametrize("shuffles", [True, False])
def test_controls_shuffle_ranks_once_wherever_measured(shuffles: bool):
    """The engine measures one rank metric, and the policy a metric of tokens; both become those of other responses."""
    trainer = trainer_of([f"calculator.shuffle_within_groups={shuffles}".lower(), "seed=5", MEASURED])
    rows = torch.arange(8)
    batch = batch_of([[1, 1]] * 8, group=rows // 4, step=torch.ones(8), rollout_logprobs=-torch.ones(16))
    batch.fill(**rank_columns({"m": rows.double()}, mean_states=rows[:, None, None].float()))
    expected = batch[rows]
    if shuffles:
        shuffle_within_groups(expected, 5, 1)
    trainer.ahead, trainer.prompts, trainer.method.begin_step = None, None, lambda step: None
    sampled = SampledStep(batch, {}, torch.zeros(0))
    trainer.scheduler = SimpleNamespace(sample=lambda *_: sampled)
    assert trainer._sample() is sampled and torch.equal(batch.mean_states, expected.mean_states)
    trainer._compute_outputs(batch)
    # Every token of response i has the entropy i.
    ranks = expected.rank_metrics["m"]
    assert torch.equal(batch.rank_metrics["m"], ranks) and torch.equal(batch.mean_states, expected.mean_states)
    assert batch.rank_metrics["avg_logits_entropy"].flatten().tolist() == ranks.flatten().tolist()
    assert (ranks.flatten().tolist() != rows.tolist()) == shuffles and torch.equal(batch.entropy, batch.tokens.float())


def test_bypass_mode_takes_ratios_to_the_engine():
    trainer, batch = trainer_of(["actor.bypass_mode=true"]), three()
    trainer._compute_outputs(batch)
    assert "logprobs" not in batch and batch.old_logprobs is batch.rollout_logprobs and "ref_logprobs" not in batch
    # The tokens of the batch are counted although no model reads them.
    assert {name: work.tokens for name, work in trainer.timer.take_step().work.items()} == {"batch": 6.0}


def test_updates_take_the_rows_that_were_drawn():
    trainer = trainer_of(["actor.ppo_mini_batch_size=3", "actor.bypass_mode=true"])
    batch = batch_of([[1, 1]] * 4, old_logprobs=torch.arange(4.0).repeat_interleave(2), advantages=torch.ones(8))
    for rows in (torch.tensor([3, 3, 0, 1]), None):
        trainer._update_actor(batch, rows)
    # The last mini-batch is smaller.
    assert [old for _, old in trainer.policy.calls] == [[3, 3, 0], [1], [0, 1, 2], [3]]
    assert trainer.metrics["a"] == 3.5 and trainer.metrics["actor/skipped_updates"] == 0.0


def test_policy_learns_after_the_warm_up_with_normalized_weights():
    weights = weighted(rollout_is="token", rollout_is_batch_normalize=True, rollout_is_threshold=8)
    trainer = trainer_of(["algorithm=gae", "trainer.critic_warmup=2", *weights])
    # Weights 2 and 4, whose mean is 3; the second token is rejected, but counts in the mean.
    columns = {"logprobs": torch.zeros(2), "old_logprobs": torch.zeros(2), "advantages": flat([6.0, 6.0])}
    batch = batch_of([[1, 0]], rollout_logprobs=-flat([2.0, 4.0]).log(), **columns)
    for trainer.step in (1, 2, 3):
        trainer._update_actor(batch, None)
    assert trainer.policy.advantages == [[2.0, 2.0]] and batch.advantages.tolist() == [6.0, 6.0]
    assert trainer.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 3.0


class Part:
    """A part of a trainer whose state is a value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state(self) -> object:
        return self.value

    def load_state(self, value: object) -> None:
        self.value = value

    state_dict, load_state_dict = state, load_state


def trainer_with(states: dict[str, object]) -> RayPPOTrainer:
    """A trainer whose parts have these states; it notes what its workers were asked."""
    trainer = trainer_of([])
    trainer.asked = []
    trainer.workers = SimpleNamespace(run=lambda *call: trainer.asked.append(call))
    trainer.policy.sync_weights = lambda step: trainer.asked.append(("sync", step))
    trainer.timer.phase = lambda name: nullcontext()
    trainer.timer.totals, trainer.validations, trainer.best_by = {"gen": states["seconds"]}, {}, None
    trainer.digests = {"tokenizer": "ab"}
    trainer.ahead = None
    trainer.method, trainer.reward_manager, trainer.scheduler = (
        Part(states[name]) for name in ("method", "reward_manager", "sampler")
    )
    trainer.advantages = SimpleNamespace(kl_control=Part(states["kl_control"]))
    trainer.loader = Part(states["loader"])
    trainer.loader.dataset = range(5)
    return trainer


def test_restored_trainer_has_the_state_of_the_saved_one(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_trainer, "prompt_order", lambda *_: "the same")
    names = ("seconds", "method", "reward_manager", "sampler", "kl_control", "loader")
    saved, other = (trainer_with({name: number for number, name in enumerate(names, first)}) for first in (1, 11))
    saved.step = 7
    state = json.loads(json.dumps(saved._state()))
    assert other._state() != state
    other.restore(Resumption(tmp_path, 7, state))
    assert other._state() == state
    # Engines get the weights that were loaded.
    assert other.asked == [("load", tmp_path, 7), ("sync", 7)]


@pytest.mark.parametrize(
    ("velocity", "acceleration", "note"),
    [
        (0.0, 0.0, "note: ERV and ERA are 0: no response has two prefixes, calculator.diff_stride=40 tokens apart"),
        (1.5, 0.0, "note: ERA is 0: no response has three prefixes, calculator.diff_stride=40 tokens apart"),
        (1.5, -0.25, ""),
        (None, None, ""),
    ],
)
def test_velocity_without_prefixes_is_noted(velocity, acceleration, note):
    name = "cal/overall/layer_1/Effective Rank diff"
    metrics = {} if velocity is None else {f"val/{name}/mean": velocity, f"val/{name} 2/mean": acceleration}
    assert prefix_note(metrics, 40) == note


def test_step_without_informative_groups_is_noted():
    assert step_note({"train/filler_groups": 48.0}, 48) == "no informative group, no update"
    assert [step_note(metrics, 48) for metrics in ({"train/filler_groups": 47.0}, {})] == ["", ""]
