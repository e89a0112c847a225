"""Loads a checkpoint of a run into the workers of its options and saves it again, with no step between the two.

python -m tests.cluster.load_and_save global_step_N OVERRIDE...: into trainer.default_local_dir
"""

import sys
from pathlib import Path

from verl.checkpoint.attempts import Attempt
from verl.checkpoint.folders import step_of
from verl.checkpoint.saver import CheckpointSaver
from verl.config import PPOConfig, load_config
from verl.rollout import engine_environment
from verl.run.session import RaySession

if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    config = load_config(PPOConfig, "ppo_trainer", sys.argv[2:])
    trainer, step = config.trainer, step_of(checkpoint)
    assert step is not None
    folder = Path(trainer.default_local_dir)
    folder.mkdir()
    with RaySession(trainer.nnodes, trainer.n_gpus_per_node, "cpu", trainer, folder) as session:
        environment = engine_environment("cpu", config.rollout.name)
        workers = session.start_workers("verl.workers.hybrid:HybridWorker", config, (12, []), environment)
        workers.run("load", checkpoint, step)
        CheckpointSaver(Attempt.claim(folder), workers, False, False, 0).save(step, {"step": step}, {})
        workers.close()
