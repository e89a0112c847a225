"""Verdicts on responses while others are still sampled."""

from collections.abc import Sequence

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
        """``records``: the prompt of each response, B."""
        self.records = records
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.verifiers = verifiers
        self.texts = [""] * len(records)
        """What verifiers read of each response."""
        self._gathered: list[int] = []
        self._submitted: list[tuple[list[int], PendingScores]] = []

    def add(self, part: Batch) -> None:
        """Take responses that have ended; their ``request`` says which they are."""
        rows = part.request.tolist()
        tokens = [ids.tolist() for ids in part.response_tokens.split(part.response_lengths.tolist())]
        for row, text in zip(rows, decode_responses(tokens, self.tokenizer, self.stop_strings), strict=True):
            self.texts[row] = text
        self._gathered += rows
        if not self._submitted or self._submitted[-1][1].done():
            self.submit()

    def submit(self) -> None:
        """Have the gathered responses verified; also after the last :meth:`add`."""
        rows, self._gathered = self._gathered, []
        if not rows:
            return
        records = [self.records[row] for row in rows]
        pending = self.verifiers.submit_batch(
            [record.data_source for record in records],
            [self.texts[row] for row in rows],
            [record.ground_truth for record in records],
            [record.extra_info for record in records],
            [record.opens_thought for record in records],
        )
        self._submitted.append((rows, pending))

    def verdicts(self) -> list[Score]:
        """Wait for the verdicts on all responses, B. Raises the first error of any."""
        verdicts: dict[int, Score] = {}
        for rows, pending in self._submitted:
            verdicts |= zip(rows, pending.result(), strict=True)
        return [verdicts[row] for row in range(len(self.records))]
