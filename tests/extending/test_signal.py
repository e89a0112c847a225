"""The learning signal from code of one's own: the examples of docs/extending.md, run as a user would."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import small_overrides

from tests.e2e.runs import Run, records
from tests.extending.examples import example
from verl.checkpoint.folders import read_state

CHANCE = """
import zlib

def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(zlib.crc32(solution_str.encode()) % 3 == 0)
"""


def own_signal(folder: Path) -> list[str]:
    """Overrides that name every example of the learning signal."""
    names = ["participation_ratio diff 2", "participation_ratio diff", "participation_ratio"]
    return [
        f"algorithm.adv_estimator={example(folder, 'advantages.py')}:leave_one_out",
        "++algorithm.adv_estimator_kwargs.wrong_weight=0.5",
        f"algorithm.reward_transform={example(folder, 'rewards.py')}:ShorterThanUsual",
        "++algorithm.reward_transform_kwargs.bonus=0.2",
        f"actor.kl_loss_type={example(folder, 'divergences.py')}:pseudo_huber",
        "++actor.kl_loss_type_kwargs.delta=0.5",
        f"algorithm.kl_penalty={folder}/my/divergences.py:pseudo_huber",
        *("algorithm.use_kl_in_reward=true", "actor.kl_loss_coef=0.1"),
        f"calculator.own_metrics=[{example(folder, 'metrics.py')}:participation_ratio]",
        f"calculator.metric_indices_add=[{example(folder, 'tokens.py')}:least_likely]",
        f"reward_manager.indicator_names=[{','.join(names)}]",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_the_examples_train_and_resume_to_the_bit(engine, tiny_model, arithmetic_prompts, tmp_path, monkeypatch):
    (tmp_path / "chance.py").write_text(CHANCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = tmp_path / "run"
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), *own_signal(tmp_path)]
    overrides += ["reward_score.custom_functions=['*=chance:score']", "actor.optim.lr=1e-3", f"rollout.name={engine}"]
    overrides += ["trainer.total_training_steps=3", "trainer.except_save=[1]", "data.val_files=[]"]
    run = Run([*overrides, "trainer.save_hf_model=false"], tmp_path / "whole.log")
    assert run.finish() == 0, run.log.read_text()
    whole = records(folder)
    assert [record["step"] for record in whole] == [1, 2, 3]
    assert all(record["train/reward_transform/change"] >= 0 for record in whole)
    assert any(record["train/reward_transform/change"] > 0 for record in whole)
    measured = [record["cal/overall/layer_1/participation_ratio/mean"] for record in whole]
    assert all(1 < value < 12 for value in measured)
    assert all(record["cal/overall/layer_1/least_likely/mean"] > 1 for record in whole)
    assert whole[-1]["reward_manager/layer_1/participation_ratio/mu"] == pytest.approx(measured[0], rel=0.2)
    assert whole[-1]["actor/kl_loss"] > 0 and whole[-1]["actor/reward_kl_penalty"] > 0
    usual = read_state(folder / "global_step_1")["signal"]["algorithm.reward_transform"]["usual"]
    assert 0.9 * 12 < usual < 12
    if engine == "vllm":
        return

    shutil.rmtree(folder / "global_step_3")
    (folder / "summary.json").unlink()
    run = Run([*overrides, "trainer.save_hf_model=false"], tmp_path / "resumed.log")
    assert run.finish() == 0, run.log.read_text()
    assert f"resuming from {folder}/global_step_1" in run.log.read_text()
    assert records(folder) == whole
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
