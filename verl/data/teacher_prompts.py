"""Prompts for the teacher that differ from the policy's prompts."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
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
"""Optional parameters of the prompt function: the response, its verdict, and the prompt's other responses."""
EXAMPLE = ("", Verdict(False, False, "missing", score=0.0))
"""Response and verdict for testing the prompt function."""


class TeacherPrompts:
    """Calls the function ``teacher.prompt`` and renders the prompts that it returns with ``data.template``.

    Args:
        path: Import path of a function that accepts a :class:`PromptRecord` and returns a string or a list of messages,
            such as the question with its solution. If it has parameters named ``response``, ``verdict`` and
            ``siblings``, they receive the response's text, its :class:`Verdict`, and a pair of these for each of the
            prompt's other responses. With such parameters, it may return None to skip the teacher loss.
        limit: Maximum number of tokens in a prompt and its response for the teacher, or None.

    Raises ``ConfigError`` if the function cannot be loaded or does not accept these arguments.
    """

    def __init__(self, path: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> None:
        self.function = UserFunction("teacher.prompt", path, ["record"], optional=RESPONSE)
        self.data, self.tokenizer, self.limit = data, tokenizer, limit
        self._known: dict[tuple[int, tuple[int, ...]], list[int] | None] = {}

    @property
    def read_verdicts(self) -> bool:
        """Whether the teacher's prompts depend on responses and their verdicts."""
        return bool(self.function.optional)

    def try_on(self, record: PromptRecord, group_size: int) -> None:
        """Test the function with ``record`` and empty responses. Raises the same errors as :meth:`of_batch`."""
        optional = dict(zip(RESPONSE, (*EXAMPLE, [EXAMPLE] * (group_size - 1)), strict=True))
        on_trial = ", on trial with empty, wrong responses" if self.read_verdicts else ""
        self._tokens(record, optional, f"{self.function.where}, prompt {record.uid}{on_trial}")

    def of_batch(self, batch: Batch) -> list[list[int] | None]:
        """Return the token ids of the teacher's prompt for each response in ``batch``, or None for no prompt.

        Prompts that depend on the response are replaced by None if they are too long for the teacher.

        Raises ``ConfigError`` if the function raises an exception, if it returns neither a string nor a chat that the
        template accepts, or if a prompt that depends only on the record is too long.
        """
        prompts = []
        for record, length, optional in zip(
            batch.records, batch.response_lengths.tolist(), self._optional(batch), strict=True
        ):
            where = f"{self.function.where}, prompt {record.uid}"
            if self.read_verdicts:
                prompt = self._tokens(record, optional, where)
            else:
                key = (record.uid, tuple(record.input_ids))
                if key not in self._known:
                    self._known[key] = self._tokens(record, optional, where)
                prompt = self._known[key]
            if prompt is not None and self.limit is not None and len(prompt) + length > self.limit:
                if not self.read_verdicts:
                    raise ConfigError(
                        f"{where}: the teacher's prompt and the response have {len(prompt) + length} tokens, and the "
                        f"teacher reads {self.limit}; return shorter prompts"
                    )
                prompt = None
            prompts.append(prompt)
        return prompts

    def _tokens(self, record: PromptRecord, optional: Mapping[str, Any], where: str) -> list[int] | None:
        """Tokenize the prompt that the function returns. It receives copies, so it cannot change the batch."""
        copied = replace(record, messages=deepcopy(record.messages), extra_info=dict(record.extra_info))
        returned: Any = self.function(copied, **{name: optional[name] for name in self.function.optional})
        if returned is None and self.read_verdicts:
            return None
        messages = read_messages({"prompt": returned}, where, "prompt")
        try:
            return render(messages, self.data, self.tokenizer, record.tools)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _optional(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield the values of the parameters in ``RESPONSE`` for each response, or an empty dict if they are unused."""
        if not self.read_verdicts:
            yield from ({} for _ in batch.records)
            return
        verdicts = [replace(verdict, extras=dict(verdict.extras)) for verdict in batch.verdicts]
        judged, groups = list(zip(batch.texts, verdicts, strict=True)), batch.group.tolist()
        members: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        for row, (text, verdict) in enumerate(judged):
            siblings = [judged[other] for other in members[groups[row]] if other != row]
            yield {"response": text, "verdict": verdict, "siblings": siblings}
