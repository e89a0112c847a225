"""A character-level tokenizer for the embedded arithmetic task and the tiny models trained on it."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>"]
"""Ids 0 to 6, in this order."""

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""The characters with a token of their own, after the special tokens: newline and printable ASCII."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Like ChatML, but opening a turn costs one token, not the characters of its role: a tiny model's context is short."""


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: one token per character, no normalisation, no token added by ``encode``.

    ``decode(encode(text)) == text`` for newlines and printable ASCII; any other character becomes ``<|unk|>``. The end
    of a turn, ``<|im_end|>``, is the end-of-sequence token. 103 tokens in all.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
