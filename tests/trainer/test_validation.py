import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import changed, rank_columns

from tests.kit import ppo_config
from verl.batch import Batch
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.trainer.validation import Validator
from verl.verifiers.verdict import Verdict

CONFIG = ppo_config()


def prompts(first_uid: int, sources: list[str]) -> list[PromptRecord]:
    return [PromptRecord(first_uid + i, [5], source, "", {}, [], False) for i, source in enumerate(sources)]


VERDICTS = {0: [True, False], 1: [False, False], 2: [True, True], 3: [True, False]}
"""Correctness of the two responses of each uid."""


class ScriptedScheduler:
    """Answers each prompt with two responses of uid + 1 tokens; their effective rank is the uid."""

    def __init__(self, config: PPOConfig, measures: bool = True) -> None:
        self.measures = measures
        self.config = changed(config, rollout={"val_kwargs": {"n": 2, "temperature": 1.0}})

    def generate(self, records: list[PromptRecord], sampling: object, step: int) -> tuple[Batch, SimpleNamespace]:
        group = torch.tensor([record.uid for record in records]).repeat_interleave(2)
        num, lengths = len(group), (group + 1).clamp(max=4)
        metrics = measured(group) if self.measures else {}
        batch = Batch(torch.ones_like(group), lengths, 4, group=group, **metrics)
        tokens = torch.ones(int(lengths.sum()) + num, dtype=torch.int64)
        batch.fill(tokens=tokens, truncated=torch.zeros(num, dtype=torch.bool))
        batch.fill(records=[record for record in records for _ in range(2)])
        return batch, SimpleNamespace(finish=lambda: self.verify(batch))

    def verify(self, batch: Batch) -> None:
        uids = dict.fromkeys(record.uid for record in batch.records)
        correct = [verdict for uid in uids for verdict in VERDICTS[uid]]
        verdicts = [
            Verdict(v, True, "exact" if v else "different", score=2.0 * v - 1, extras={"right": v}) for v in correct
        ]
        scores = torch.tensor([2.0 * v - 1 for v in correct])
        batch.fill(verdicts=verdicts, scores=scores, correct=torch.tensor(correct))


