"""The prompts under which a teacher reads the policy's responses, if they differ from the policy's own."""

from copy import deepcopy
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.data import DataConfig
from verl.config.errors import ConfigError
from verl.data.prompt_record import PromptRecord
from verl.data.prompt_rows import read_messages, render
from verl.utils.user_code import UserFunction


class TeacherPrompts:
    """Prompts that ``teacher.prompt`` makes of records, such as the question with its solution, in ``data.template``.

    Args:
        path: Import path of a function that takes a :class:`PromptRecord` and returns a text or a list of messages.
        limit: Maximum number of tokens of a prompt and its response for the teacher, or None.

    Raises ``ConfigError`` if the function cannot be loaded, or does not take one argument.
    """

    def __init__(self, path: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> None:
        self.function = UserFunction("teacher.prompt", path, ["record"])
        self.data, self.tokenizer, self.limit = data, tokenizer, limit
        self._known: dict[int, list[int]] = {}

    def tokens(self, record: PromptRecord) -> list[int]:
        """Return the token ids of the teacher's prompt for ``record``.

        Raises ``ConfigError`` if the function raises, or returns no text and no chat that the template takes.
        """
        if record.uid not in self._known:
            where = f"{self.function.where}, prompt {record.uid}"
            returned: Any = self.function(deepcopy(record))
            messages = read_messages({"prompt": returned}, where, "prompt")
            try:
                self._known[record.uid] = render(messages, self.data, self.tokenizer, record.tools)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        return self._known[record.uid]

    def batch(self, batch: Batch) -> Batch:
        """Return the responses of ``batch`` after the teacher's prompts, with the columns ``tokens`` and ``source``.

        Raises ``ConfigError`` if a prompt with its response is longer than the teacher reads.
        """
        prompts = [self.tokens(record) for record in batch.records]
        responses = [ids.tolist() for ids in batch.response_tokens.split(batch.response_lengths.tolist())]
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if self.limit is not None and lengths[longest] > self.limit:
            raise ConfigError(
                f"{self.function.where}: the teacher's prompt {batch.records[longest].uid} and its response have "
                f"{lengths[longest]} tokens, and the teacher reads {self.limit}; return shorter prompts"
            )
        columns = {"source": batch.source} if "source" in batch else {}
        return Batch.of(prompts, responses, **columns)
