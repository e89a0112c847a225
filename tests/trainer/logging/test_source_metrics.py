import torch
from conftest import rank_metrics

from verl.batch import Batch
from verl.rewards.score import Verdict, score_of
from verl.trainer.logging.source_metrics import logged_sources, metrics_by_source, response_figures, verdict_figures
from verl.trainer.ppo.verdicts import verdict_metrics


def test_only_several_sources_have_figures_of_their_own():
    assert logged_sources(["a", "a"]) == [] and logged_sources([]) == []
    assert logged_sources(["a", "b", "b"]) == ["b", "a"]
    many = [f"source {i}" for i in range(1000)] + ["common", "common"]
    assert logged_sources(many) == ["common", *(f"source {i}" for i in range(15))]


def test_rows_of_each_source():
    sources = ["b", "a", "b", "c"]
    metrics = metrics_by_source(
        sources, ["a", "b", "absent"], lambda rows: {"rows": float((rows * 2 ** torch.arange(4)).sum())}
    )
    assert metrics == {"a/rows": 2.0, "b/rows": 5.0}


def test_figures_of_responses():
    ranks = rank_metrics({"Effective Rank": torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)})
    correct, truncated = torch.tensor([True, False, True]), torch.tensor([False, True, False])
    batch = Batch(
        torch.full((3,), 2), torch.tensor([2, 3, 1]), rank_metrics=ranks, correct=correct, truncated=truncated
    )
    figures = verdict_figures(torch.tensor([1.0, -1.0, 0.5]), correct, []) | response_figures(batch, 4)
    expected = {
        "pass@1": 2 / 3,
        "score/mean": 0.5 / 3,
        "response_length/mean": 2.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length/incorrect/mean": 3.0,
        "cal/overall/layer_1/Effective Rank/mean": 3.0,
        "cal/correct/layer_1/Effective Rank/mean": 3.5,
        "cal/num_correct": 2.0,
    }
    assert {name: figures[name] for name in expected} == expected


def test_what_verdicts_say():
    extras = [{"format": 1.0, "pred": "5"}, {"format": 0.0}, {"format": 0.5}, {}]
    corrects = [True, False, True, True]
    results = [
        score_of(Verdict(correct, True, "custom", score=float(correct), extras=extra), "mix")
        for correct, extra in zip(corrects, extras, strict=True)
    ]
    metrics = verdict_metrics(results, torch.tensor([0, 0, 1, 1]), ["a", "a", "b", "b"], ["a", "b"])
    assert metrics == {
        **{"score/mean": 0.75, "train/pass@1": 0.75, "train/groups_without_variance": 0.5, "verifier/custom": 4.0},
        **{"train/reward_extra/format/mean": 0.5, "train/reward_extra/format/count": 3.0},
        **{"train/a/pass@1": 0.5, "train/a/score/mean": 0.5},
        **{"train/a/reward_extra/format/mean": 0.5, "train/a/reward_extra/format/count": 2.0},
        **{"train/b/pass@1": 1.0, "train/b/score/mean": 1.0},
        **{"train/b/reward_extra/format/mean": 0.5, "train/b/reward_extra/format/count": 1.0},
    }
    assert not [name for name in verdict_metrics(results, torch.zeros(4), ["a"] * 4, []) if "/a/" in name]
