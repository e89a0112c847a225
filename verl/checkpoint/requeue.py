"""Determines how to resume a run that has ended, with the same command or as a requeued job."""

from pathlib import Path

from verl.checkpoint.folders import checkpoints
from verl.config.common import RunConfig
from verl.config.errors import ConfigError
from verl.config.run_file import RUN_CONFIG, read_run_config, run_option


def is_requeued(trainer: RunConfig) -> bool:
    """Return whether this run was already started in the same folder from the same ``resume_from_path``."""
    if trainer.resume_mode != "path":
        return False
    try:
        saved = read_run_config(Path(trainer.default_local_dir) / RUN_CONFIG)
    except ConfigError:
        return False
    return bool(run_option(saved, "trainer", "resume_from_path") == trainer.resume_from_path)


def resume_line(trainer: RunConfig) -> str:
    """Return a line with the options for resuming a run that has ended."""
    folder = Path(trainer.default_local_dir)
    if (folder / "summary.json").is_file():  # a run writes this file last
        return f"the run is complete: {folder}/summary.json"
    latest = max(checkpoints(folder), default=None)
    purpose = "start again (there is no checkpoint yet)" if latest is None else f"resume from step {latest}"
    options = [f"trainer.default_local_dir={trainer.default_local_dir}"]
    # A run that has not written a checkpoint restarts from the checkpoint ``resume_from_path``.
    if trainer.resume_mode == "disable" or (trainer.resume_mode == "path" and latest is not None):
        options += ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    return f"to {purpose}, run the same command with {' '.join(options)}"
