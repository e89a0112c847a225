"""The rows that a run keeps of its responses, and their way into trackers."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
import wandb
from conftest import rank_columns
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl.batch import Batch
from verl.checkpoint.attempts import Attempt
from verl.config.trainer import SamplesConfig
from verl.data.prompt_record import PromptRecord
from verl.run.display import RunDisplay
from verl.run.samples import SampleStore
from verl.run.tracking import Tracker
from verl.trainer.ppo.samples import SampleLogger, is_kept
from verl.verifiers.verdict import Verdict

HOSTILE = "\x1b[31m<script>alert(1)</script>|\n\ud800**b** \\boxed{8}"


def score(answer: str, correct: bool, **extra: float) -> Verdict:
    return Verdict(correct, True, "exact" if correct else "different", answer, float(correct), extra)


def batch_of(tokenizer, lengths: list[int], uids: tuple[int, int] = (5, 9)) -> Batch:
    """2 prompts and 2 responses to each, of these lengths, in 3 columns; sampled and verified."""
    records = [
        PromptRecord(uid, tokenizer(text).input_ids, "arithmetic", truth, {}, [], False)
        for uid, text, truth in zip(uids, ("3+4=", "4+4="), ("7", ["8", "eight"]), strict=True)
        for _ in range(2)
    ]
    ranks = rank_columns({"Effective Rank": torch.tensor([1.0, 2.0, math.nan, 4.0]).double()})
    batch = Batch.of([record.input_ids for record in records], [[1] * length for length in lengths])
    batch.width = 3
    return batch.fill(
        records=records,
        texts=["7", "8", HOSTILE, ""],
        verdicts=[score("7", True), score("8", False), score("8", True, speed=math.inf), score("", False)],
        rollout_logprobs=-torch.ones(sum(lengths)),
        group=torch.tensor([record.uid for record in records]),
        truncated=torch.tensor([False, True, False, False]),
        **ranks,
    )


def learned(batch: Batch) -> Batch:
    """The batch as it is after a step."""
    ramp = torch.tensor([1.0, 2.0, 3.0]).expand(4, 3)
    batch.fill(logprobs=-ramp, old_logprobs=-ramp, entropy=ramp / 2, advantages=ramp * 10, unshaped_advantages=ramp)
    rewards, phi = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.1, 0.0, -0.1, 0.2]], dtype=torch.float64)
    return batch.fill(
        learn_mask=batch.mask & torch.tensor([True, False, True, True])[:, None], rewards=rewards, phi=phi
    )


def sample_logger(
    root: Path, tokenizer, shown: int = 0, fraction: float = 1.0, tokens: bool = False, loggers: tuple[str, ...] = ()
) -> SampleLogger:
    store = SampleStore(root, SamplesConfig(1, fraction, 1.0, tokens), Attempt.claim(root), print)
    tracker = Tracker(root, loggers, "project", "experiment", SamplesConfig(1, fraction, 1.0, tokens))
    return SampleLogger(store, shown, tokenizer, tracker, RunDisplay("run", 2, {}))


def kept(root: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(root / "samples" / name)


def test_training_step_keeps_a_row_for_each_response(tmp_path: Path, tiny_tokenizer):
    batch = batch_of(tiny_tokenizer, [1, 3, 2, 3])
    samples = sample_logger(tmp_path, tiny_tokenizer)
    with samples.store:
        samples.log("train", 7, learned(batch))
    rows = kept(tmp_path, "train_000007.parquet")
    assert rows.drop(columns=["prompt", "response", "prompt_tokens", "reward_extra_info"]).to_dict("list") == {
        "step": [7] * 4,
        "split": ["train"] * 4,
        "uid": [5, 5, 9, 9],
        "group": [0, 0, 1, 1],
        "sample": [0, 1, 0, 1],
        "data_source": ["arithmetic"] * 4,
        "ground_truth": ['"7"', '"7"', '["8", "eight"]', '["8", "eight"]'],
        "answer": ["7", "8", "8", ""],
        "correct": [True, False, True, False],
        "reason": ["exact", "different", "exact", "different"],
        "score": [1.0, 0.0, 1.0, 0.0],
        "num_tokens": [1, 3, 2, 3],
        "truncated": [False, True, False, False],
        "logprob": [-1.0, -2.0, -1.5, -2.0],
        "entropy": [0.5, 1.0, 0.75, 1.0],
        "reward": [1.0, 0.0, 1.0, 0.0],
        "advantage_0": [1.0, 2.0, 1.5, 2.0],
        "advantage": [10.0, 20.0, 15.0, 20.0],
        "learned": [True, False, True, True],
        "phi": [0.1, 0.0, -0.1, 0.2],
        "metric/layer_1/Effective Rank": [1.0, 2.0, pytest.approx(math.nan, nan_ok=True), 4.0],
    }
    assert [text.replace(" ", "") for text in rows.prompt] == ["3+4=", "3+4=", "4+4=", "4+4="]
    assert rows.prompt_tokens.tolist() == [len(record.input_ids) for record in batch.records]
    assert rows.reward_extra_info.dropna().to_dict() == {2: '{"speed": null}'}
    assert rows.response.tolist() == ["7", "8", HOSTILE.replace("\ud800", "\ufffd"), ""]


def test_validation_keeps_all_its_batches(tmp_path: Path, tiny_tokenizer):
    samples = sample_logger(tmp_path, tiny_tokenizer, fraction=0.01)
    with samples.store:
        parts = [batch_of(tiny_tokenizer, [1, 3, 2, 3]), batch_of(tiny_tokenizer, [2, 2, 2, 2], uids=(3, 4))]
        samples.log("val", 0, Batch.join(parts))
    rows = kept(tmp_path, "val_000000.parquet")
    assert rows.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rows.num_tokens.tolist() == [1, 3, 2, 3, 2, 2, 2, 2]
    assert rows.logprob.tolist() == [-1.0] * 8
    assert {"advantage", "phi", "learned"}.isdisjoint(rows.columns)


def test_tokens_are_kept_with_all_that_is_known_of_each(tmp_path: Path, tiny_tokenizer):
    batch = batch_of(tiny_tokenizer, [1, 3, 2, 3])
    course = torch.full((9, 1), torch.nan)
    course[[0, 1, 4, 6]], course[3] = 1.5, 2.5
    batch.fill(**{"prefix/Effective Rank": course})
    samples = sample_logger(tmp_path, tiny_tokenizer, tokens=True)
    with samples.store:
        samples.log("train", 7, learned(batch))
        samples.log("val", 7, batch)
    rows = kept(tmp_path, "train_000007.parquet")
    assert [list(row) for row in rows.token_logprobs] == [[-1.0], [-1.0, -2.0, -3.0], [-1.0, -2.0], [-1.0, -2.0, -3.0]]
    assert [list(row) for row in rows.token_entropies][1] == [0.5, 1.0, 1.5]
    assert [len(row) for row in rows.tokens] == [1, 3, 2, 3]
    assert [list(row) for row in rows.prefix_rows] == [[1], [1, 3], [1], [1]]
    assert [list(row) for row in rows["prefix/layer_1/Effective Rank"]] == [[1.5], [1.5, 2.5], [1.5], [1.5]]
    validated = kept(tmp_path, "val_000007.parquet")
    assert [list(row) for row in validated.token_logprobs][1] == [-1.0, -1.0, -1.0]
    assert "token_entropies" not in validated.columns


def test_fraction_keeps_the_same_whole_groups_at_every_step(tmp_path: Path, tiny_tokenizer):
    batch = batch_of(tiny_tokenizer, [1, 3, 2, 3])
    shares = [sum(is_kept(uid, fraction) for uid in range(2000)) / 2000 for fraction in (1.0, 0.5, 0.1)]
    assert shares == [1.0, pytest.approx(0.5, abs=0.03), pytest.approx(0.1, abs=0.03)]
    samples = sample_logger(tmp_path, tiny_tokenizer, fraction=0.53)  # their hashes are 0.52 and 0.55
    with samples.store:
        for step in (1, 2):
            samples.log("train", step, learned(batch))
    assert [kept(tmp_path, f"train_00000{step}.parquet").uid.tolist() for step in (1, 2)] == [[5, 5], [5, 5]]


def test_shown_samples_are_plain_text_in_console_and_tensorboard(tmp_path: Path, tiny_tokenizer, capsys):
    batch = batch_of(tiny_tokenizer, [1, 3, 2, 3])
    samples = sample_logger(tmp_path, tiny_tokenizer, shown=2, loggers=("tensorboard",))
    with samples.store:
        samples.log("train", 7, learned(batch))
    samples.tracker.close()
    shown = capsys.readouterr().out
    assert "reason exact | score 1 | advantage 10" in shown and "\\x1b[31m<script>" in shown
    assert "\x1b" not in shown and "different" not in shown  # rows 0 and 2 of the four
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/train/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7 and text.splitlines()[0].startswith("| data_source | prompt | response |")
    assert len(text.splitlines()) == 4
    assert "&#60;script&#62;alert&#40;1&#41;&#60;&#47;script&#62;&#124;<br>" in text and "<script" not in text


@pytest.mark.slow
def test_shown_samples_are_a_table_in_wandb(tmp_path: Path, tiny_tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    batch = batch_of(tiny_tokenizer, [1, 3, 2, 3])
    samples = sample_logger(tmp_path, tiny_tokenizer, shown=4, loggers=("wandb",))
    folder = Path(wandb.run.dir)
    with samples.store:
        samples.log("train", 7, learned(batch))
    samples.tracker.close()
    (path,) = folder.glob("media/table/samples/train_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"][-3:] == ["reason", "score", "advantage"]
    assert [row[-3:] for row in table["data"]] == [
        ["exact", 1.0, 10.0],
        ["different", 0.0, 20.0],
        ["exact", 1.0, 15.0],
        ["different", 0.0, 20.0],
    ]
