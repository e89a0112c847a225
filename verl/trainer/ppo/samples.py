"""What a run keeps and shows of its responses: a row for each, in ``samples/`` of its folder and in trackers.

Legend: B responses, R response columns.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.data.responses import token_pieces
from verl.protocol import RankMetrics, RolloutBatch
from verl.run.display import RunDisplay
from verl.run.samples import METRIC_PREFIX, PREFIX, SampleStore, Split
from verl.run.sinks import Table as SampleTable
from verl.run.tracking import Tracker
from verl.trainer.ppo.batches import LearningSignal, ModelOutputs
from verl.trainer.ppo.sampled import Sampled
from verl.utils.portable import finite_or_null, valid_unicode

SHOWN = ("data_source", "prompt", "response", "ground_truth", "answer", "reason", "score", "advantage")
"""Columns of the tables in trackers, as far as they are there."""


class SampleKeeper:
    """Keeps and shows the responses of training steps and validations."""

    def __init__(
        self,
        store: SampleStore,
        num_shown: int,
        tokenizer: PreTrainedTokenizerBase,
        tracker: Tracker,
        display: RunDisplay,
    ) -> None:
        """``num_shown``: responses of each kept step that trackers and the console show."""
        self.store = store
        self.num_shown = num_shown
        self.tokenizer = tokenizer
        self.tracker = tracker
        self.display = display

    def keep_training(self, step: int, sampled: Sampled, outputs: ModelOutputs, signal: LearningSignal) -> None:
        """Keep the responses of a training step, and what the policy learns from them."""

        def table() -> pa.Table:
            columns = self._columns("train", step, [sampled])
            columns |= _learning_columns(sampled.rollout.response_mask, outputs, signal)
            if self.store.config.tokens:
                columns |= self._token_columns(sampled.rollout, outputs.old_logprobs, outputs.rank_metrics)
                if outputs.scores is not None:
                    columns["token_entropies"] = _token_lists(outputs.scores.entropy, sampled.rollout.response_mask)
            kept = [is_kept(record.uid, self.store.config.fraction) for record in sampled.prompts.records]
            rows = pa.array(np.repeat(kept, len(sampled.texts) // len(kept)))
            return pa.table(columns | _metric_columns(outputs.rank_metrics)).filter(rows)

        self._keep("train", step, table)

    def keep_validation(self, step: int, batches: list[Sampled]) -> None:
        """Keep the responses of a validation."""

        def table() -> pa.Table:
            rollout: Any = torch.cat([cast(Any, batch.rollout) for batch in batches])
            columns = self._columns("val", step, batches)
            columns["logprob"] = _row_means(rollout.rollout_logprobs, rollout.response_mask)
            if self.store.config.tokens:
                columns |= self._token_columns(rollout, rollout.rollout_logprobs, rollout.rank_metrics)
            return pa.table(columns | _metric_columns(rollout.rank_metrics))

        self._keep("val", step, table)

    def _keep(self, split: Split, step: int, make_table: Callable[[], pa.Table]) -> None:
        if not self.store.wants(split, step):
            return
        if not self.num_shown:
            self.store.keep(split, step, make_table)
            return
        table = make_table()
        self.store.keep(split, step, lambda: table)
        shown = table.take(_spread(len(table), self.num_shown)).to_pylist()
        columns = [name for name in SHOWN if name in table.column_names]
        rows = [[row[name] for name in columns] for row in shown]
        self.tracker.log_table(step, f"samples/{split}", SampleTable(columns, rows))
        for row in shown:
            facts = {name: _short(row[name]) for name in columns if name not in ("prompt", "response")}
            self.display.sample({"step": str(step)} | facts, row["prompt"], row["response"])

    def _columns(self, split: str, step: int, batches: list[Sampled]) -> dict[str, Any]:
        """What is known of all responses; docs/samples.md describes the columns."""
        n = len(batches[0].texts) // len(batches[0].prompts.records)
        records = [record for batch in batches for record in batch.prompts.records]
        results = [result for batch in batches for result in batch.pending.result()]
        prompts = [valid_unicode(str(self.tokenizer.decode(record.input_ids))) for record in records]
        truths = [json.dumps(record.ground_truth) for record in records]
        extras = [result["reward_extra_info"] for result in results]
        lengths = torch.cat([batch.rollout.response_mask.sum(dim=1) for batch in batches])
        truncated = torch.cat([batch.rollout.truncated for batch in batches])
        num = len(results)
        return {
            "step": np.full(num, step),
            "split": pa.array([split] * num),
            "uid": np.repeat([record.uid for record in records], n),
            "group": np.repeat(np.arange(len(records)), n),
            "sample": np.tile(np.arange(n), len(records)),
            "data_source": _texts([valid_unicode(record.data_source) for record in records], n),
            "prompt": _texts(prompts, n),
            "response": _texts([valid_unicode(text) for batch in batches for text in batch.texts]),
            "ground_truth": _texts(truths, n),
            "answer": _texts([valid_unicode(result["answer"]) for result in results]),
            "correct": np.array([result["correctness"] for result in results]),
            "reason": pa.array([result["reason"] for result in results]),
            "score": np.array([result["score"] for result in results], dtype=np.float64),
            "reward_extra_info": pa.array(
                [json.dumps(finite_or_null(extra)) if extra else None for extra in extras], pa.large_string()
            ),
            "prompt_tokens": np.repeat([len(record.input_ids) for record in records], n),
            "num_tokens": lengths.numpy(),
            "truncated": truncated.numpy(),
        }

    def _token_columns(self, rollout: RolloutBatch, logprobs: Tensor, metrics: RankMetrics) -> dict[str, Any]:
        """Lists of what is known of each token."""
        mask = rollout.response_mask.bool()
        ids = [row[kept].tolist() for row, kept in zip(rollout.responses, mask, strict=True)]
        pieces = [[valid_unicode(piece) for piece in token_pieces(row, self.tokenizer)] for row in ids]
        columns = {"tokens": pa.array(pieces), "token_logprobs": _token_lists(logprobs, mask)}
        if metrics.by_prefix is None:
            return columns
        for name in map(str, metrics.by_prefix.keys()):
            values = metrics.by_prefix[name]
            measured = values.isfinite().all(dim=1)
            columns["prefix_rows"] = pa.array([(row.nonzero().flatten() + 1).tolist() for row in measured])
            for layer in range(values.shape[1]):
                columns[f"{PREFIX}layer_{layer + 1}/{name}"] = _token_lists(values[:, layer], measured)
        return columns


def is_kept(uid: int, fraction: float) -> bool:
    """Whether the responses to a prompt are among the ``fraction`` that is kept, at every step alike."""
    return zlib.crc32(str(uid).encode()) < fraction * 2**32


def _learning_columns(mask: Tensor, outputs: ModelOutputs, signal: LearningSignal) -> dict[str, Any]:
    """What is learned from each response, for the response ``mask [B, R]``."""
    columns: dict[str, Any] = {"logprob": _row_means(outputs.old_logprobs, mask)}
    if outputs.scores is not None:
        columns["entropy"] = _row_means(outputs.scores.entropy, mask)
    columns |= {
        "reward": signal.rewards.numpy(),
        "advantage_0": _row_means(signal.unshaped, mask),
        "advantage": _row_means(signal.advantages, mask),
        "learned": signal.mask.any(dim=1).numpy(),
    }
    return columns if signal.phi is None else columns | {"phi": signal.phi.numpy()}


def _metric_columns(metrics: RankMetrics) -> dict[str, Any]:
    layers = enumerate(metrics.by_layer(), start=1)
    return {
        f"{METRIC_PREFIX}layer_{layer}/{name}": values.numpy()
        for layer, by_name in layers
        for name, values in by_name.items()
    }


def _row_means(values: Tensor, mask: Tensor) -> Any:
    """The mean of each row of ``values [B, R]`` over its ``mask [B, R]``, float64."""
    kept = torch.where(mask.bool(), values.double(), 0.0)
    return (kept.sum(dim=1) / mask.sum(dim=1)).numpy()


def _token_lists(values: Tensor, mask: Tensor) -> pa.Array:
    """The entries of each row of ``values [B, T]`` where ``mask [B, T]`` holds, float32."""
    lists = [row[kept].tolist() for row, kept in zip(values.float(), mask.bool(), strict=True)]
    return pa.array(lists, pa.list_(pa.float32()))


def _texts(values: Sequence[str], times: int = 1) -> pa.Array:
    """A column with each of ``values`` so many times."""
    return pa.array([value for value in values for _ in range(times)], pa.large_string())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _spread(num_rows: int, num_shown: int) -> list[int]:
    """So many places of rows, evenly spread."""
    return sorted({num_rows * i // num_shown for i in range(num_shown)}) if num_rows else []