def measured(group_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    states = group_ids[:, None, None] * torch.eye(2)[group_ids % 2][:, None]
    return rank_columns({"Effective Rank": group_ids.double()}, mean_states=states)


def validate(
    batches: list[list[PromptRecord]],
    manager: RewardManager | None = None,
    calculator: RepresentationMetricsCalculator | None = None,
) -> dict[str, float]:
    sampler = ScriptedScheduler(CONFIG)
    manager = manager or RewardManager(CONFIG.reward_manager)
    metrics, batch = Validator(batches, sampler, None, calculator, manager).validate()
    assert batch.records[::2] == [record for records in batches for record in records]
    return metrics


def test_all_batches_are_described_together_and_by_source():
    metrics = validate([prompts(0, ["gsm8k", "math", "gsm8k"]), prompts(3, ["math"])])
    expected = {
        **{"pass@1": 0.5, "gsm8k/pass@1": 0.75, "math/pass@1": 0.25, "score/mean": 0.0},
        **{"verifier/exact": 4.0, "verifier/different": 4.0, "cal/num_correct": 4.0, "cal/num_incorrect": 4.0},
        **{"response_length/mean": 2.5, "response_length/max": 4.0},
        "response_length/correct/mean": (1 + 3 + 3 + 4) / 4,
        "response_length/incorrect/mean": (1 + 2 + 2 + 4) / 4,
        "cal/overall/layer_1/Effective Rank/mean": 1.5,
        "cal/correct/layer_1/Effective Rank/mean": (0 + 2 + 2 + 3) / 4,
        "cal/incorrect/layer_1/Effective Rank/mean": (0 + 1 + 1 + 3) / 4,
        **{"reward_extra/right/mean": 0.5, "reward_extra/right/count": 8.0, "gsm8k/reward_extra/right/mean": 0.75},
        # Of gsm8k the uids 0 and 2, of math 1 and 3.
        **{"gsm8k/response_length/correct/mean": (1 + 3 + 3) / 3, "gsm8k/response_length/incorrect/mean": 1.0},
        "math/cal/incorrect/layer_1/Effective Rank/mean": (1 + 1 + 3) / 3,
    }
    assert {name: metrics[f"val/{name}"] for name in expected} == expected
    # Two responses to each prompt, of which uid 2 has two and uids 0 and 3 have one correct; scores are 1 and -1.
    assert [metrics[f"val/{source}pass@2"] for source in ("", "gsm8k/", "math/")] == [0.75, 1.0, 0.5]
    assert [metrics[f"val/{source}best@2/mean"] for source in ("", "gsm8k/", "math/")] == [0.5, 1.0, 0.0]
    assert [metrics[f"val/{source}worst@2/mean"] for source in ("", "gsm8k/", "math/")] == [-0.5, 0.0, -1.0]
    # Without the auxiliary reward, scores are logged alone.
    assert "val/rewards/mean" not in metrics


def test_phi_enters_the_rewards_of_all_and_of_each_source():
    # Of gsm8k the uids 0 and 2 with effective ranks 0 and 2, of math 1.
    batches = [prompts(0, ["gsm8k", "math", "gsm8k"])]
    # Against a baseline of 1 the deviations are -1, 0 and 1, so Phi is -p, 0 and p.
    weights = {"indicator_names": ["Effective Rank"], "w_explore": [1.0], "w_exploit": [1.0]}
    signal = {"hypothesis_type": "FixTwo", "aux_reward_global_weight": 1.0, "aux_fix": True}
    manager = RewardManager(dataclasses.replace(CONFIG.reward_manager, add_reward=True, **weights, **signal))
    manager.load_state_dict({"baselines": {"1": {"Effective Rank": 1.0}}, "ema_score": 0.0})
    before = manager.state_dict()
    metrics = validate(batches, manager=manager)
    assert manager.state_dict() == before
    found = [metrics[f"val/{source}rewards/mean"] for source in ("", "gsm8k/", "math/")]
    assert found == pytest.approx([0.0, 0.5, -1.0], abs=1e-12)
    # A single source has no metrics of its own: they would be those of all responses.
    lone = validate([prompts(2, ["math"])], manager=manager)
    assert lone["val/rewards/mean"] == pytest.approx(1 + math.tanh(1), rel=1e-6)
    assert not [name for name in lone if "math" in name]


def test_mean_states_are_measured_together_and_by_source(make_calculator):
    calculator = make_calculator(compute_cumulative_global_metrics=False)
    name = "cal/layer_1/global/Effective Rank"
    # States 0, (0, 1), (2, 0) and (0, 3): of uids 1 and 3 alone they lie on a line.
    metrics = validate([prompts(0, ["gsm8k", "math", "gsm8k", "math"])], calculator=calculator)
    assert metrics[f"val/math/{name}"] == pytest.approx(1.0, abs=1e-6)
    assert metrics[f"val/{name}"] > 1.5
    lone = validate([prompts(1, ["math"]), prompts(3, ["math"])], calculator=calculator)
    assert lone[f"val/{name}"] == pytest.approx(1.0, abs=1e-6)


class RecordingPolicy:
    """A policy that remembers what it was asked for."""

    def __init__(self, measures: bool) -> None:
        self.measures = measures
        self.calls: list[str | int] = []

    def finish_generation(self) -> None:
        self.calls.append("finish_generation")

    def compute_logprobs(self, batch: Batch) -> Batch:
        self.calls.append(len(batch))
        # A response to the prompt of uid u has tokens of log-probability u.
        logprobs = batch.group.repeat_interleave(batch.response_lengths).float()
        metrics = measured(batch.group) if self.measures else {}
        return batch.columns().fill(logprobs=logprobs, entropy=logprobs, **metrics)


def test_policy_measures_where_the_engine_does_not():
    sampler = ScriptedScheduler(changed(CONFIG, calculator={"source": "actor"}), measures=False)
    policy = RecordingPolicy(measures=True)
    batches = [prompts(0, ["math"] * 3), prompts(3, ["math"])]
    metrics, _ = Validator(batches, sampler, policy, None, RewardManager(CONFIG.reward_manager)).validate()
    assert policy.calls == ["finish_generation", 6, "finish_generation", 2]
    assert metrics["val/cal/overall/layer_1/Effective Rank/mean"] == 1.5


@pytest.mark.parametrize(("names", "passes"), [(["avg_response_entropy"], 0), (["avg_log_probs"], 1)])
def test_policy_is_asked_where_a_metric_of_tokens_needs_it(names, passes):
    config = changed(CONFIG, calculator={"metric_indices_add": names})
    sampler = ScriptedScheduler(config)
    policy = RecordingPolicy(measures=False)
    manager = RewardManager(CONFIG.reward_manager)
    metrics, _ = Validator([prompts(0, ["math"] * 4)], sampler, policy, None, manager).validate()
    assert policy.calls == ["finish_generation", 8] * passes
    assert metrics["val/cal/overall/layer_1/Effective Rank/mean"] == 1.5
    # Every token is the same.
    expected = {"avg_response_entropy": 0.0, "avg_log_probs": 1.5}
    assert metrics[f"val/cal/overall/layer_1/{names[0]}/mean"] == pytest.approx(expected[names[0]])
    disabled = changed(config, calculator={"enable": False}, reward_manager={"add_adv": False})
    sampler = ScriptedScheduler(disabled, measures=False)
    assert "val/pass@1" in Validator([prompts(0, ["math"])], sampler, None, None, manager).validate()[0]
