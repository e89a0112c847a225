"""Verification of finished responses during generation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.data.prompt_record import PromptRecord
from verl.rewards.pool import PendingVerdicts, VerifierPool
from verl.rewards.registry import can_score
from verl.rollout.environments.conversations import policy_texts
from verl.trainer.logging.rollout_metrics import score_tensors
from verl.trainer.ppo.judging import Judged, Judging
from verl.verifiers.verdict import Verdict


@dataclass(eq=False)
class Verification:
    """Asynchronous verification of the responses to ``records`` as they finish.

    While the verifiers are busy, new responses are collected and sent in one batch.
    """

    records: Sequence[PromptRecord]
    """Prompts of the B responses."""
    tokenizer: PreTrainedTokenizerBase
    stop_strings: Sequence[str]
    verifiers: VerifierPool
    environment_reward: str = "add"
    """Option ``rollout.multi_turn.reward``."""
    optional: bool = False
    """Whether responses that no verifier can score get the score 0 with the reason ``unscored``."""
    judging: Judging | None = None
    """Judge that scores responses after sampling, or None if there is no judge or the verifiers call it."""
    group_size: int = 1
    """Number of consecutive responses per prompt."""
    batch: Batch | None = None
    """Batch to which :meth:`finish` adds the verdicts. Afterwards, it is None."""

    def __post_init__(self) -> None:
        self.texts = [""] * len(self.records)
        """List of the B response texts that are passed to the verifiers."""
        self._environment_rewards: dict[int, float] = {}
        self._unscored: list[int] = []
        self._gathered: list[int] = []
        self._submitted: list[tuple[list[int], PendingVerdicts]] = []
        self._judged: Judged | None = None
        self._finished: set[int] = set()

    def add(self, part: Batch) -> None:
        """Add finished responses. Their column ``request`` contains their indices in ``records``."""
        rows = part.request.tolist()
        self._finished |= {*rows}
        for row, text in zip(rows, policy_texts(part, self.tokenizer, self.stop_strings), strict=True):
            self.texts[row] = text
        if "environment_rewards" in part:
            self._environment_rewards |= zip(rows, part.environment_rewards.tolist(), strict=True)
            if self.environment_reward == "only":
                return
        self._gathered += rows
        if not self._submitted or self._submitted[-1][1].done():
            self.submit()

    def submit(self) -> None:
        """Submit the collected responses. Call :meth:`submit` once more after the last :meth:`add`."""
        rows, self._gathered = self._gathered, []
        if self.optional:
            known = {row for row in rows if can_score(self.records[row].data_source, self.records[row].ground_truth)}
            self._unscored += [row for row in rows if row not in known]
            rows = [row for row in rows if row in known]
        if not rows:
            return
        records = [self.records[row] for row in rows]
        pending = self.verifiers.submit_batch(
            [record.data_source for record in records],
            [self.texts[row] for row in rows],
            [record.ground_truth for record in records],
            [record.extra_info for record in records],
            [record.opens_thought for record in records],
            [record.asks_for_hashes for record in records],
        )
        self._submitted.append((rows, pending))

    def judge(self) -> None:
        """Start the judge, if there is one. Call this method after the last :meth:`submit`."""
        if self.judging is not None:
            self._judged = self.judging.begin(self.records, self.texts, self.group_size, self._finished)

    def verdicts(self) -> list[Verdict]:
        """Wait for the verdicts and return them in the order of ``records``. Re-raise any exception from a verifier."""
        verdicts = dict.fromkeys(self._unscored, Verdict(False, False, "unscored", score=0.0))
        for rows, pending in self._submitted:
            verdicts |= zip(rows, pending.result(), strict=True)
        if self.judging is not None and self._judged is not None:
            for row, judged in enumerate(self._judged()):
                if judged is not None:
                    verdicts[row] = self.judging.add(self.records[row], verdicts.get(row), judged)
        for row, reward in self._environment_rewards.items():
            verdict = verdicts.get(row) or Verdict(reward > 0, False, "environment", score=0.0)
            assert verdict.score is not None
            verdicts[row] = replace(verdict, score=verdict.score + reward)
        return [verdicts[row] for row in sorted(verdicts)]

    def finish(self) -> None:
        """Wait for the verdicts and fill the verifiers' columns of ``batch``. Later calls have no effect."""
        if self.batch is not None:
            fill_verdicts(self.batch, self.verdicts(), self.texts)
            self.batch = None


def fill_verdicts(batch: Batch, verdicts: list[Verdict], texts: list[str]) -> None:
    scores, correct = score_tensors(verdicts)
    batch.fill(texts=texts, verdicts=verdicts, scores=scores, correct=correct)
