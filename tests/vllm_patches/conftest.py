"""Processes in which engines start, and the models and prompts that their tests share."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.vllm_patches import engines, zoo
from verl.cluster.network import free_port

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
IN_PROCESS = QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ALONE = QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

Run = Callable[..., Any]


def start(environment: dict[str, str]) -> None:
    os.environ.update(environment)


@contextmanager
def process(environment: dict[str, str], count: int = 1) -> Iterator[ProcessPoolExecutor]:
    """Processes without memory of this one, in which engines may start."""
    with ProcessPoolExecutor(count, get_context("spawn"), start, (environment,)) as pool:
        yield pool


def on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[engines.Outcome]:
    """What two processes return that call the function together, as :func:`engines.one_of_two_ranks`."""
    port = free_port()
    with process(IN_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, count=2) as pool:
        ranks = [pool.submit(engines.one_of_two_ranks, rank, port, function, *arguments) for rank in (0, 1)]
        return [rank.result() for rank in ranks]


@pytest.fixture(scope="package")
def inside() -> Iterator[Run]:
    """Calls functions in one process that is also the engine's."""
    with process(IN_PROCESS) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture(scope="package")
def outside() -> Iterator[Run]:
    """Calls functions in one process whose engines have processes of their own."""
    with process(ALONE) as pool:
        yield lambda function, *args, **options: pool.submit(function, *args, **options).result()


@pytest.fixture(scope="package")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of the zoo."""
    return lambda name: zoo.build(name, tmp_path_factory.mktemp("zoo") / name)


@pytest.fixture(scope="package")
def qwen(build: Callable[[str], Path]) -> Path:
    return build("qwen2")


@pytest.fixture(scope="package")
def reference(qwen: Path) -> PreTrainedModel:
    return zoo.load(qwen)


@pytest.fixture(scope="package")
def prompts() -> list[list[int]]:
    """From 3 tokens to several times the step's budget."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(128, (length,), generator=generator).tolist() for length in (3, 70, 40, 100, 9, 64)]
