"""Byte-level tokenizer of the embedded arithmetic task and of the tiny models trained on it."""

from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>"]
"""Ids 0 to 5, in this order; the 256 bytes follow."""

TOOL_TOKENS = {"<|tool|>": True, "<tool_call>": False, "</tool_call>": False}
"""Tokens of models that call tools, behind the bytes -> whether they are special; calls are part of the text."""

TOOL_PHRASES = ("What is ", " * ", '{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}", r"\boxed{")
"""Text of experiment=arithmetic_tools that is one token each, behind these: a conversation has 42 tokens, not 103."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Like ChatML, but a turn opens with one token instead of the characters of its role: tiny models have a short context.
"""


def make_tiny_tokenizer(tools: bool = False) -> Qwen2Tokenizer:
    """The tokenizer: one token per byte of UTF-8, and no token added by ``encode``. With ``tools`` it is that of a
    model which calls them, whose frequent phrases are tokens too.

    ``decode(encode(text)) == text`` for any text in Unicode's form NFC. The end of a turn, ``<|im_end|>``, is the
    end-of-sequence token. 262 tokens in all, 271 with ``tools``. The class is Qwen2's, without merges, because
    ``transformers`` loads the tokenizer of a Qwen2 model as that class, whatever it was saved as.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([*SPECIAL_TOKENS, *symbols])},
        merges=[],
        pad_token="<|pad|>",
        unk_token=None,  # type: ignore[arg-type]  # a byte-level vocabulary has no unknown token
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    if tools:
        added = TOOL_TOKENS | dict.fromkeys(TOOL_PHRASES, False)
        tokenizer.add_tokens([AddedToken(token, special=special) for token, special in added.items()])
    return tokenizer
