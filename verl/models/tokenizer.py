"""The tokenizer of a model."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.config.errors import ConfigError


def load_tokenizer(
    path: str, trust_remote_code: bool, field: str = "model.path", needs_chat_template: bool = True
) -> PreTrainedTokenizerBase:
    """The model's tokenizer; errors name the config's ``field``.

    Raises:
        ConfigError: there is none, or it lacks an end-of-sequence token or, if it needs one, a chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}={path!r}: no tokenizer there: {str(error).splitlines()[0]}") from error
    # From a folder that names the model's type and holds no vocabulary, transformers makes an empty tokenizer.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(f"{field}={path!r}: no tokenizer there, only special tokens; copy the model's files")
    lacks_template = needs_chat_template and tokenizer.chat_template is None
    if lacks_template or tokenizer.eos_token_id is None:
        wanted = "a chat template and an end-of-sequence token" if needs_chat_template else "an end-of-sequence token"
        raise ConfigError(f"{field}={path!r}: its tokenizer needs {wanted}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
