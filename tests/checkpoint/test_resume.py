"""Which checkpoint a run resumes from, and the messages about it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.checkpoint.test_folders import names
from tests.kit import MODEL, POINTER, changed, harm, save_checkpoint, save_shards
from verl.checkpoint import resume
from verl.config import PPOConfig


def with_trainer(config: PPOConfig, folder: Path, **changes: object) -> PPOConfig:
    return changed(config, trainer={"default_local_dir": str(folder)} | changes)


def spoil(checkpoint: Path) -> Path:
    """Change a bit of the weights of a checkpoint."""
    harm(checkpoint, f"flip({MODEL!r})")
    return checkpoint


def find(config: PPOConfig) -> tuple[resume.Resumption | None, list[str]]:
    lines: list[str] = []
    return resume.find_resumption(config, lines.append), lines


def test_run_resumes_from_the_latest_intact_checkpoint(small_config, tmp_path):
    config = with_trainer(small_config, tmp_path)
    assert find(config) == (None, [])
    for step in (2, 4, 6, 8):
        save_checkpoint(tmp_path, step)
    spoil(tmp_path / "global_step_8")
    (tmp_path / "global_step_6" / MODEL).unlink()
    (tmp_path / ".global_step_9.abc.unfinished").mkdir()
    resumption, lines = find(config)
    assert resumption == resume.Resumption(tmp_path / "global_step_4", 4, {"job": "ppo", "step": 4})
    assert lines == [
        f"warning: {tmp_path}/global_step_8/{MODEL} was altered: its checksum differs from the manifest; this "
        "checkpoint is not used",
        f"warning: {tmp_path}/global_step_6/{MODEL} is missing; this checkpoint is not used",
        f"resuming from {tmp_path}/global_step_4",
    ]
    folders = ["global_step_2", "global_step_4", "global_step_6.damaged", "global_step_8.damaged"]
    assert names(tmp_path) == [*folders, POINTER] and (tmp_path / POINTER).read_text() == "4\n"
    # A second damaged checkpoint of the same step gets another name.
    spoil(save_checkpoint(tmp_path, 8))
    find(config)
    assert (tmp_path / "global_step_8.damaged_2").is_dir()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00", "is damaged: "),
        (b"a: &a [1]\nb: *a", "is damaged: holds an alias"),
        (b"a: !!python/object/apply:os.system ['true']", "is damaged: could not determine a constructor for the tag"),
        (b"a: 1" + b":59" * 4000, "is damaged: holds an integer of more than 100 characters"),
        (b"#" * (1 << 17) + b"#", "is damaged: it has more than 131072 bytes"),
    ],
    ids=["binary", "alias", "object", "long integer", "large"],
)
def test_damaged_config_costs_a_warning(small_config, tmp_path, content: bytes, reason: str):
    save_checkpoint(tmp_path, 4)
    (tmp_path / "config.yaml").write_bytes(content)
    resumption, (first, warning) = find(with_trainer(small_config, tmp_path))
    assert resumption is not None and resumption.step == 4 and first.startswith("resuming from ")
    assert warning.startswith(f"warning: {tmp_path}/config.yaml: {reason}") and "\n" not in warning
    assert warning.endswith("; changed options are not reported")


def test_checkpoint_with_a_foreign_file_is_refused(small_config, refused, tmp_path):
    for step in (2, 4):
        save_checkpoint(tmp_path, step)
    foreign = tmp_path / "global_step_4" / "actor" / "more.safetensors"
    foreign.write_text("new")
    with refused("TMP/...more.safetensors is not listed in manifest.json, ...; remove it"):
        find(with_trainer(small_config, tmp_path))
    foreign.unlink()
    resumption, _ = find(with_trainer(small_config, tmp_path))
    assert resumption is not None and resumption.step == 4


def test_checkpoint_of_an_earlier_version_is_refused(small_config, refused, tmp_path):
    folder = save_checkpoint(tmp_path, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["format"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    there = "TMP/global_step_2"
    with refused(f"{there}: written by an earlier version of VERL, ...`verl-export {there}`.../actor/huggingface"):
        find(with_trainer(small_config, tmp_path))


def test_run_that_cannot_resume_is_not_overwritten(small_config, refused, tmp_path):
    spoil(save_checkpoint(tmp_path / "damaged", 2))
    with refused("...none of its 1 checkpoints is intact..."):
        find(with_trainer(small_config, tmp_path / "damaged"))
    assert (tmp_path / "damaged" / "global_step_2").is_dir()
    (tmp_path / "summary.json").write_text("{}")
    with refused("...holds a finished run without checkpoints..."):
        find(with_trainer(small_config, tmp_path))


def test_run_resumes_from_a_named_checkpoint(small_config, refused, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    checkpoint = save_checkpoint(other, 4)
    save_checkpoint(other, 8)

    def named(path: Path, folder: Path = run) -> PPOConfig:
        return with_trainer(small_config, folder, resume_mode="path", resume_from_path=str(path))

    resumption, lines = find(named(checkpoint))
    assert resumption is not None and (resumption.folder, resumption.step) == (checkpoint, 4)
    assert lines == [f"resuming from {checkpoint}"]
    assert (other / POINTER).read_text() == "8\n"
    with refused("...global_step_8 in the same folder is newer, and the run would overwrite..."):
        find(named(checkpoint, folder=other))
    with refused("trainer.resume_from_path='TMP/other': no such checkpoint; name a folder..."):
        find(named(other))
    # Requeued, the same command goes on from what it has written itself.
    own = save_checkpoint(run, 6)
    (run / "config.yaml").write_text(f"trainer: {{resume_from_path: {checkpoint}}}\n")
    resumption, _ = find(named(checkpoint))
    assert resumption is not None and (resumption.folder, resumption.step) == (own, 6)
    (run / "config.yaml").unlink()
    spoil(checkpoint)
    with refused(f"trainer.resume_from_path=...global_step_4/{MODEL} was altered..."):
        find(named(checkpoint))
    assert checkpoint.is_dir()


def test_changed_options_are_shown(small_config, tmp_path):
    values = asdict(small_config)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    save_checkpoint(tmp_path, 2)
    other = changed(with_trainer(small_config, tmp_path, save_freq=7), actor={"optim": {"betas": [0.5, 0.9]}})
    _, lines = find(other)
    assert lines[1:] == ["  actor.optim.betas: was [0.9, 0.99], is [0.5, 0.9]", "  trainer.save_freq: was 0, is 7"]
    del values["seed"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    found = resume.changed_options(tmp_path / "config.yaml", asdict(small_config))
    assert found == ["seed: was (no such option), is 0"]


def test_checkpoint_that_does_not_fit_is_refused(small_config, tiny_model, refused, tmp_path):
    weights = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())

    def check(name: str, job: str = "ppo", examples: int = 16, **parts: object) -> None:
        found = resume.Resumption(tmp_path / name, 4, {"job": "ppo", "num_examples": 16})
        resume.check_resumable(found, job, examples, {"actor": small_config.model} | parts)

    save_shards(tmp_path / "fits", weights)
    save_shards(tmp_path / "wider", weights | {"model.norm.weight": torch.ones(7)})
    save_shards(tmp_path / "shorter", {name: value for name, value in weights.items() if "norm" not in name})
    check("fits")
    with refused("...is a checkpoint of main_ppo, not of main_sft; name another..."):
        check("fits", job="sft")
    with refused("data.train_files: 17 examples, but 16 when..."):
        check("fits", examples=17)
    with refused("...has no critic..."):
        check("fits", critic=small_config.critic.model)
    with refused("teacher.update_rate: ... has no moving average of the policy; set it and..."):
        check("fits", teacher=small_config.model)
    with refused("...model.norm.weight has shape [7] there and has shape [128] in the run's model"):
        check("wider")
    with refused("...embed_tokens.weight has shape ... there and is missing in the run's model"):
        check("fits", actor=changed(small_config.model, lora={"rank": 4}))
    with refused("...input_layernorm.weight is missing there and has shape..."):
        check("shorter")


def test_best_validation_so_far():
    validations = {0: {"a": 0.5}, 2: {"a": 0.75, "b": 1.0}, 4: {"a": 0.75}}
    assert resume.best_validation(validations, "a") == {"name": "a", "value": 0.75, "step": 2}
    assert resume.best_validation(validations, "c") is None
    assert resume.saved_validations(json.loads(json.dumps({"validations": validations}))) == validations


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError()])
def test_interrupted_run_prints_how_to_resume(small_config, tmp_path, capsys, error):
    disabled, auto = (with_trainer(small_config, tmp_path, resume_mode=mode).trainer for mode in ("disable", "auto"))
    named = replace(auto, resume_mode="path", resume_from_path="other/global_step_2")
    for config in (disabled, named, auto, named):
        if config is auto:
            save_checkpoint(tmp_path, 4)
        with pytest.raises(type(error)), resume.resume_hint(config):
            raise error
    folder = f"run the same command with trainer.default_local_dir={tmp_path}"
    options = "trainer.resume_mode=auto trainer.resume_from_path=null"
    assert capsys.readouterr().err.splitlines() == [
        f"to start again (there is no checkpoint yet), {folder} {options}",
        f"to start again (there is no checkpoint yet), {folder}",
        f"to resume from step 4, {folder}",
        f"to resume from step 4, {folder} {options}",
    ]
