"""Prompts with their responses, as a reward model reads them.

Legend: B responses, S tokens of the longest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from verl.protocol import TextBatch


def judged_texts(
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    responses: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> TextBatch:
    """The conversations that end in the responses, [B, S].

    Args:
        prompts: for each response the chat before it, a list of ``{"role", "content"}``.
        responses: what the policy answered, B texts.
        tokenizer: the reward model's, whose chat template is applied.
        max_length: tokens kept of each conversation; a longer one loses its head.
    """
    chats = [[*prompt, {"role": "assistant", "content": text}] for prompt, text in zip(prompts, responses, strict=True)]
    rendered = tokenizer.apply_chat_template(chats, return_dict=False)
    rows = [torch.tensor(ids[-max_length:]) for ids in rendered]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    return TextBatch(input_ids, attention_mask, batch_size=[len(rows)])
