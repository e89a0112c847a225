"""Saves the sampled responses of a run to its folder ``samples/`` and shows them in trackers.

Legend: B responses, M tokens in these responses.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.batch.flat import sums_within
from verl.data.responses import token_pieces
from verl.rank.dynamics import by_layer
from verl.rollout.environments.conversations import conversation_parts, history_parts
from verl.rollout.environments.pool import COUNTS
from verl.run.display import RunDisplay
from verl.run.samples import SampleStore, Split
from verl.run.tracker_backends import Table as SampleTable
from verl.run.tracking import Tracker
from verl.utils.portable import finite_or_null, valid_unicode
from verl_pages.sample_files import METRIC_PREFIX, PREFIX

SHOWN = ("data_source", "prompt", "response", "ground_truth", "answer", "reason", "score", "advantage")
"""Columns of the sample tables in trackers."""


@dataclass(eq=False)
class SampleLogger:
    """Logger that saves and shows the responses of training steps and validations."""

    store: SampleStore
    num_shown: int
    """Number of responses per saved step to show in trackers and on the console."""
    tokenizer: PreTrainedTokenizerBase
    tracker: Tracker
    display: RunDisplay

    def log(self, split: Split, step: int, batch: Batch) -> None:
        """Save and show the responses of a training step or a validation."""
        if not self.store.wants(split, step):
            return
        if not self.num_shown:
            self.store.keep(split, step, lambda: self._table(split, step, batch))
            return
        table = self._table(split, step, batch)
        self.store.keep(split, step, lambda: table)
        shown = table.take(_evenly_spaced(len(table), self.num_shown)).to_pylist()
        columns = [name for name in SHOWN if name in table.column_names]
        rows = [[row[name] for name in columns] for row in shown]
        self.tracker.log_table(step, f"samples/{split}", SampleTable(columns, rows))
        for row in shown:
            facts = {name: _short(row[name]) for name in columns if name not in ("prompt", "response")}
            self.display.sample({"step": str(step)} | facts, row["prompt"], row["response"])

    def _table(self, split: Split, step: int, batch: Batch) -> pa.Table:
        training = split == "train"
        logprobs = "old_logprobs" if training else "rollout_logprobs"
        columns = self._columns(split, step, batch) | {"logprob": _row_means(batch, logprobs)}
        columns |= _learning_columns(batch) if training else {}
        if self.store.config.tokens:
            columns |= self._token_columns(batch, logprobs)
            if training and "entropy" in batch:
                columns["token_entropies"] = _token_lists(batch, batch.entropy)
        table = pa.table(columns | _metric_columns(batch))
        if not training:
            return table
        return table.filter(pa.array([is_kept(record.uid, self.store.config.fraction) for record in batch.records]))

    def _columns(self, split: str, step: int, batch: Batch) -> dict[str, Any]:
        """Return the columns common to all samples, as listed in docs/samples.md."""
        records, verdicts, num = batch.records, batch.verdicts, len(batch)
        prompts: dict[int, str] = {}
        for record in records:
            if id(record) not in prompts:
                prompts[id(record)] = valid_unicode(str(self.tokenizer.decode(record.input_ids)))
        shown = [prompts[id(record)] for record in records]
        if "further_rows" in batch:  # agents write the prompts
            starts = batch.tokens[~batch.in_response].split(batch.prompt_lengths.tolist())
            shown = [valid_unicode(str(self.tokenizer.decode(ids))) for ids in starts]
        group, sample = _places(batch.group.tolist())
        return {
            "step": np.full(num, step),
            "split": pa.array([split] * num),
            "uid": np.array([record.uid for record in records]),
            "group": np.array(group),
            "sample": np.array(sample),
            "data_source": _texts([valid_unicode(record.data_source) for record in records]),
            "prompt": _texts(shown),
            "response": _texts([valid_unicode(text) for text in batch.texts]),
            "ground_truth": _texts([json.dumps(record.ground_truth) for record in records]),
            "answer": _texts([valid_unicode(verdict.answer) for verdict in verdicts]),
            "correct": np.array([verdict.correct for verdict in verdicts]),
            "reason": pa.array([verdict.reason for verdict in verdicts]),
            "score": np.array([verdict.score for verdict in verdicts], dtype=np.float64),
            "reward_extra_info": pa.array(
                [json.dumps(finite_or_null(v.extras)) if v.extras else None for v in verdicts], pa.large_string()
            ),
            "prompt_tokens": batch.prompt_lengths.numpy(),
            "num_tokens": batch.response_lengths.numpy(),
            "truncated": batch.truncated.numpy(),
            **self._conversation_columns(batch),
        }

    def _conversation_columns(self, batch: Batch) -> dict[str, Any]:
        """Return the columns for conversations: messages as JSON, counts, and the environment's rewards."""
        if "source" not in batch:
            return {}
        said = conversation_parts(batch, self.tokenizer)
        further = {}
        if "further_rows" in batch:
            rows = [[self._further_row(row) for row in rows] for rows in batch.further_rows]
            further["opened_by"] = _texts(batch.opened_by)
            further["further_rows"] = _texts([valid_unicode(json.dumps(row, ensure_ascii=False)) for row in rows])
        return {
            **further,
            "conversation": _texts([valid_unicode(json.dumps(turns, ensure_ascii=False)) for turns in said]),
            "turns": batch.turns.numpy(),
            "policy_tokens": batch.policy_lengths.numpy(),
            "environment_reward": batch.environment_rewards.numpy(),
            **{name: counts.numpy() for name, counts in zip(COUNTS, batch.call_counts.unbind(dim=1), strict=True)},
        }

    def _further_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reason for an additional history of an agent session, and the history's prompt and other parts."""
        prompt, *said = history_parts(row, self.tokenizer)
        return {"why": row["why"], "prompt": prompt["text"], "conversation": said}

    def _token_columns(self, batch: Batch, logprobs: str) -> dict[str, Any]:
        """Return columns with a list of token values per response. ``logprobs`` names the log-probability column."""
        ids = [part.tolist() for part in batch.response_tokens.split(batch.response_lengths.tolist())]
        pieces = [[valid_unicode(piece) for piece in token_pieces(row, self.tokenizer)] for row in ids]
        columns = {"tokens": pa.array(pieces), "token_logprobs": _token_lists(batch, getattr(batch, logprobs))}
        for name, values in batch.prefix_metrics.items():
            measured = values.isfinite().all(dim=1)
            rows = measured.split(batch.response_lengths.tolist())
            columns["prefix_rows"] = pa.array([(row.nonzero().flatten() + 1).tolist() for row in rows])
            for layer, of_layer in enumerate(values.unbind(dim=1), start=1):
                columns[f"{PREFIX}layer_{layer}/{name}"] = _token_lists(batch, of_layer, measured)
        return columns


