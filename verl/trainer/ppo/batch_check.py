"""Consistency checks of a batch before an update."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import POLICY, Batch
from verl.cluster.failures import WorkerError
from verl.rollout.environments.conversations import policy_texts

FREQUENCY = 50
"""Number of steps between consistency checks. Each process also checks the first batch that it trains on."""

MAX_DECODED = 64
"""Maximum number of responses whose tokens are decoded again to check their texts."""


def inconsistent(step: int, found: str) -> WorkerError:
    return WorkerError(
        f"step {step}: the batch is inconsistent, so nothing is learned from it: {found}. This is a mistake in "
        "VERL or in trainer.method; report it with the run's config.yaml"
    )


def check_batch(
    batch: Batch,
    rows: Tensor | None,
    step: int,
    group_size: int | None,
    tokenizer: PreTrainedTokenizerBase,
    stop_strings: Sequence[str],
    max_staleness: int = 0,
    repeats: bool = False,
) -> None:
    """Check prompts, verified texts, masks and groups of a batch.

    Raises ``WorkerError`` if the batch is inconsistent because of a bug in VERL or in a custom method.

    Args:
        batch: Batch with verdicts and ``learn_mask``, B responses.
        rows: Rows to learn from, or None to use all rows.
        group_size: Number of responses per prompt, or None if a method selected the batch, in which case only masks,
            new versions and duplicate rows are checked.
        max_staleness: Number of versions by which a token may lag behind the weights that learn from it.
        repeats: Whether ``rows`` may contain a row more than once.
    """

    # 1. Only tokens that the policy sampled are learned from, their weight versions exist, and no row is used twice.
    if "source" in batch and (batch.learn_mask & (batch.source != POLICY)).any():
        raise inconsistent(step, "tokens that the environment wrote would be learned from")
    if "version" in batch and (batch.version >= step).any():
        version = int(batch.version.max())
        raise inconsistent(step, f"tokens were sampled with version {version} of the weights, which does not exist yet")
    if rows is not None and not repeats and len(rows.unique()) < len(rows):
        raise inconsistent(step, "a response would be learned from twice")
    if group_size is None:
        return
    # 2. Every row starts with its record's prompt and has the engine's log-probabilities.
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    prompts = [batch.tokens[at : at + n].tolist() for at, n in zip(starts, batch.prompt_lengths.tolist(), strict=True)]
    for row, prompt in enumerate(prompts):
        if "further_rows" in batch:
            prompts[row] = list(batch.records[row].input_ids)  # agents write the prompts
        elif prompt != list(batch.records[row].input_ids):
            raise inconsistent(step, f"response {row} has another prompt than its record")
    if not batch.rollout_logprobs[batch.learn_mask].isfinite().all():
        raise inconsistent(step, "tokens without an engine's log-probability would be learned from")
    if "version" in batch and (late := step - 1 - batch.version[batch.learn_mask]).gt(max_staleness).any():
        allowed = f"async_training.max_staleness={max_staleness}"
        raise inconsistent(step, f"tokens lag behind the weights by {int(late.max())} versions, despite {allowed}")
    # 3. The text given to the verifiers matches the row's tokens.
    chosen = torch.linspace(0, len(batch) - 1, min(len(batch), MAX_DECODED)).round().long()
    texts = policy_texts(batch[chosen], tokenizer, stop_strings)
    for row, text in zip(chosen.tolist(), texts, strict=True):
        if text != batch.texts[row]:
            read = f"the verifiers read {batch.texts[row]!r:.80} for response {row}"
            raise inconsistent(step, f"{read}, whose tokens are {text!r:.80}")
    # 4. Groups are complete, and each group has a single prompt.
    first: dict[int, list[int]] = {}
    for group, prompt in zip(batch.group.tolist(), prompts, strict=True):
        if first.setdefault(group, prompt) != prompt:
            raise inconsistent(step, f"group {group} has responses to different prompts")
    groups, counts = batch.group.unique(return_counts=True)
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        if count % group_size:
            raise inconsistent(step, f"group {group} has {count} responses instead of rollout.n={group_size}")


def check_carried_over(batch: Batch, learned: dict[tuple[int, int], int], step: int) -> None:
    """Check that no response of a batch with carried-over responses has been trained on before.

    Raises ``WorkerError`` if a response was in an earlier batch.

    Args:
        learned: Step whose batch contained each response, keyed by the response's admission step and random stream. The
            responses of ``batch`` are added, and entries that are older than ``FREQUENCY`` steps are removed.
    """
    responses = list(zip(batch.step.tolist(), batch.stream.tolist(), strict=True))
    again = next((learned[response] for response in responses if response in learned), None)
    if again is not None:
        raise inconsistent(step, f"a response of step {again} would be learned from again")
    for response in [response for response, last in learned.items() if last < step - FREQUENCY]:
        del learned[response]
    learned.update(dict.fromkeys(responses, step))
