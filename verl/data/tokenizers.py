"""The tokenizer of the model in training."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.config.load import ConfigError


def load_tokenizer(path: str, trust_remote_code: bool, field: str = "model.path") -> PreTrainedTokenizerBase:
    """The model's tokenizer; errors name the config's ``field``.

    Raises:
        ConfigError: there is none, or it lacks a chat template or an end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}={path!r}: no tokenizer there: {str(error).splitlines()[0]}") from error
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise ConfigError(f"{field}={path!r}: its tokenizer needs a chat template and an end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
