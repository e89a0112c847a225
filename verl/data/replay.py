"""Responses of this step and of earlier ones, from which ``algorithm.recompose`` makes the batch to learn from.

Legend: B responses, P prompt columns, R response columns, S = P + R.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.config.errors import ConfigError
from verl.data.prompt_rows import PromptRecord
from verl.protocol import RankMetrics, RolloutBatch
from verl.rewards import Score
from verl.utils.json_state import from_json, to_json

Places = Tensor | Sequence[int]
"""Indices of rows, or a mask [B] bool."""


@dataclass(frozen=True)
class Responses:
    """B responses with everything that is known of each. ``responses[places]`` has some of them, in that order."""

    rollout: RolloutBatch
    """Tokens, masks and sampling log-probabilities; rank metrics where the engine measured them."""
    records: list[PromptRecord]
    """B, the prompt of each, as it was sampled."""
    texts: list[str]
    """B, what verifiers read of each."""
    results: list[Score]
    """B, what verifiers say of each."""
    steps: Tensor
    """[B] int64, the step in which each was sampled."""
    learned: Tensor
    """[B] bool, false for those that enter the statistics of their group and nothing else."""

    @property
    def scores(self) -> Tensor:
        """[B] float64, of the verifiers."""
        return torch.tensor([result["score"] for result in self.results], dtype=torch.float64)

    @property
    def correct(self) -> Tensor:
        """[B] bool."""
        return torch.tensor([result["correctness"] for result in self.results], dtype=torch.bool)

    @property
    def lengths(self) -> Tensor:
        """[B] int64, tokens of each."""
        return self.rollout.response_mask.sum(dim=1)

    @property
    def group_ids(self) -> Tensor:
        """[B] int64, equal for responses to the same prompt in the same step."""
        return self.rollout.group_ids

    @property
    def rollout_logprobs(self) -> Tensor:
        """[B, R] float32, of each token under the distribution that it was sampled from; 0 on padding."""
        return self.rollout.rollout_logprobs

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, places: Places) -> "Responses":
        rows = _rows(places)
        chosen = rows.tolist()
        return Responses(
            self.rollout[rows],
            [self.records[i] for i in chosen],
            [self.texts[i] for i in chosen],
            [self.results[i] for i in chosen],
            self.steps[rows],
            self.learned[rows],
        )

    def learning(self, mask: Tensor) -> "Responses":
        """The same responses, of which those of ``mask`` [B] bool are learned from."""
        if mask.dtype != torch.bool or mask.shape != self.learned.shape:
            raise ValueError(f"mask {tuple(mask.shape)} of {mask.dtype}: expected [{len(self)}] of torch.bool")
        return replace(self, learned=mask.clone())

    @staticmethod
    def join(parts: Sequence["Responses"]) -> "Responses":
        """The rows of all parts, one after another."""
        # torch.cat is not annotated for tensorclasses.
        rollout: Any = torch.cat([cast(Any, part.rollout) for part in parts])
        return Responses(
            rollout,
            [record for part in parts for record in part.records],
            [text for part in parts for text in part.texts],
            [result for part in parts for result in part.results],
            torch.cat([part.steps for part in parts]),
            torch.cat([part.learned for part in parts]),
        )


def _rows(places: Places) -> Tensor:
    """``places`` as indices, int64."""
    found = torch.as_tensor(places)
    # Of no places, torch cannot tell the type.
    return found.nonzero().flatten() if found.dtype == torch.bool else found.long()


class ReplayBuffer:
    """Responses of earlier steps, at most ``capacity``; the oldest fall out. Saved in every checkpoint."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: Responses | None = None

    def __len__(self) -> int:
        return 0 if self._held is None else len(self._held)

    @property
    def responses(self) -> Responses:
        """What is held, the oldest first. Raises ``ValueError`` while the buffer is empty."""
        if self._held is None:
            raise ValueError("the buffer is empty; ask for its len() first")
        return self._held

    def add(self, responses: Responses) -> None:
        """Hold these too. What a user's reward function returned besides the score is not kept."""
        results = [Score(**(result | {"reward_extra_info": {}})) for result in responses.results]
        added = replace(responses, results=results)
        held = added if self._held is None else Responses.join([self._held, added])
        first = max(0, len(held) - self.capacity)
        # A group falls out as a whole.
        while 0 < first < len(held) and held.group_ids[first] == held.group_ids[first - 1]:
            first += 1
        self._hold(held[torch.arange(first, len(held))])

    def take(self, places: Places) -> Responses:
        """Those in these places of ``responses``, which the buffer then no longer holds. Raises as these do."""
        held, rows = self.responses, _rows(places)
        left = torch.ones(len(held), dtype=torch.bool)
        left[rows] = False
        self._hold(held[left])
        return held[rows]

    def _hold(self, held: Responses) -> None:
        self._held = held if len(held) else None

    def state(self, originals: Sequence[PromptRecord]) -> Any:
        """What is held as JSON; ``originals`` are the data set's prompts, which are not saved again."""
        if not len(self):
            return None
        held, rollout = self.responses, self.responses.rollout
        metrics = rollout.rank_metrics
        return to_json(
            {
                "input_ids": rollout.input_ids.int(),
                "attention_mask": rollout.attention_mask.bool(),
                "response_mask": rollout.response_mask.bool(),
                "rollout_logprobs": rollout.rollout_logprobs,
                "group_ids": rollout.group_ids,
                "truncated": rollout.truncated,
                "metrics": _tensors(metrics.by_name),
                "mean_states": metrics.mean_states,
                "by_prefix": None if metrics.by_prefix is None else _tensors(metrics.by_prefix),
                "uids": [record.uid for record in held.records],
                "edited": [_edits(record, originals[record.uid]) for record in held.records],
                "texts": held.texts,
                "results": held.results,
                "steps": held.steps,
                "learned": held.learned,
            }
        )

    def load_state(self, state: Any, originals: Sequence[PromptRecord], shape: tuple[int, int]) -> None:
        """Hold what :meth:`state` told.

        Args:
            shape: S and R of this run.

        Raises:
            ConfigError: the lengths of prompts or responses were others, or the data set was.
        """
        self._held = None
        if state is None:
            return
        found = from_json(state)
        if not all(0 <= uid < len(originals) for uid in found["uids"]):
            raise ConfigError(
                f"data.train_files: the replay buffer of the checkpoint has prompts that are not among these "
                f"{len(originals)}; set it back to the files of that run"
            )
        saved = (found["input_ids"].shape[1], found["response_mask"].shape[1])
        if saved != shape:
            raise ConfigError(
                f"data.max_prompt_length={shape[0] - shape[1]}, data.max_response_length={shape[1]}: the replay buffer "
                f"of the checkpoint was filled with {saved[0] - saved[1]} and {saved[1]}; set them back"
            )
        size = [len(found["texts"])]
        prefixes = found["by_prefix"]
        metrics = RankMetrics(
            TensorDict(found["metrics"], batch_size=size),
            found["mean_states"],
            None if prefixes is None else TensorDict(prefixes, batch_size=size),
            batch_size=size,
        )
        rollout = RolloutBatch(
            input_ids=found["input_ids"].long(),
            attention_mask=found["attention_mask"].long(),
            response_mask=found["response_mask"].long(),
            rollout_logprobs=found["rollout_logprobs"],
            group_ids=found["group_ids"],
            truncated=found["truncated"],
            rank_metrics=metrics,
            batch_size=size,
        )
        edits = zip(found["uids"], found["edited"], strict=True)
        records = [originals[uid] if edit is None else replace(originals[uid], **edit) for uid, edit in edits]
        texts, results = found["texts"], found["results"]
        self._held = Responses(rollout, records, texts, results, found["steps"], found["learned"])


@dataclass(frozen=True)
class StepBatch:
    """What a class of ``algorithm.recompose`` makes its choice from."""

    step: int
    """From 1."""
    total_steps: int
    responses: Responses
    """This step's, neighbours where they share a prompt; learned from, but for those that only fill a
    batch of dynamic sampling up."""
    buffer: ReplayBuffer
    """Empty at first; what it holds from step to step is the class's own choice."""
    max_learned: int
    """The most responses that one step can learn from, ``data.train_batch_size`` times ``rollout.n``. Twice as many may
    be returned."""


def _tensors(fields: TensorDict) -> dict[str, Tensor]:
    return {str(name): fields[name] for name in fields.keys()}


def _edits(record: PromptRecord, original: PromptRecord) -> Mapping[str, Any] | None:
    """What an edited prompt has of its own; None for one that is not edited."""
    if record is original:
        return None
    fields = ("input_ids", "messages", "opens_thought")
    return {name: getattr(record, name) for name in fields}
