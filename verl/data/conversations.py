"""Tokenized conversations for supervised fine-tuning, with loss masks for the assistant's turns."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.sft import SFTDataConfig
from verl.data.files import read_rows
from verl.data.records import read_chat, read_tools
from verl.data.samplers import ResumableRandomSampler, batch_loader
from verl.data.templates import render_chat, render_record
from verl.utils.json_state import digest

Conversation = tuple[list[int], list[int]]
"""Token ids, and a loss mask that is 1 for the tokens to train on."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Message fields in which services return a model's reasoning. Few chat templates read them."""


class ConversationDataset(Dataset[Conversation]):
    """Dataset of the conversations in ``files``, tokenized at construction.

    Raises ``ConfigError`` if a file cannot be read or lacks the column, or if a conversation is malformed, has no
    assistant turn to train on, does not fit the chat template, or is too long. The message names the file and row.
    """

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig) -> None:
        self.conversations: list[Conversation] = []
        self.digests: dict[str, list[str]] = {}
        """Digests of each file's untruncated conversations, keyed by option, such as ``data.train_files[0]``."""
        for i, path in enumerate(files):
            key, digests = config.messages_key, self.digests.setdefault(f"data.train_files[{i}]", [])
            for row_number, row in enumerate(read_rows(path, [key], "data.messages_key", [key, "tools"])):
                where = f"{path}, row {row_number}"
                messages = read_chat(row[key], where, key, "data.messages_key", "conversation")
                if messages[0]["role"] == "assistant":
                    raise ConfigError(f"{where}: {key}: begins with the assistant; begin with what it answers")
                tools = read_tools(row, where)
                digests.append(digest([messages, tools]))
                ids, mask = tokenize_conversation(messages, tokenizer, f"{where}: {key}", config.max_length, tools)
                if len(ids) > config.max_length and config.truncation == "error":
                    raise ConfigError(
                        f"data.max_length={config.max_length}: the conversation in {where} has {len(ids)} tokens; "
                        "raise it, or set data.truncation=right"
                    )
                if not any(mask[: config.max_length]):
                    raise ConfigError(
                        f"data.max_length={config.max_length}: the first {config.max_length} tokens of the "
                        f"conversation in {where} contain no assistant token to learn; raise it"
                    )
                self.conversations.append((ids[: config.max_length], mask[: config.max_length]))
        if not self.conversations:
            raise ConfigError(f"{list(files)}: the files contain no conversations; add some")

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self.conversations[index]


def tokenize_conversation(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    max_length: int = sys.maxsize,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Conversation:
    """Return a conversation's token ids and a mask of the assistant turns, including end-of-turn tokens.

    A turn's tokens are those that the template appends for it, so a turn must not change how earlier turns are
    rendered. Turns with ``weight`` 0 (as in OpenAI's fine-tuning format) serve only as context. Turns after the first
    ``max_length`` tokens are skipped, because rendering all turns takes quadratic time.

    Raises ``ConfigError`` if a turn changes earlier ones, if the template omits tools, tool calls or reasoning, if a
    weight is neither 0 nor 1, or if there is no turn to train on.
    """

    def render(turns: list[dict[str, Any]], generation_prompt: bool) -> list[int]:
        try:
            if turns is messages:
                return render_record(turns, tokenizer, tools, {}, generation_prompt)
            return render_chat(turns, tokenizer, {"tools": tools} if tools else None, generation_prompt)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    whole = render(messages, generation_prompt=False)
    for name in THOUGHTS:
        silent = [{key: value for key, value in message.items() if key != name} for message in messages]
        if silent != messages and render(silent, generation_prompt=False) == whole:
            raise ConfigError(
                f"{where}: the tokenizer's chat template leaves out {name}; write the thoughts into content, in the "
                "model's form, or use a model with a template for them"
            )
    mask = [0] * len(whole)
    for i, message in enumerate(messages):
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise ConfigError(f"{where}: weight={weight!r:.80} of turn {i}: must be 0 (context) or 1 (learned)")
        if message["role"] != "assistant" or not weight:
            continue
        before = render(messages[:i], generation_prompt=True)
        if len(before) >= max_length:
            break
        after = render(messages[: i + 1], generation_prompt=False)
        if whole[: len(after)] != after or after[: len(before)] != before:
            raise ConfigError(f"{where}: the chat template renders turn {i} differently once later turns follow")
        mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    else:
        if not any(mask):
            raise ConfigError(f"{where}: has no assistant turn to learn from")
    return whole, mask


def conversation_batch(conversations: Sequence[Conversation]) -> Batch:
    """Convert conversations to a batch with ``learn_mask``. The first token of a conversation serves as its prompt."""
    ids, masks = zip(*conversations, strict=True)
    learned = torch.tensor([learned for mask in masks for learned in mask[1:]]).bool()
    return Batch.of([row[:1] for row in ids], [row[1:] for row in ids], learn_mask=learned)


def conversation_loader(dataset: ConversationDataset, batch_size: int, seed: int) -> StatefulDataLoader:
    """Return a loader of shuffled batches of ``batch_size`` conversations. An incomplete last batch is dropped.

    Raises ``ConfigError`` if there are fewer conversations than ``batch_size``.
    """
    if len(dataset) < batch_size:
        raise ConfigError(f"data.train_batch_size={batch_size}: there are only {len(dataset)} conversations; lower it")
    sampler = ResumableRandomSampler(dataset, generator=torch.Generator().manual_seed(seed))
    return batch_loader(dataset, batch_size, sampler, conversation_batch)
