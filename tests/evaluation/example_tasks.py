"""Configurations, tasks and stand-ins for engines that several tests of the evaluation use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from verl.config import CONFIG_DIR
from verl.config.evaluation import EvaluationConfig, parse_evaluation_config
from verl.evaluation.benchmarks import Problem
from verl.evaluation.targets import Target
from verl.evaluation.tasks import EvaluationTask
from verl.rollout.requests import FinishedSample, FinishedSamples, SampleRequest


def evaluation_config(*overrides: str, **changes: Any) -> EvaluationConfig:
    """The embedded evaluation with overrides, and then with fields replaced."""
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = parse_evaluation_config(compose("evaluation", overrides=["evaluation=embedded", *overrides]))
    return replace(config, **changes)


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
    """Engines that answer a request after as many messages as its seed says, at most three."""

    def __init__(self, num_engines: int) -> None:
        self.queues: list[list[tuple[int, SampleRequest]]] = [[] for _ in range(num_engines)]
        self.asked: list[SampleRequest] = []
        self._replies: dict[int, FinishedSamples] = {}

    @property
    def busy(self) -> bool:
        return bool(self._replies)

    def send(self, engine: int, requests: list[SampleRequest], steps: int) -> None:
        assert engine not in self._replies and steps > 0
        self.asked += requests
        queue = self.queues[engine]
        queue += [(request.stream % 3, request) for request in requests]
        answers = [_answer(request) for left, request in queue if left == 0]
        self._replies[engine] = FinishedSamples(answers, num_waiting=0, num_ended=len(answers))
        queue[:] = [(left - 1, request) for left, request in queue if left > 0]

    def receive(self, from_all: bool) -> list[tuple[int, FinishedSamples]]:
        engines = sorted(self._replies) if from_all else [min(self._replies)]
        return [(engine, self._replies.pop(engine)) for engine in engines]


def _answer(request: SampleRequest) -> FinishedSample:
    text = f"{request.prompt_ids} {request.stream} \\boxed{{{request.stream % 3}}}"
    return FinishedSample(request.key, text, len(text), request.stream % 2 == 0, {})
