"""Configurations, tasks and stand-ins for engines that several tests of the evaluation use."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from verl.batch import Batch
from verl.config.evaluation import EvaluationConfig, parse_evaluation_config
from verl.config.load import compose_config
from verl.evaluation.benchmarks import Problem
from verl.evaluation.targets import Target
from verl.evaluation.tasks import EvaluationTask
from verl.models.tokenizer import load_tokenizer
from verl.rollout.requests import ResponseRequests


@cache
def composed(*overrides: str) -> EvaluationConfig:
    return parse_evaluation_config(compose_config(EvaluationConfig, "evaluation", ["evaluation=embedded", *overrides]))


def evaluation_config(*overrides: str, **changes: Any) -> EvaluationConfig:
    """Return the embedded evaluation with overrides, composed once, and then with fields replaced."""
    return replace(composed(*overrides), **changes)


def make_task(
    folder: Path, answers: list[str], benchmark: str = "sums", temperature: float = 0.6, step: int = 80
) -> EvaluationTask:
    """A task with one problem for each answer."""
    return EvaluationTask(
        target=Target("run", step, "model", "chat", 8),
        benchmark=benchmark,
        temperature=temperature,
        problems=[Problem(i, f"question {i}", answer, "arithmetic", {}, None) for i, answer in enumerate(answers)],
        prompts=[[i, i + 1] for i in range(len(answers))],
        opens_thought=False,
        folder=folder / benchmark / f"T{temperature:g}",
        settings={"temperature": temperature},
        unanswered={},
    )


class FakeEngines:
    """Engines that answer requests a third at a time."""

    def __init__(self, model_path: str) -> None:
        self.tokenizer = load_tokenizer(model_path, False)
        self.prompts: list[list[int]] = []
        self.temperatures: list[float] = []

    def run(
        self, copies: int, requests: ResponseRequests, deterministic: bool, on_finished: Callable[[Batch], None]
    ) -> None:
        """In place of :class:`verl.single_controller.generation.Generation`."""
        self.prompts += requests.prompt_ids
        self.temperatures += [requests.sampling_of(i).temperature for i in requests.rows]
        for third in range(3):
            asked = requests.of([i for i in requests.rows if requests.streams[i] % 3 == third])
            if asked.rows:
                on_finished(self._answers(asked))

    def _answers(self, requests: ResponseRequests) -> Batch:
        pairs = zip(requests.prompt_ids, requests.streams, strict=True)
        texts = [f"{prompt} {stream} \\boxed{{{stream % 3}}}" for prompt, stream in pairs]
        responses = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        cut = torch.tensor([stream % 2 == 0 for stream in requests.streams])
        return Batch.of(requests.prompt_ids, responses, request=torch.tensor(list(requests.rows)), truncated=cut)
