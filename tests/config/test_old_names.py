"""Options under their old names: on the command line, in a user's file, and in a run's folder."""

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.checkpoint.resume import changed_options
from verl.cli.translate import translate
from verl.config import PPOConfig, load_config
from verl.config.load import compose_config, parse_config
from verl.config.old_names import RENAMED
from verl.config.run_file import read_run_config

NEW = "algorithm.rollout_correction.rollout_is"
OLD_VALUES = ["actor.tis_level=sequence", "++actor.tis_cap=3.0", "actor.tis_normalize=true"]


def test_old_names_set_the_new_options(capsys: pytest.CaptureFixture[str]):
    found = load_config(PPOConfig, "ppo_trainer", OLD_VALUES).algorithm.rollout_correction
    assert (found.rollout_is, found.rollout_is_threshold, found.rollout_is_batch_normalize) == ("sequence", 3.0, True)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {old}: is called {new} now; use the new name" for old, new in RENAMED.items()
    ]


def test_old_names_in_commands():
    assert translate(["-m", "actor.tis_level=none,token"]) == [f"{NEW}=null,token", "-m"]
    verl = translate(["actor_rollout_ref.rollout.n=4", "actor.tis_cap=1.5"])
    assert verl == ["preset=verl", "rollout.n=4", f"{NEW}_threshold=1.5"]


def test_old_names_in_files(tmp_path: Path):
    config = load_config(PPOConfig, "ppo_trainer", [f"{NEW}=token"])
    saved = asdict(config)
    correction = saved["algorithm"]["rollout_correction"]
    values = [correction.pop(name) for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")]
    saved["actor"] |= dict(zip(("tis_level", "tis_cap", "tis_normalize"), values, strict=True))
    path = tmp_path / "config.yaml"
    OmegaConf.save(saved, path)
    assert changed_options(path, asdict(config)) == []
    saved["actor"]["tis_level"] = "none"
    OmegaConf.save(saved, path)
    assert read_run_config(path)["algorithm"]["rollout_correction"]["rollout_is"] is None
    tree = compose_config(PPOConfig, "ppo_trainer", [f"{NEW}=token"])
    OmegaConf.set_struct(tree, False)
    tree.actor.tis_level = "sequence"
    assert parse_config(PPOConfig, tree).algorithm.rollout_correction.rollout_is == "sequence"
