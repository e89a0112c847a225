import torch
from tensordict import TensorDict

from verl.data.prompts import PromptRecord, PromptSample
from verl.protocol import PromptBatch, RolloutBatch
from verl.trainer.validation import validate


def prompts(first_uid: int, sources: list[str]) -> PromptSample:
    uids = range(first_uid, first_uid + len(sources))
    records = [PromptRecord(uid, [5], source, "", {}, []) for uid, source in zip(uids, sources, strict=True)]
    ones = torch.ones(len(records), 1, dtype=torch.int64)
    return PromptSample(records, PromptBatch(ones, ones, torch.tensor(list(uids)), batch_size=[len(records)]))


def generate(batch: PromptSample) -> RolloutBatch:
    """Two responses a prompt, of uid + 1 tokens; their effective rank is the uid."""
    group_ids = batch.tokens.uid.repeat_interleave(2)
    num = len(group_ids)
    response_mask = (torch.arange(4) <= group_ids[:, None]).long()
    return RolloutBatch(
        input_ids=torch.ones(num, 5, dtype=torch.int64),
        attention_mask=torch.cat([torch.ones(num, 1, dtype=torch.int64), response_mask], dim=1),
        response_mask=response_mask,
        rollout_logprobs=torch.zeros(num, 4),
        group_ids=group_ids,
        truncated=torch.zeros(num, dtype=torch.bool),
        rank_metrics=TensorDict({"Effective Rank": group_ids.double().unsqueeze(1)}, batch_size=[num]),
        mean_states=torch.zeros(num, 1, 3),
        batch_size=[num],
    )


VERDICTS = {0: [True, False], 1: [False, False], 2: [True, True], 3: [True, False]}
"""Correctness of the two responses of each uid."""


def score(batch: PromptSample, rollout: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    correct = torch.tensor([verdict for record in batch.records for verdict in VERDICTS[record.uid]])
    num_correct = int(correct.sum())
    return correct.float() * 2 - 1, correct, {"exact": num_correct, "different": len(correct) - num_correct}


def dataset(rollout: RolloutBatch) -> dict[str, float]:
    return {"responses": float(len(rollout))}


def test_pass_rates_overall_and_by_source():
    batches = [prompts(0, ["gsm8k", "math", "gsm8k"]), prompts(3, ["math"])]
    metrics = validate(batches, generate, score, dataset)
    assert metrics["val/pass@1"] == 0.5
    assert metrics["val/gsm8k/pass@1"] == 0.75
    assert metrics["val/math/pass@1"] == 0.25
    assert metrics["val/score/mean"] == 0.0
    assert (metrics["val/verifier/exact"], metrics["val/verifier/different"]) == (4.0, 4.0)


def test_lengths_and_rank_metrics_cover_all_batches():
    metrics = validate([prompts(0, ["math", "math", "math"]), prompts(3, ["math"])], generate, score, dataset)
    assert metrics["val/response_length/mean"] == 2.5
    assert metrics["val/responses"] == 8.0
    assert metrics["val/response_length/max"] == 4.0
    assert metrics["val/cal/overall/layer_1/Effective Rank/mean"] == 1.5
    assert metrics["val/cal/correct/layer_1/Effective Rank/mean"] == (0 + 2 + 2 + 3) / 4
    assert metrics["val/cal/incorrect/layer_1/Effective Rank/mean"] == (0 + 1 + 1 + 3) / 4


def test_batches_weigh_by_their_size():
    # Batches of 1 and 3 prompts with rates 1 and 1/3.
    verdicts = {0: [True, True], 1: [True, False], 2: [False, False], 3: [True, False]}

    def score_uneven(batch: PromptSample, rollout: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
        correct = torch.tensor([verdict for record in batch.records for verdict in verdicts[record.uid]])
        return correct.float(), correct, {}

    metrics = validate([prompts(0, ["math"]), prompts(1, ["math"] * 3)], generate, score_uneven, dataset)
    assert metrics["val/pass@1"] == 0.5


def test_each_source_by_both_namings_of_the_release():
    # Of gsm8k the uids 0 and 2 with effective ranks 0 and 2, of math 1 (never correct); lengths are uid + 1.
    batches = [prompts(0, ["gsm8k", "math", "gsm8k"])]
    metrics = validate(batches, generate, score, dataset, lambda rollout: rollout.group_ids / 4)
    expected = {
        "test_score": (0.5 + 0.25, -1 + 0.25),  # of uid 2, Phi is 1/2
        "test_score_0": (0.5, -1.0),
        "test_correctness": (0.75, 0.0),
        "test_overall_len": (2.0, 2.0),
        "test_correct_len": ((1 + 3 + 3) / 3, None),
        "test_incorrect_len": (1.0, 2.0),
    }
    for name, (gsm8k, math) in expected.items():
        for source, value in (("gsm8k", gsm8k), ("math", math)):
            assert metrics.get(f"val/{source}/{name}") == metrics.get(f"val/{name}/{source}") == value, name
    ranks = {"overall": (1.0, 1.0), "correct": (4 / 3, None), "incorrect": (0.0, 1.0)}
    for group, (gsm8k, math) in ranks.items():
        for source, value in (("gsm8k", gsm8k), ("math", math)):
            assert metrics.get(f"val/{source}/layer_1/Effective Rank/{group}") == value
            assert metrics.get(f"val/cal_{group}/{source}/layer_1/Effective Rank") == value
    assert not [name for name in metrics if "nonfinite" in name and ("math" in name or "gsm8k" in name)]
    assert (metrics["val/gsm8k/responses"], metrics["val/math/responses"]) == (4.0, 2.0)


def test_without_auxiliary_reward_both_scores_are_the_verifiers():
    metrics = validate([prompts(2, ["math"])], generate, score, dataset)
    assert metrics["val/math/test_score"] == metrics["val/math/test_score_0"] == metrics["val/score/mean"] == 1.0


def test_scalars_of_a_lone_source_are_computed_once():
    calls = []

    def scalars(rollout: RolloutBatch) -> dict[str, float]:
        calls.append(len(rollout))
        return {"cal/layer_1/global/Effective Rank": 2.5}

    metrics = validate([prompts(0, ["math"]), prompts(1, ["math"])], generate, score, scalars)
    assert calls == [4]
    assert metrics["val/cal/layer_1/global/Effective Rank"] == 2.5
    assert metrics["val/math/layer_1/global/Effective Rank"] == 2.5


def test_lengths_are_split_by_correctness():
    metrics = validate([prompts(0, ["math", "math"])], generate, score, dataset)
    assert metrics["val/response_length/correct/mean"] == 1.0
    assert metrics["val/response_length/incorrect/mean"] == (1 + 2 + 2) / 3
    assert (metrics["val/cal/num_correct"], metrics["val/cal/accuracy"]) == (1.0, 0.25)
