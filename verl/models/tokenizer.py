"""Loads tokenizers, checks that models are compatible with them, and prepares inputs for reward models."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError, in_one_line
from verl.models.info import ModelInfo


def load_tokenizer(
    path: str, trust_remote_code: bool, field: str = "model.path", needs_chat_template: bool = True
) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Error messages name the option ``field``.

    Raises:
        ConfigError: if there is no tokenizer, or if it lacks an end-of-sequence token or a required chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # The files may contain anything, including code.
        raise ConfigError(f"{field}={path!r}: no tokenizer there: {in_one_line(error)}") from error
    # For a folder with a config but no vocabulary, transformers creates an empty tokenizer.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(f"{field}={path!r}: no tokenizer there, only special tokens; copy the model's files")
    lacks_template = needs_chat_template and tokenizer.chat_template is None
    if lacks_template or tokenizer.eos_token_id is None:
        needs = "a chat template and an end-of-sequence token" if needs_chat_template else "an end-of-sequence token"
        raise ConfigError(f"{field}={path!r}: its tokenizer needs {needs}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_reads_tokens(model: ModelConfig, field: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model uses the same token ids as the policy's ``tokenizer``. The model may have extra tokens.

    Raises a ``ConfigError`` that names ``field`` if a token's id differs or the largest id has no embedding.
    """
    vocabulary = load_tokenizer(model.path, model.trust_remote_code, field, needs_chat_template=False).get_vocab()
    expected = tokenizer.get_vocab()
    by_id = sorted(expected, key=expected.__getitem__)
    differing = [token for token in by_id if vocabulary.get(token) != expected[token]]
    if differing:
        token = differing[0]
        there = f"number {vocabulary[token]}" if token in vocabulary else "missing"
        raise ConfigError(
            f"{field}={model.path!r}: reads the policy's token numbers, but {len(differing)} of these {len(expected)} "
            f"differ: {token!r} is {expected[token]} for the policy and {there} here; name a relative of the policy"
        )
    check_embeds_tokens(model, field, tokenizer)


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of ids from 0 to the tokenizer's largest. An output head may have more rows, as padding."""
    return max(tokenizer.get_vocab().values()) + 1


def check_embeds_tokens(model: ModelConfig, field: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ConfigError`` if the model lacks an embedding for a token of ``tokenizer``."""
    largest, rows = num_ids(tokenizer) - 1, ModelInfo.of(model).text_config.vocab_size
    if largest >= rows:
        raise ConfigError(
            f"{field}={model.path!r}: the tokenizer has tokens up to number {largest}, the model embeddings for {rows} "
            "(vocab_size); resize the model with resize_token_embeddings, or name a tokenizer that fits"
        )


def reward_model_batch(
    prompts: Sequence[Sequence[Mapping[str, Any]]],
    responses: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> tuple[Batch, float]:
    """Return the tokenized conversations as a batch of responses, and the fraction of truncated conversations.

    Args:
        prompts: the prompt of each response, as a list of ``{"role", "content"}`` messages.
        responses: the B responses of the policy.
        tokenizer: the reward model's tokenizer, whose chat template is applied.
        max_length: maximum number of tokens per conversation; longer conversations are truncated on the left.
    """
    chats: Any = [[*prompt, _answer(text)] for prompt, text in zip(prompts, responses, strict=True)]
    rendered: Any = tokenizer.apply_chat_template(chats, return_dict=False)
    too_long = sum(len(ids) > max_length for ids in rendered) / len(rendered)
    return Batch.of([[] for _ in rendered], [ids[-max_length:] for ids in rendered]), too_long


def check_reward_model_template(
    prompts: Sequence[Sequence[Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase, field: str
) -> None:
    """Raise a ``ConfigError`` that names ``field`` if the chat template cannot render an answer to every prompt.

    Some templates reject certain chats, such as chats with a system message.
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
