"""What must be in place before a run starts: its model, its data, and a folder that it may write."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import small_overrides
from omegaconf import OmegaConf

from tests.tables import refusals
from verl.checkpoint.export import export_checkpoint
from verl.config import CONFIG_DIR, PPOConfig, SFTConfig
from verl.config.load import compose_config
from verl.config.paths import SHIPPED
from verl.run.run_config import parse_run_config, require_model


@pytest.fixture
def run_tree(tmp_path: Path):
    """A config whose model, data and run folder are in order, as the tree that Hydra hands over."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.parquet").touch()
    config = OmegaConf.load(CONFIG_DIR / "sft.yaml")
    del config["defaults"], config["hydra"]
    config.model = OmegaConf.merge(
        *(OmegaConf.load(CONFIG_DIR / path) for path in ("engine/default.yaml", "model/tiny.yaml"))
    )
    config.model.path = str(tmp_path / "model")
    config.data.train_files = [str(tmp_path / "train.parquet")]
    config.data.val_files = []
    config.trainer.default_local_dir = str(tmp_path / "run")
    return config


def test_missing_data_files_are_named(run_tree, refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_tree.data.train_files, run_tree.data.val_files = ["data/a.parquet"], ["lost.parquet"]
    gone = "data.train_files='data/a.parquet': no such file (neither TMP/data/a.parquet nor SHIPPED/data/a.parquet)"
    lost = "data.val_files='lost.parquet': no such file (TMP/lost.parquet); name a parquet..."
    with refused(f"{gone}; restore...\n{lost}", SHIPPED=SHIPPED):
        parse_run_config(SFTConfig, run_tree)


def test_folder_of_data_is_told_from_an_absent_file(run_tree, refused, tmp_path: Path):
    run_tree.data.train_files = [str(tmp_path)]
    with refused("data.train_files='TMP': is a folder; name a parquet, jsonl or json file, or a hub set such as ..."):
        parse_run_config(SFTConfig, run_tree)


def test_a_hub_id_passes_and_a_relative_folder_does_not(run_tree, refused, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_tree.model.path = "Qwen/Qwen2.5-1.5B"
    assert parse_run_config(SFTConfig, run_tree).model.path == "Qwen/Qwen2.5-1.5B"
    run_tree.model.path = str(tmp_path)
    with refused("model.path='TMP': no config.json there (TMP); ... or a hub id such as..."):
        parse_run_config(SFTConfig, run_tree)
    # The same spelling is a folder as soon as its parent exists here; data/ is one even if it was deleted.
    (tmp_path / "Qwen").mkdir()
    for path, line in (
        ("Qwen/Qwen2.5-1.5B", "no config.json there (TMP/Qwen/Qwen2.5-1.5B); name a folder..."),
        (
            "data/no_model",
            "no config.json there (neither TMP/data/no_model nor SHIPPED/data/no_model); restore the "
            "shipped model with `git checkout data`, or name a folder...",
        ),
    ):
        run_tree.model.path = path
        with refused(f"model.path='{path}': {line}", SHIPPED=SHIPPED):
            parse_run_config(SFTConfig, run_tree)


def parse_beside(run_tree, tmp_path: Path, mode: str, source: str, files: str) -> SFTConfig:
    """Parse the config of a run whose folder has these files; ``config.yaml=SOURCE`` names what a run started from."""
    (tmp_path / "run").mkdir()
    for name, _, started_from in (entry.partition("=") for entry in files.split()):
        text = f"trainer:\n  resume_from_path: {tmp_path / started_from}\n" if started_from else ""
        (tmp_path / "run" / name).write_text(text)
    run_tree.trainer.resume_mode = mode
    run_tree.trainer.resume_from_path = str(tmp_path / source) if source else None
    return parse_run_config(SFTConfig, run_tree)


@pytest.mark.parametrize(("mode", "source", "files", "line"), refusals("run/refusals.txt", "folders"))
def test_run_does_not_overwrite_another(run_tree, refused, tmp_path: Path, mode, source, files, line):
    with refused(f"trainer.default_local_dir='TMP/run': {line}"):
        parse_beside(run_tree, tmp_path, mode, source, files)


@pytest.mark.parametrize(
    ("mode", "source", "files"),
    [
        # Killed before its first checkpoint: the same command starts again from the one that was named.
        ("path", "other/global_step_4", "config.yaml metrics.jsonl"),
        # Requeued: it started from there too, and has its own by now.
        ("path", "other/global_step_4", "config.yaml=other/global_step_4 global_step_5"),
        # Killed while it wrote its first file.
        ("auto", "", ".lock .config.yaml.unfinished"),
        ("auto", "", "config.yaml metrics.jsonl global_step_4"),
        ("path", "run/global_step_4", "config.yaml global_step_4"),
        ("path", "other/global_step_4", ""),
        ("disable", "", ".lock"),
    ],
)
def test_run_continues_its_own_folder(run_tree, tmp_path: Path, mode: str, source: str, files: str):
    assert parse_beside(run_tree, tmp_path, mode, source, files).trainer.resume_mode == mode


@pytest.mark.parametrize("place", ["model/tokenizer.json", "run/metrics.jsonl", "run/.attempt"])
def test_a_pipe_among_the_files_of_a_folder_is_refused(run_tree, refused, tmp_path: Path, place: str):
    folder = tmp_path / Path(place).parent
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").touch()
    os.mkfifo(tmp_path / place)
    with refused(f"...{place} is not a regular file; name a..."):
        parse_run_config(SFTConfig, run_tree)


def test_relative_paths_begin_in_the_working_directory(tiny_model, arithmetic_prompts, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    shutil.copy(arithmetic_prompts, tmp_path / "mine" / "rows.parquet")
    shutil.copytree(tiny_model, tmp_path / "mine" / "model")
    monkeypatch.chdir(tmp_path / "mine")
    named = small_overrides(Path("model"), Path("data/arithmetic/test.parquet"), Path("out/x"))
    tree = compose_config(PPOConfig, "ppo_trainer", [*named, "data.train_files=rows.parquet"])
    config = parse_run_config(PPOConfig, tree)
    assert config.data.train_files == ["rows.parquet"]
    assert config.model.path == f"{tmp_path}/mine/model"
    assert config.data.val_files == [f"{SHIPPED}/data/arithmetic/test.parquet"]
    assert config.trainer.default_local_dir == f"{tmp_path}/mine/out/x"


def test_teacher_elsewhere_has_no_folder(tiny_model, arithmetic_prompts, tmp_path):
    named = [*small_overrides(tiny_model, arithmetic_prompts, tmp_path / "out"), "teacher.server.address=http://t/v1"]
    config = parse_run_config(PPOConfig, compose_config(PPOConfig, "ppo_trainer", named))
    assert config.uses_teacher and config.teacher.model.path == "none" and "teacher.model" not in config.models


def test_run_folder_is_its_newest_model(run_tree, refused, tmp_path: Path):
    run = tmp_path / "sft"
    for step in (8, 40):
        shutil.copytree(tmp_path / "model", run / f"global_step_{step}" / "actor" / "huggingface")
    for path, step in ((run, 40), (run / "global_step_8", 8), (run / "global_step_8/actor/huggingface", 8)):
        run_tree.model.path = str(path)
        model = parse_run_config(SFTConfig, run_tree).model.path
        assert model == f"{run}/global_step_{step}/actor/huggingface"
    run_tree.model.path = str(run)
    shutil.rmtree(run / "global_step_40" / "actor" / "huggingface")
    (run / "global_step_40" / "actor" / "shards").mkdir()
    with refused("...has no exported model; `verl-export TMP/sft/global_step_40` creates it"):
        parse_run_config(SFTConfig, run_tree)


def test_verl_shards_are_refused_with_the_command_that_merges(refused, tmp_path: Path):
    actor = tmp_path / "global_step_100" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").touch()
    (actor / "model_world_size_2_rank_0.pt").touch()
    merge = (
        "a checkpoint of veRL whose model is in shards; merge them where veRL is installed, `python -m "
        "verl.model_merger merge --backend fsdp --local_dir TMP/global_step_100/actor --target_dir merged`, and set "
        "model.path=merged"
    )
    for path in (actor / "huggingface", actor, actor.parent):
        with refused(f"model.path='TMP/{path.relative_to(tmp_path)}': {merge}"):
            require_model("model.path", str(path))
    with refused(f"TMP/global_step_100: {merge}"):
        export_checkpoint(actor.parent, tmp_path / "out", "actor", trust_remote_code=False)
    # Saved with the whole model next to the shards, the folder is a model like any other.
    (actor / "huggingface" / "model.safetensors").touch()
    require_model("model.path", str(actor / "huggingface"))
    with refused("...is part of a checkpoint; name its model, TMP/global_step_100/actor/huggingface..."):
        require_model("model.path", str(actor))
