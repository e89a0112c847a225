from types import SimpleNamespace

import pytest
import torch

from tests.kit import ppo_config
from tests.trainer.ppo.trainers import batch_of, estimation, flat, three, trainer_of
from verl.batch import ENVIRONMENT, POLICY
from verl.rank.reward_manager import RewardManager
from verl.trainer.ppo.advantages import AdvantageEstimation

TAUGHT = ["teacher.model.path=data/tiny_model", "teacher.coef=0.5", "reward_manager=unshaped"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # log q - log p is 2, -4 and 6; the token between is the environment's.
        (["teacher.use_task_rewards=false"], [1.0, 0.0, -2.0, 3.0]),
        (["teacher.loss_max_clamp=3"], [1 + 0.5, 0.0, -1.5 + 0.5, 1.5 - 0.5]),
        (["teacher.loss=k3"], [0.5, 0.0, 0.5, -0.5]),
    ],
)
def test_teacher_is_added_to_the_advantages(options, expected):
    written = torch.tensor([POLICY, ENVIRONMENT, POLICY, POLICY], dtype=torch.uint8)
    batch = batch_of([[1] * 3, [1]], source=written, group=torch.tensor([0, 0]), scores=flat([1.0, 0.0]))
    batch.fill(learned=torch.tensor([True, True]))
    batch.fill(old_logprobs=flat([-3.0, -9.0, -1.0, -8.0]), teacher_logprobs=flat([-1.0, -1.0, -5.0, -2.0]))
    found = estimation(*TAUGHT, *options, norm_adv_by_std_in_grpo=False)
    found.fill_learn_mask(batch)
    found.estimate(batch, torch.tensor([1.0, 0.0], dtype=torch.float64), None)
    assert batch.advantages.tolist() == expected


@pytest.mark.parametrize(("loss", "in_update"), [("null", False), ("k3", True), ("reverse_kl", True)])
def test_teacher_in_the_advantage_needs_old_logprobs(loss: str, in_update: bool):
    assert ppo_config(*TAUGHT, f"teacher.loss={loss}").first_update_scores is in_update


@pytest.mark.parametrize("reads_verdicts", [True, False])
def test_teachers_prompts_reach_the_update(reads_verdicts: bool):
    trainer = trainer_of(["experiment=sdpo", "actor.ppo_mini_batch_size=3"])
    prompts, batch = [[5, 6], [7], None], three().fill(records=[SimpleNamespace(input_ids=[4])] * 3)
    order = []
    trainer.teaching.prompts = SimpleNamespace(read_verdicts=reads_verdicts, of_batch=lambda rows: prompts)
    trainer._compute_outputs(batch)
    assert ("teacher_prompts" in batch) != reads_verdicts
    trainer.teaching.score(batch)
    update = trainer.policy.run_scoring_update
    trainer.policy.run_scoring_update = lambda name, mini, *sizes: (
        order.append(mini.teacher_prompts) or update(name, mini, *sizes)
    )
    trainer._update_actor(batch.fill(learn_mask=torch.ones(6, dtype=torch.bool)), None)
    # A response without a teacher's prompt keeps the policy's, and learns nothing from it.
    assert order.pop() == [[5, 6], [7], [4]]
    assert not reads_verdicts or batch.taught.tolist() == [True, True, False]
    sampled = SimpleNamespace(collect_verdicts=lambda timer: order.append("verdicts"))
    trainer.teaching.score = lambda rows: order.append("teacher")
    with pytest.raises(AttributeError, match="scheduler"):  # there is none to log for
        trainer._collect_verdicts(sampled, batch)
    assert order == ["verdicts", "teacher"][: 1 + reads_verdicts]


@pytest.mark.parametrize("loss", ["reverse_kl", "null"])
def test_response_has_the_teacher_of_its_source(loss: str):
    options = ['teacher.by_source=["a=/m","b=/n"]', "reward_manager=unshaped", f"teacher.loss={loss}"]
    trainer, asked = trainer_of(options), []
    records = [SimpleNamespace(input_ids=[4], data_source=source) for source in "bab"]
    batch = three().fill(records=records)
    trainer.teaching.policy = SimpleNamespace(
        map_rows=lambda _, rows: asked.append(rows.teacher.tolist()) or rows.columns().fill(logprobs=torch.zeros(6))
    )
    trainer.teaching.score(batch)
    in_update = loss == "reverse_kl"
    assert asked == [[1, 0, 1]] * (not in_update) and ("teacher_logprobs" in batch) != in_update
    assert not in_update or batch.teacher.tolist() == [1, 0, 1]


def test_moving_average_follows_learned_steps():
    trainer = trainer_of(["experiment=sdpo", "teacher.update_freq=2", "actor.bypass_mode=true"])
    called = []
    trainer.workers.run = lambda *call: called.append((trainer.step, *call))
    for trainer.step in (1, 2, 3, 4):
        batch = three().fill(learn_mask=torch.ones(6, dtype=torch.bool))
        trainer._compute_outputs(batch)
        trainer._update_actor(batch, None)
    assert called == [(2, "update_teacher", 0.05), (4, "update_teacher", 0.05)]


def test_nothing_is_learned_without_the_teachers_word():
    batch = three().fill(learned=torch.ones(3, dtype=torch.bool), taught=torch.tensor([True, False, True]))
    for rewards, expected in ((False, [1, 1, 0, 0, 1, 1]), (True, [1] * 6)):
        options = ["experiment=sdpo", f"teacher.use_task_rewards={rewards}".lower()]
        config = ppo_config("rollout.n=1", *options)
        AdvantageEstimation(config, RewardManager(config.reward_manager)).fill_learn_mask(batch)
        assert batch.learn_mask.int().tolist() == expected
    batch.fill(old_logprobs=torch.zeros(6), teacher_logprobs=torch.ones(6))
    advantages = AdvantageEstimation(config, RewardManager(config.reward_manager))._teacher_advantages(batch)
    assert advantages.flatten().tolist() == [1, 1, 0, 0, 1, 1]
