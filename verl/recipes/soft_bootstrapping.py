"""Semantic Soft Bootstrapping (arXiv 2512.05105): the policy distils its answers to prompts that show its own mistakes.

A prompt with a correct and a wrong response is sampled again with both of them in the prompt, h. From the correct ones
among the new responses, y, the policy p learns what the first model q would say under h, given the question x alone:

    L = T^2 times the mean over all tokens of KL(q(. | h, y_<t) || p(. | x, y_<t)), both at temperature T = 2

These are ``teacher.coef=4``, ``teacher.loss=forward_kl`` and ``teacher.temperature=2``; the teacher is the model from
which the run starts. The authors sample every y before training, with the first model, and learn from each y several
times; here the policy of each step samples, as they do only in the first step. The wording of the prompt is our own.
Metrics that compare the engine with the policy are large, because the engine sampled y under h.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from verl.batch import Batch
from verl.data.prompt_record import PromptRecord
from verl.method import Method

SHOWN = "soft_bootstrapping"
"""Key in ``extra_info`` of the messages h under which a response was sampled."""
TEXT = (
    "\n\nA correct solution:\n\n{correct}\n\nA wrong solution:\n\n{wrong}\n\n"
    "Write one complete solution, step by step. Avoid the mistake of the wrong one, and do not mention these two."
)
"""Addition to the question."""


class SoftBootstrapping(Method):
    """Method that learns correct responses, sampled with two earlier responses in the prompt, without these."""

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return prompts with a correct response and a wrong one of the most frequent wrong answer, if they fit."""
        edited: dict[int, PromptRecord] = {}
        for place, responses in enumerate(self.by_prompt(batch)) if round == 1 else ():
            judged = list(zip(responses.texts, responses.verdicts, strict=True))
            correct = [text for text, verdict in judged if verdict.correct]
            wrong = [(text, verdict.answer) for text, verdict in judged if not verdict.correct]
            if not correct or not wrong:
                continue
            ((usual, _),) = Counter(answer for _, answer in wrong).most_common(1)
            mistake = next(text for text, answer in wrong if answer == usual)
            record = responses.records[0]
            question = str(record.messages[-1]["content"])
            hinted = self.edit_prompt(record, question + TEXT.format(correct=correct[0], wrong=mistake))
            if len(hinted.input_ids) <= self.config.data.max_prompt_length:
                edited[place] = hinted
        return edited

    def learn_from(self, batch: Batch) -> Batch:
        """Return the responses after the original questions; only correct ones to edited prompts are learned from."""
        originals = [self.prompts[record.uid] for record in batch.records]
        pairs = list(zip(batch.records, originals, strict=True))
        hinted = torch.tensor([record.input_ids != original.input_ids for record, original in pairs])
        records = [
            replace(original, extra_info={**original.extra_info, SHOWN: record.messages}) if edited else original
            for (record, original), edited in zip(pairs, hinted.tolist(), strict=True)
        ]
        asked = batch.after([original.input_ids for original in originals]).widened(batch.width)
        correct = torch.tensor([verdict.correct for verdict in batch.verdicts])
        return asked.merge(batch.without("tokens", "source")).fill(
            records=records, learned=batch.learned & hinted & correct
        )


def shown(record: PromptRecord, response: str) -> list[dict[str, Any]] | None:
    """Return the messages under which the ``response`` was sampled, or None if they were the question alone."""
    return record.extra_info.get(SHOWN)
