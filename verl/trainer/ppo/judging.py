"""Judges responses after sampling, if the judge is a model in the run or compares responses to the same prompt.

Legend: B responses, n consecutive responses per prompt.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.judge import JUDGE
from verl.config.ppo import PPOConfig
from verl.config.rewards import summands
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.data.templates import render_untrusted
from verl.rewards.combined import INAPPLICABLE, add_verdicts
from verl.rewards.custom import CustomFunctionError, verdict_of
from verl.rewards.judge import JudgeError, judge_prompts, read_answers
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import Job, find_scorer, judge_job
from verl.single_controller.generation import generate_responses
from verl.single_controller.roles import PolicyWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.utils.user_code import described
from verl.verifiers.answers import after_thinking, extract_boxed
from verl.verifiers.verdict import Verdict

Judged = Callable[[], list[Verdict | None]]
"""Function that waits for the judge and returns B verdicts, with None for responses that the judge does not score."""

Question = tuple[tuple[int, ...], Job]
"""Index of one response to score, or indices of two responses to compare, with the corresponding job for the judge."""


@dataclass(eq=False)
class Judging:
    """Judge that scores responses after they have been sampled (see ``JudgeConfig.waits``)."""

    config: PPOConfig
    verifiers: VerifierPool
    policy: PolicyWorkers
    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the judge model, or None if the judge is an external service."""
    workers: WorkerGroup | None
    """Workers that run a frozen judge model, or None if there is no such model."""

    def begin(self, records: Sequence[PromptRecord], texts: Sequence[str], n: int, finished: Collection[int]) -> Judged:
        """Start judging the responses whose indices are in ``finished``.

        An external service judges in the background. The policy judges immediately, before its engines sleep. A frozen
        model judges when its verdicts are requested.
        """
        questions = [question for question in self._questions(records, texts, n) if {*question[0]} <= {*finished}]
        jobs = [job for _, job in questions]
        if self.tokenizer is None:
            pending = self.verifiers.submit_judgements(jobs)
            return lambda: self._by_row(questions, pending.result(), texts)
        verdicts = self._ask_model(jobs) if self.workers is None else None
        return lambda: self._by_row(questions, verdicts or self._ask_model(jobs), texts)

    def add(self, record: PromptRecord, base: Verdict | None, judged: Verdict) -> Verdict:
        """Add the judge's verdict to ``base``, the verdict of the other reward functions, or None if there are none."""
        if base is not None and base.failed:
            return base
        if judged.failed:
            return judged
        weight = _weight(find_scorer(record.data_source).path)
        return add_verdicts([(1.0, ""), (weight, JUDGE)], [base or INAPPLICABLE, judged])

    # --- Questions ---

    def _questions(self, records: Sequence[PromptRecord], texts: Sequence[str], n: int) -> list[Question]:
        judge = self.config.reward_score.judge
        pairs = ring(n, judge.opponents) if judge.pairs else [(i,) for i in range(n)]
        questions = list[Question]()
        for start in range(0, len(records), n):
            record = records[start]
            if not _weight(find_scorer(record.data_source).path):
                continue
            for rows in (tuple(start + place for place in pair) for pair in pairs):
                given = (record.data_source, texts[rows[0]], record.ground_truth, record.extra_info)
                questions.append((rows, judge_job(*given, texts[rows[1]] if judge.pairs else None)))
        return questions

    def _by_row(
        self, questions: Sequence[Question], verdicts: Sequence[Verdict], texts: Sequence[str]
    ) -> list[Verdict | None]:
        """Return each response's verdict. In pairwise judging, the score is the mean over successful comparisons."""
        won: list[list[tuple[float, Verdict]]] = [[] for _ in texts]
        found: list[Verdict | None] = [None for _ in texts]
        for (rows, _), verdict in zip(questions, verdicts, strict=True):
            for row in rows:
                if found[row] is None:
                    found[row] = replace(verdict, boxed=extract_boxed(after_thinking(texts[row])) is not None)
                if len(rows) == 2 and not verdict.failed:
                    assert verdict.score is not None
                    won[row].append((verdict.score if row == rows[0] else 1 - verdict.score, verdict))
        for row, comparisons in enumerate(won):
            own = found[row]
            if own is not None and comparisons:
                score, first = fmean(score for score, _ in comparisons), comparisons[0][1]
                agree = fmean(verdict.extras["orders_agree"] for _, verdict in comparisons)
                extras = {**first.extras, "orders_agree": agree, "comparisons": len(comparisons)}
                correct = score >= self.config.reward_score.judge.threshold
                found[row] = replace(first, boxed=own.boxed, score=score, correct=correct, extras=extras)
        return found

    # --- A model in the run ---

    @cached_property
    def _given(self) -> dict[str, Any]:
        return self.config.reward_score.judge.arguments()

    def _ask_model(self, jobs: Sequence[Job]) -> list[Verdict]:
        """Return the judge model's verdict on each job. Answers that cannot be parsed yield failed verdicts."""
        asked = [self._prompts(job) for job in jobs]
        answers = self._answers([*dict.fromkeys(text for texts in asked if isinstance(texts, list) for text in texts)])
        return [
            self._read(job, texts, answers) if isinstance(texts, list) else texts
            for job, texts in zip(jobs, asked, strict=True)
        ]

    def _record(self, job: Job) -> dict[str, Any]:
        rubric = self._given.get("rubric")
        return {**(job.extra_info or {}), **({} if rubric is None else {"rubric": rubric})}

    def _prompts(self, job: Job) -> list[str] | Verdict:
        """Return the judge's prompts for one vote, or a failure if the record or its rubric is malformed."""
        instructions, one_by_one = self._given.get("instructions"), self._given["one_by_one"]
        try:
            return judge_prompts(instructions, job.solution, job.ground_truth, self._record(job), one_by_one)
        except (JudgeError, ValueError, TypeError, KeyError) as error:
            return self._failure(job, f"no prompt can be made of the record and its rubric: {described(error)}")

    def _read(self, job: Job, texts: Sequence[str], answers: Mapping[str, list[str]]) -> Verdict:
        judge = self.config.reward_score.judge
        if not {*texts} <= answers.keys():
            limit = f"reward_score.judge.model.max_prompt_length={judge.model.max_prompt_length}"
            return self._failure(job, f"a prompt has more than {limit} tokens; raise it", tolerated=True)
        by_vote = [[answers[text][vote] for text in texts] for vote in range(judge.votes)]
        try:
            result = read_answers(by_vote, self._record(job), self._given["one_by_one"], judge.threshold)
        except JudgeError as error:
            return self._failure(job, f"{error}")
        return verdict_of(JUDGE, job[1:5], result, True)

    def _failure(self, job: Job, why: str, tolerated: bool = False) -> Verdict:
        error = CustomFunctionError(f"reward_score.judge on data_source={job.data_source!r}: {why}")
        return self.verifiers.failure(error, job, tolerated)

    def _answers(self, prompts: Sequence[str]) -> Mapping[str, list[str]]:
        """Return the judge model's answers to each prompt, one per vote, leaving out prompts that are too long.

        Each answer's random stream depends only on the run's seed, the prompt and the vote.
        """
        config, tokenizer = self.config, self.tokenizer
        judge = config.reward_score.judge
        assert tokenizer is not None
        ids = {text: render_untrusted(text, tokenizer) for text in prompts}
        ids = {text: tokens for text, tokens in ids.items() if len(tokens) <= judge.model.max_prompt_length}
        if not ids:
            return {}
        records = [PromptRecord(_uid(text), tokens, "judge", None, {}, [], False) for text, tokens in ids.items()]
        whole: Any = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        sampling = SamplingConfig(n=judge.votes, temperature=judge.temperature, **whole)
        batch = self._generate(records, sampling, judge.max_tokens)
        tokens = batch.response_tokens.split(batch.response_lengths.tolist())
        texts = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in tokens]
        return {text: texts[i * judge.votes : (i + 1) * judge.votes] for i, text in enumerate(ids)}

    def _generate(self, records: Sequence[PromptRecord], sampling: SamplingConfig, longest: int) -> Batch:
        config, seed = self.config, self.config.seed
        if self.workers is None:
            return self.policy.generate(records, sampling, seed, max_response_length=longest)
        self.policy.finish_generation()
        deterministic = config.trainer.deals_by_counts(self.workers.device_type)
        engines = (self.workers, config.rollout.tensor_parallel_size)
        batch = generate_responses(*engines, records, sampling, seed, longest, deterministic)
        self.workers.run("finish_generation")
        return batch


def ring(n: int, opponents: int) -> list[tuple[int, int]]:
    """Pair up n responses in a ring, so that each is compared with at least ``opponents`` neighbours."""
    neighbours = [(i, (i + distance) % n) for distance in range(1, (opponents + 1) // 2 + 1) for i in range(n)]
    pairs = {frozenset(pair): pair for pair in reversed(neighbours) if pair[0] != pair[1]}
    return [*reversed(pairs.values())]


def _weight(path: str) -> float:
    """Return the judge's weight in the sum of reward functions ``path``, or 0 if the judge is not part of the sum."""
    return next((weight for weight, part in summands(path) if part == JUDGE), 0.0)


def _uid(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest(), "big")
