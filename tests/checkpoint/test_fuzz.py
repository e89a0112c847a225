"""Damaged checkpoints: whatever is wrong with a file, it is noticed, and the run resumes or ends with one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from tests.fuzzing import DAMAGE, VALUES, damaged, error_of, fuzz
from tests.kit import MODEL, POINTER, changed, save_checkpoint, save_shards
from verl.checkpoint import resume
from verl.checkpoint.shards import check_same_architecture, saved_shapes
from verl.config import PPOConfig
from verl.utils.files import file_record

STATE = {"job": "ppo", "num_examples": 16, "validations": {}}
FILES = ("manifest.json", "trainer_state.json", MODEL, POINTER, "config.yaml")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def shards(base: Path) -> Path:
    """Shards of a small model."""
    save_shards(base, {"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    return base / "actor" / "shards"


def make_run(base: Path) -> Path:
    """A run with a checkpoint of step 4."""
    root = base / "run"
    shutil.rmtree(root, ignore_errors=True)
    save_checkpoint(root, 4, **STATE)
    (root / "config.yaml").write_text("seed: 0\n")
    return root


def resumes(root: Path, config: PPOConfig) -> resume.Resumption | None:
    """What the run in ``root`` resumes from; None if it ends with a line."""
    found: list[resume.Resumption | None] = []
    lines: list[str] = []
    run = changed(config, trainer={"default_local_dir": str(root)})
    error_of(lambda: found.append(resume.find_resumption(run, lines.append)))
    assert all(len(line.splitlines()) == 1 for line in lines)
    return found[0] if found else None


@fuzz(40, name=st.sampled_from(FILES), damage=DAMAGE)
def files(base: Path, small_config: PPOConfig, name: str, damage: list):
    root = make_run(base)
    path = root / name if (root / name).exists() else root / "global_step_4" / name
    before = path.read_bytes()
    path.write_bytes(damaged(before, damage))
    altered = path.read_bytes() != before
    found = resumes(root, small_config)
    if found is not None:
        assert found.state == STATE | {"step": 4}
    # What the manifest lists is compared with it; the pointer and the options are not needed.
    assert (found is None) == altered or name in ("manifest.json", POINTER, "config.yaml")
    assert found is not None or name not in (POINTER, "config.yaml")


@fuzz(25, state=VALUES | st.fixed_dictionaries({}, optional={"job": VALUES, "num_examples": VALUES}))
def states(base: Path, small_config: PPOConfig, state: object):
    # As by somebody who corrects the manifest too.
    root = make_run(base)
    folder = root / "global_step_4"
    (folder / "trainer_state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["trainer_state.json"] = vars(file_record(folder / "trainer_state.json"))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = resumes(root, small_config)
    assert (found is not None) == isinstance(state, dict)
    if found is not None:
        parts = {"actor": small_config.model}
        assert error_of(lambda: resume.check_resumable(found, "ppo", 16, parts), "global_step_4")


@fuzz(40, damage=DAMAGE)
def headers(base: Path, shards: Path, damage: list):
    broken = base / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(shards, broken)
    (file,) = broken.glob("*.safetensors")
    file.write_bytes(damaged(file.read_bytes(), damage))
    shapes = {"a": torch.Size([2, 3]), "b": torch.Size([4])}
    error_of(lambda: check_same_architecture(broken, saved_shapes(broken), shapes), broken)


test_files, test_many_files = files
test_states, test_many_states = states
test_headers, test_many_headers = headers


def test_intact_checkpoint_is_read(base: Path, small_config: PPOConfig, shards: Path):
    root = make_run(base)
    assert resumes(root, small_config) == resume.Resumption(root / "global_step_4", 4, STATE | {"step": 4})
    assert saved_shapes(shards) == {"model.a": torch.Size([2, 3]), "model.b": torch.Size([4])}
