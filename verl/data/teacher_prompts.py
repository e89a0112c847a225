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
from verl.verifiers.verdict import Verdict

RESPONSE = ("response", "verdict", "siblings")
"""Parameters for which a function gets the response to read, its verdict, and the prompt's other responses."""
EXAMPLE = {"response": "", "verdict": Verdict(False, False, "missing", score=0.0), "siblings": []}


class TeacherPrompts:
    """Prompts that ``teacher.prompt`` makes of records, such as the question with its solution, in ``data.template``.

    Args:
        path: Import path of a function that takes a :class:`PromptRecord` and returns a text or a list of messages. If
            it has parameters named ``response``, ``verdict`` and ``siblings``, it gets the text of the response to
            read, its :class:`Verdict`, and a pair of these for each of the prompt's other responses, and may return
            None, so that the teacher reads the policy's prompt.
        limit: Maximum number of tokens of a prompt and its response for the teacher, or None.

    Raises ``ConfigError`` if the function cannot be loaded, or does not accept these arguments.
    """

    def __init__(self, path: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> None:
        self.function = UserFunction("teacher.prompt", path, ["record"], optional=RESPONSE)
        self.data, self.tokenizer, self.limit = data, tokenizer, limit
        self._known: dict[int, list[int]] = {}

    @property
    def read_verdicts(self) -> bool:
        """Whether prompts depend on responses and their verdicts."""
        return bool(self.function.optional)

    def try_on(self, record: PromptRecord) -> None:
        """Call the function with ``record`` and an empty, wrong response; raises what :meth:`tokens` raises."""
        self.tokens(record, EXAMPLE)

    def tokens(self, record: PromptRecord, of_response: dict[str, Any]) -> list[int]:
        """Return the token ids of the teacher's prompt for ``record``.

        Args:
            of_response: Values of the parameters ``RESPONSE``, which need not be there unless ``read_verdicts``.

        Raises ``ConfigError`` if the function raises, or returns no text and no chat that the template takes.
        """
        if record.uid in self._known:
            return self._known[record.uid]
        where = f"{self.function.where}, prompt {record.uid}"
        optional = {name: of_response[name] for name in self.function.optional}
        returned: Any = self.function(deepcopy(record), **optional)
        if returned is None and optional:
            return record.input_ids
        messages = read_messages({"prompt": returned}, where, "prompt")
        try:
            tokens = render(messages, self.data, self.tokenizer, record.tools)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not optional:
            self._known[record.uid] = tokens
        return tokens

    def of_batch(self, batch: Batch) -> list[list[int]]:
        """Return the token ids of the teacher's prompt for each response of ``batch``.

        Raises ``ConfigError`` if a prompt with its response is longer than the teacher reads.
        """
        prompts = [self.tokens(*row) for row in zip(batch.records, _of_responses(batch), strict=True)]
        responses = batch.response_lengths.tolist()
        lengths = [len(prompt) + length for prompt, length in zip(prompts, responses, strict=True)]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if self.limit is not None and lengths[longest] > self.limit:
            raise ConfigError(
                f"{self.function.where}: the teacher's prompt {batch.records[longest].uid} and its response have "
                f"{lengths[longest]} tokens, and the teacher reads {self.limit}; return shorter prompts"
            )
        return prompts


def _of_responses(batch: Batch) -> list[dict[str, Any]]:
    """Return the values of the parameters ``RESPONSE`` for each response, or empty mappings without verdicts."""
    if "verdicts" not in batch:
        return [{} for _ in batch.records]
    judged = list(zip(batch.texts, batch.verdicts, strict=True))
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group.tolist()):
        groups.setdefault(group, []).append(row)
    found = []
    for row, ((text, verdict), group) in enumerate(zip(judged, batch.group.tolist(), strict=True)):
        siblings = [judged[other] for other in groups[group] if other != row]
        found.append({"response": text, "verdict": verdict, "siblings": siblings})
    return found