def is_kept(uid: int, fraction: float) -> bool:
    """Return whether a prompt's samples are saved. Every step saves the same ``fraction`` of the prompts."""
    return zlib.crc32(str(uid).encode()) < fraction * 2**32


def _learning_columns(batch: Batch) -> dict[str, Any]:
    means = {"entropy": "entropy", "advantage_0": "unshaped_advantages", "advantage": "advantages"}
    columns = {name: _row_means(batch, column) for name, column in means.items() if column in batch}
    columns |= {"reward": batch.rewards.numpy(), "learned": batch.learned_responses.numpy()}
    return columns | ({"phi": batch.phi.numpy()} if "phi" in batch else {})


def _metric_columns(batch: Batch) -> dict[str, Any]:
    layers = enumerate(by_layer(batch.rank_metrics), start=1)
    return {
        f"{METRIC_PREFIX}layer_{layer}/{name}": values.numpy()
        for layer, by_name in layers
        for name, values in by_name.items()
    }


def _places(group_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each response's group, numbered in order of appearance, and its index within the group."""
    numbers: dict[int, int] = {}
    sizes: Counter[int] = Counter()
    places = []
    for group in group_ids:
        numbers.setdefault(group, len(numbers))
        places.append(sizes[group])
        sizes[group] += 1
    return [numbers[group] for group in group_ids], places


def _row_means(batch: Batch, name: str) -> Any:
    """Return the mean of a column over the policy's tokens in each response, as float64."""
    values = torch.where(batch.by_policy, getattr(batch, name).double(), 0.0)
    return (sums_within(values, batch.response_lengths) / batch.policy_lengths).numpy()


def _token_lists(batch: Batch, values: Tensor, kept: Tensor | None = None) -> pa.Array:
    """Return ``values`` of shape [M] as a float32 list column, limited to tokens in the mask ``kept``, if any."""
    lengths = batch.response_lengths
    if kept is not None:
        values, lengths = values[kept], sums_within(kept.long(), lengths)
    return pa.array([part.tolist() for part in values.float().split(lengths.tolist())], pa.list_(pa.float32()))


def _texts(values: Sequence[str]) -> pa.Array:
    return pa.array(values, pa.large_string())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _evenly_spaced(num_rows: int, num_shown: int) -> list[int]:
    return sorted({num_rows * i // num_shown for i in range(num_shown)}) if num_rows else []
