"""The examples of docs/extending.md, all together, in one training through the entry point, and resumed."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from tests.e2e.runs import Run, records
from tests.extending.examples import example
from tests.kit import ROOT, small_overrides
from verl.checkpoint.folders import read_state


def test_every_example_has_a_command():
    page = (ROOT / "docs/extending.md").read_text()
    commands = re.findall(r"^bash train\.sh ((?:.*\\\n)*.+)$", page, re.MULTILINE)
    named = {file for command in commands for file in re.findall(r"my/\w+\.py", command)}
    assert named == set(re.findall(r"^```python\n# (my/\w+\.py)$", page, re.MULTILINE)) and len(named) > 5


def examples(folder: Path) -> list[str]:
    """Overrides that name the functions and the class."""
    names = ["participation_ratio diff 2", "participation_ratio diff", "participation_ratio"]
    return [
        f"reward_score.custom_functions=['arithmetic={example(folder, 'reward.py')}:score']",
        f"algorithm.adv_estimator={example(folder, 'advantages.py')}:leave_one_out",
        "++algorithm.adv_estimator_kwargs.wrong_weight=0.5",
        f"actor.kl_loss_type={example(folder, 'divergences.py')}:pseudo_huber",
        f"algorithm.kl_penalty={folder}/my/divergences.py:pseudo_huber",
        *("algorithm.use_kl_in_reward=true", "actor.kl_loss_coef=0.1", "algorithm.rollout_correction.rollout_is=token"),
        f"calculator.own_metrics=[{example(folder, 'metrics.py')}:participation_ratio]",
        f"calculator.metric_indices_add=[{example(folder, 'tokens.py')}:least_likely]",
        f"reward_manager.indicator_names=[{','.join(names)}]",
        f"trainer.method={example(folder, 'method.py')}:NearHalf",
        *("+trainer.method_kwargs.memory=0.25", "+trainer.method_kwargs.capacity=12"),
    ]


@pytest.fixture(scope="module")
def trained(arithmetic_prompts, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder of a run of four steps, and its overrides."""
    folder = tmp_path_factory.mktemp("examples")
    # The embedded model, which is right now and then.
    overrides = small_overrides(ROOT / "data/tiny_model", arithmetic_prompts, folder / "whole") + examples(folder)
    overrides += ["rollout.name=hf", "data.val_files=[]", "data.max_response_length=64", "data.train_batch_size=4"]
    overrides += ["data.max_prompt_length=96", "trainer.total_training_steps=4", "trainer.total_epochs=2"]
    overrides += ["trainer.save_freq=2", "trainer.save_hf_model=false", "actor.optim.lr=1e-3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        Run.complete(overrides, folder / "log")
    return folder / "whole", overrides


@pytest.mark.slow
def test_examples_train(trained):
    whole = records(trained[0])
    assert len(whole) == 4
    state = read_state(trained[0] / "global_step_2")["method"]
    assert len(state["accuracy"]) == 8 and state["usual_length"] < 64
    assert sum(record["learn_from/replayed"] for record in whole) > 0
    assert sum(record["resample/groups"] for record in whole) > 0
    assert all(record["shape_rewards/change"] >= 0 for record in whole)
    measured = [record["cal/overall/layer_1/participation_ratio/mean"] for record in whole]
    assert all(value > 1 for value in measured)
    assert all(record["cal/overall/layer_1/least_likely/mean"] > 0 for record in whole)
    assert whole[-1]["actor/kl_loss"] > 0 and whole[-1]["actor/reward_kl_penalty"] > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_examples_resume_to_the_bit(trained, tmp_path, monkeypatch):
    folder, overrides = trained
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
    resumed = [
        f"trainer.default_local_dir={tmp_path}/resumed",
        "trainer.resume_mode=path",
        f"trainer.resume_from_path={folder}/global_step_2",
    ]
    Run.complete([*overrides, *resumed], tmp_path / "log")
    assert records(tmp_path / "resumed") == records(folder)[2:]
    assert _method(tmp_path / "resumed") == _method(folder)


def _method(folder: Path) -> str:
    return json.dumps(read_state(folder / "global_step_4")["method"])


@pytest.mark.slow
@pytest.mark.nightly
def test_policy_loss(tiny_model, arithmetic_prompts, tmp_path: Path):
    file, folder = example(tmp_path, "listwise.py"), tmp_path / "run"
    overrides = [
        *small_overrides(tiny_model, arithmetic_prompts, folder),
        f"actor.policy_loss={file}:listwise",
        "+actor.policy_loss_kwargs.bonus=0.01",
        *("data.val_files=[]", "rollout.name=hf"),
    ]
    refused = Run(overrides, tmp_path / "refused")
    assert refused.finish() == 1
    assert "actor.micro_batch_size_per_gpu=3: " in refused.log.read_text() and not folder.exists()
    # One group of two goes to each worker in an update of two prompts.
    Run.complete([*overrides, "actor.micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=2"], tmp_path / "log")
    for record in records(folder):
        assert record["actor/listwise_gap"] >= 0 and math.isfinite(record["actor/pg_loss"])
        assert record["actor/grad_norm"] > 0
