"""Verdicts on responses while others are still sampled."""

from collections.abc import Sequence
from concurrent.futures import Future

from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.data.prompt_rows import PromptRecord
from verl.data.responses import decode_responses
from verl.rewards import Score
from verl.rewards.pool import PendingScores, VerifierPool


class Verification:
    """Has the responses of one batch verified as they arrive.

    A batch of the pool begins when the one before has ended. Meanwhile responses gather, so that few messages carry
    them, and one that takes long to verify does not hold up the others one by one.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        verifiers: VerifierPool,
    ) -> None:
        """``records``: of the prompt of each response, B."""
        self.records = records
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.verifiers = verifiers
        self.texts = [""] * len(records)
        self._gathered: list[int] = []
        self._submitted: list[tuple[list[int], PendingScores]] = []

    def add(self, part: Batch) -> None:
        """Take responses that have ended."""
        rows = part.request.tolist()
        tokens = [ids.tolist() for ids in part.response_tokens.split(part.response_lengths.tolist())]
        for row, text in zip(rows, decode_responses(tokens, self.tokenizer, self.stop_strings), strict=True):
            self.texts[row] = text
        self._gathered += rows
        if not self._submitted or self._submitted[-1][1].done():
            self._submit()

    def finish(self) -> tuple[list[str], PendingScores]:
        """What verifiers read of each response, and their scores; after the last :meth:`add`."""
        if self._gathered:
            self._submit()
        return self.texts, _joined(self._submitted, len(self.records))

    def _submit(self) -> None:
        rows, self._gathered = self._gathered, []
        records = [self.records[row] for row in rows]
        pending = self.verifiers.submit_batch(
            [record.data_source for record in records],
            [self.texts[row] for row in rows],
            [record.ground_truth for record in records],
            [record.extra_info for record in records],
            [record.opens_thought for record in records],
        )
        self._submitted.append((rows, pending))


def _joined(parts: Sequence[tuple[list[int], PendingScores]], size: int) -> PendingScores:
    """The scores of batches in the order of their rows; the first error of any."""
    joined: PendingScores = Future()

    def join(_: PendingScores) -> None:
        # The pool works on one batch after another, so the last one's end is the end of all.
        try:
            scores: dict[int, Score] = {}
            for rows, pending in parts:
                scores |= zip(rows, pending.result(), strict=True)
            joined.set_result([scores[row] for row in range(size)])
        except Exception as error:
            joined.set_exception(error)

    parts[-1][1].add_done_callback(join)
    return joined
