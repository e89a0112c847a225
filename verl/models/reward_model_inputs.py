"""The inputs of a reward model: prompts with their responses, in its own chat template.

Legend: B responses, S tokens of the longest conversation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.protocol import TextBatch


def reward_model_batch(
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    responses: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> tuple[TextBatch, float]:
    """The conversations that end in the responses, [B, S], and the fraction of them that was too long.

    Args:
        prompts: for each response the chat before it, a list of ``{"role", "content"}``.
        responses: the policy's answers, B texts.
        tokenizer: the reward model's, whose chat template is applied.
        max_length: tokens kept of each conversation; a longer one loses its beginning.
    """
    chats: Any = [[*prompt, _answer(text)] for prompt, text in zip(prompts, responses, strict=True)]
    rendered: Any = tokenizer.apply_chat_template(chats, return_dict=False)
    rows = [torch.tensor(ids[-max_length:]) for ids in rendered]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    too_long = sum(len(ids) > max_length for ids in rendered) / len(rendered)
    return TextBatch(input_ids, attention_mask, batch_size=[len(rows)]), too_long


def check_reward_model_template(
    prompts: Sequence[Sequence[Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase, field: str
) -> None:
    """Raise ``ConfigError`` naming ``field`` unless the tokenizer's chat template renders every prompt with an answer.

    Some templates refuse some chats, for example those with a system message.
    """
    for row, prompt in enumerate(prompts):
        answer = "the answer of the policy"
        chat: Any = [*prompt, _answer(answer)]
        try:
            text: Any = tokenizer.apply_chat_template(chat, tokenize=False)
        except TemplateError as error:
            raise ConfigError(f"{field}: its chat template refuses the chat of prompt {row}: {error}") from error
        if answer not in text:
            raise ConfigError(f"{field}: its chat template leaves out the answer of the assistant; use another model")


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
