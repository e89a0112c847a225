"""What the files of a model say of its sequences: how long they may be, and which tokens end them."""

from collections.abc import Iterable

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from verl.config.errors import ConfigError


def sequence_limit(path: str, trust_remote_code: bool) -> int | None:
    """Longest sequence that the model was made for; None where its config does not say.

    Raises:
        ConfigError: there is no model.
    """
    return getattr(model_config(path, trust_remote_code).get_text_config(), "max_position_embeddings", None)


def check_sequence_fits(field: str, length: int, model_field: str, path: str, trust_remote_code: bool) -> None:
    """Whether the model at ``path`` takes sequences of ``length`` tokens.

    Args:
        field: the option, or the sum of options, that sets ``length``.
        model_field: the option that names the model.

    Raises:
        ConfigError: it does not; the message names both fields.
    """
    limit = sequence_limit(path, trust_remote_code)
    if limit is not None and length > limit:
        raise ConfigError(
            f"{field}={length}: {model_field}={path!r} takes sequences of {limit} tokens (max_position_embeddings in "
            f"its config.json); lower {field} or name another model"
        )


def end_tokens(
    path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool, further: Iterable[int] = ()
) -> list[int]:
    """Tokens that end a response, in ascending order.

    The tokenizer's end-of-sequence token, those of the model's ``generation_config.json`` (in a folder without that
    file, of its ``config.json``), and ``further`` ones.

    Raises:
        ConfigError: there is no model.
    """
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(model_config(path, trust_remote_code))
    named = generation.eos_token_id
    ids = {tokenizer.eos_token_id, *further, *(named if isinstance(named, list) else [named])}
    return sorted(token for token in ids if token is not None)


def model_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    """What a model's ``config.json`` says.

    Raises:
        ConfigError: there is no model.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no model there: {str(error).splitlines()[0]}") from error
