"""The judge of a run where it waits for sampling: a model in the run, and comparisons within a group.

Legend: B responses, n consecutive responses per prompt.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.judge import JUDGE
from verl.config.ppo import PPOConfig
from verl.config.rewards import VERIFIER, summands
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.data.templates import render_untrusted
from verl.rewards.combined import INAPPLICABLE, add_verdicts
from verl.rewards.custom import CustomFunctionError, verdict_of
from verl.rewards.judge import JudgeError, judge_prompts, read_answers
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import Job, Scorer, find_scorer
from verl.single_controller.generation import generate_responses
from verl.single_controller.roles import PolicyWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.verifiers.verdict import Verdict

Judged = Callable[[], list[Verdict | None]]
"""Function that waits for the judge, and returns its verdicts on B responses, None for those that it does not score."""

Question = tuple[tuple[int, ...], Job]
"""One response to score, or two to compare, by row, and the call of the judge."""


@dataclass(eq=False)
class Judging:
    """Judge of responses that have been sampled (``JudgeConfig.waits``)."""

    config: PPOConfig
    verifiers: VerifierPool
    policy: PolicyWorkers
    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the model in the run that judges, or None if the judge is at an address."""
    workers: WorkerGroup | None
    """Engines of a frozen judge, or None."""

    def begin(self, records: Sequence[PromptRecord], texts: Sequence[str], n: int, finished: Collection[int]) -> Judged:
        """Start to judge those of B responses that are ``finished``.

        A service judges while the run goes on, the policy at once, before its engines sleep, and a frozen model when
        its verdicts are asked for.
        """
        questions = [question for question in self._questions(records, texts, n) if {*question[0]} <= {*finished}]
        jobs = [job for _, job in questions]
        if self.tokenizer is None:
            pending = self.verifiers.submit_judgements(jobs)
            return lambda: self._by_row(questions, pending.result(), len(records))
        verdicts = self._ask_model(jobs) if self.workers is None else None
        return lambda: self._by_row(questions, verdicts or self._ask_model(jobs), len(records))

    def add(self, record: PromptRecord, base: Verdict | None, judged: Verdict) -> Verdict:
        """Return the verdict of a sum, where ``base`` is that of all its functions but the judge, if it has others."""
        path = find_scorer(record.data_source).path
        functions = not any(part == VERIFIER for _, part in summands(path))
        if base is not None and base.reason in ("error", *(("timeout", "memory", "crash") if functions else ())):
            return base
        if judged.reason != "custom":
            return judged
        return add_verdicts([(1.0, ""), (_weight(path), JUDGE)], [base or INAPPLICABLE, judged])

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
                info = {**record.extra_info} | ({"other_response": texts[rows[1]]} if judge.pairs else {})
                call = (Scorer(JUDGE, is_custom=True), record.data_source, texts[rows[0]], record.ground_truth, info)
                questions.append((rows, Job(*call, is_part=True)))
        return questions

    def _by_row(
        self, questions: Sequence[Question], verdicts: Sequence[Verdict], num_rows: int
    ) -> list[Verdict | None]:
        """Return the verdict on each row: its own, or the share of comparisons won of those that did not fail."""
        won: list[list[tuple[float, Verdict]]] = [[] for _ in range(num_rows)]
        found: list[Verdict | None] = [None] * num_rows
        for (rows, _), verdict in zip(questions, verdicts, strict=True):
            for row in rows:
                found[row] = found[row] or verdict
                if len(rows) == 2 and verdict.reason == "custom":
                    assert verdict.score is not None
                    won[row].append((verdict.score if row == rows[0] else 1 - verdict.score, verdict))
        for row, comparisons in enumerate(won):
            if comparisons:
                score, first = fmean(score for score, _ in comparisons), comparisons[0][1]
                agree = fmean(verdict.extras["orders_agree"] for _, verdict in comparisons)
                extras = {**first.extras, "orders_agree": agree, "comparisons": len(comparisons)}
                correct = score >= self.config.reward_score.judge.threshold
                found[row] = replace(first, score=score, correct=correct, extras=extras)
        return found

    # --- A model in the run ---

    def _ask_model(self, jobs: Sequence[Job]) -> list[Verdict]:
        """Return the verdicts of a model in the run, which are failures where its answers cannot be read."""
        judge = self.config.reward_score.judge
        given = judge.arguments()
        rubric = {} if given.get("rubric") is None else {"rubric": given["rubric"]}
        records = [{**(job.extra_info or {}), **rubric} for job in jobs]
        asked = [
            judge_prompts(given.get("instructions"), job.solution, job.ground_truth, record, given["one_by_one"])
            for job, record in zip(jobs, records, strict=True)
        ]
        answers = self._answers(list(dict.fromkeys(text for texts in asked for text in texts)))
        verdicts = []
        for job, record, texts in zip(jobs, records, asked, strict=True):
            try:
                by_vote = [[answers[text][vote] for text in texts] for vote in range(judge.votes)]
                result = read_answers(by_vote, record, given["one_by_one"], judge.threshold)
                verdicts.append(verdict_of(JUDGE, job[1:5], result, True))
            except (JudgeError, KeyError) as error:
                why = f"{error}" if isinstance(error, JudgeError) else self._too_long
                failure = CustomFunctionError(f"reward_score.judge on data_source={job.data_source!r}: {why}")
                verdicts.append(self.verifiers.failure(failure, job))
        return verdicts

    @property
    def _too_long(self) -> str:
        limit = self.config.reward_score.judge.model.max_prompt_length
        return f"a prompt has more than reward_score.judge.model.max_prompt_length={limit} tokens; raise it"

    def _answers(self, prompts: Sequence[str]) -> Mapping[str, list[str]]:
        """Return the model's answer to each prompt in each vote, without prompts that are too long.

        The random stream of an answer depends on the run's seed, the prompt and the vote alone.
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
    """Return the pairs of n responses in a ring in which each is compared with at least ``opponents`` neighbours."""
    neighbours = [(i, (i + distance) % n) for distance in range(1, (opponents + 1) // 2 + 1) for i in range(n)]
    pairs = {frozenset(pair): pair for pair in reversed(neighbours) if pair[0] != pair[1]}
    return [*reversed(pairs.values())]


def _weight(path: str) -> float:
    """Return the weight of the judge in a sum, or 0 if it is in none."""
    return next((weight for weight, part in summands(path) if part == JUDGE), 0.0)


def _uid(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest(), "big")
