"""The inputs of a reward model: prompts with their responses, in its own chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.errors import ConfigError


def reward_model_batch(
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    responses: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> tuple[Batch, float]:
    """The conversations that end in the responses, texts without prompts, and the fraction of them that was too long.

    Args:
        prompts: for each response the chat before it, a list of ``{"role", "content"}``.
        responses: the policy's answers, B texts.
        tokenizer: the reward model's, whose chat template is applied.
        max_length: tokens kept of each conversation; a longer one loses its beginning.
    """
    chats: Any = [[*prompt, _answer(text)] for prompt, text in zip(prompts, responses, strict=True)]
    rendered: Any = tokenizer.apply_chat_template(chats, return_dict=False)
    too_long = sum(len(ids) > max_length for ids in rendered) / len(rendered)
    return Batch.of([[] for _ in rendered], [ids[-max_length:] for ids in rendered]), too_long


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
