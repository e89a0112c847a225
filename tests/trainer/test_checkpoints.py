import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.trainer.checkpoints import latest_checkpoint, remove_checkpoints, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def write_model(folder: Path, text: str = "weights") -> None:
    (folder / "actor" / "huggingface").mkdir(parents=True)
    (folder / "actor" / "huggingface" / "model.safetensors").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_complete_and_the_pointer_follows(tmp_path: Path):
    assert latest_checkpoint(tmp_path) is None
    first = save_checkpoint(tmp_path, 5, write_model, {"step": 5, "mu": {"1": 0.25}})
    assert first == tmp_path / "global_step_5" == latest_checkpoint(tmp_path)
    assert (first / "actor" / "huggingface" / "model.safetensors").read_text() == "weights"
    assert json.loads((first / "trainer_state.json").read_text()) == {"step": 5, "mu": {"1": 0.25}}
    save_checkpoint(tmp_path, 10, write_model, {"step": 10})
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_10"
    assert names(tmp_path) == ["global_step_10", "global_step_5", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10\n"


def test_checkpoints_are_removed_but_those_to_keep(tmp_path: Path):
    for step in (4, 5, 10):
        save_checkpoint(tmp_path, step, write_model, {"step": step})
    remove_checkpoints(tmp_path, keep={10, 4, 7})
    assert names(tmp_path) == ["global_step_10", "global_step_4", "latest_checkpointed_iteration.txt"]
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_10"


def test_the_run_folder_is_made_if_missing(tmp_path: Path):
    assert save_checkpoint(tmp_path / "a" / "run", 1, write_model, {}).is_dir()


def test_while_writing_nothing_has_the_final_name(tmp_path: Path):
    def write(folder: Path) -> None:
        write_model(folder)
        assert not (tmp_path / "global_step_5").exists()
        assert tmp_path in folder.parents  # the same disk, else the rename would be a copy

    save_checkpoint(tmp_path, 5, write, {})
    assert (tmp_path / "global_step_5").is_dir()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_the_older_checkpoint_alone(tmp_path: Path, error: BaseException):
    save_checkpoint(tmp_path, 5, write_model, {"step": 5})

    def fail(folder: Path) -> None:
        write_model(folder)
        raise error

    with pytest.raises(type(error)):
        save_checkpoint(tmp_path, 10, fail, {"step": 10})
    assert names(tmp_path) == ["global_step_5", "latest_checkpointed_iteration.txt"]
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_5"


def test_state_that_is_no_json_leaves_nothing(tmp_path: Path):
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 5, write_model, {"step": object()})
    assert names(tmp_path) == []


def test_a_pointer_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_checkpoint(tmp_path, 5, write_model, {})

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 10, write_model, {})
    assert names(tmp_path) == ["global_step_10", "global_step_5", "latest_checkpointed_iteration.txt"]
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_5"


def test_what_an_earlier_crash_left_unfinished_is_replaced(tmp_path: Path):
    stale = tmp_path / ".global_step_5.unfinished" / "actor" / "huggingface"
    stale.mkdir(parents=True)
    (stale / "old_shard.safetensors").touch()
    final = save_checkpoint(tmp_path, 5, write_model, {})
    assert names(final / "actor" / "huggingface") == ["model.safetensors"]
    assert names(tmp_path) == ["global_step_5", "latest_checkpointed_iteration.txt"]


# A process that may write files of 64 KiB at most meets the errors of a full disk: first a small checkpoint, then a
# model that does not fit.
FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from verl.trainer.checkpoints import save_checkpoint

def write(size):
    def write_model(run):
        folder = run / "actor"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if sys.argv[2] == "safetensors":
            save_file({"w": np.zeros(size, dtype=np.uint8)}, folder / "model.safetensors")
        else:
            (folder / "model.bin").write_bytes(bytes(size))
    return write_model

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
root = Path(sys.argv[1])
save_checkpoint(root, 5, write(1 << 10), {"step": 5})
try:
    save_checkpoint(root, 10, write(1 << 20), {"step": 10})
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("kind", "error"), [("bytes", "OSError"), ("safetensors", "SafetensorError")])
def test_a_full_disk_leaves_nothing_under_a_final_name(tmp_path: Path, kind: str, error: str):
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), kind],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(error) and "File too large" in result.stdout
    assert names(tmp_path) == ["global_step_5", "latest_checkpointed_iteration.txt"]
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step_5"
