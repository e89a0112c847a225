"""Checkpoints of veRL, written by a process that shards as its workers do."""

import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.checkpoint.export import export_checkpoint
from verl.checkpoint.run_start import require_model
from verl.checkpoint.verl_shards import merge_verl_shards
from verl.config.errors import ConfigError
from verl.trainer.main_export import parse_arguments

pytestmark = pytest.mark.slow

MERGE = "python -m verl.model_merger merge --backend fsdp --local_dir"


@pytest.fixture(scope="module")
def actor(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tiny_model, tmp_path_factory.mktemp("verl") / "global_step_100" / "actor", 1)


def written(model: Path, folder: Path, replicas: int) -> Path:
    script = [sys.executable, str(Path(__file__).with_name("verl_checkpoint.py"))]
    subprocess.run([*script, str(model), str(folder), str(replicas)], check=True, capture_output=True)
    return folder


def test_verls_merger_and_ours_write_the_same_files(actor: Path, tiny_model: Path, tmp_path: Path):
    given = ["merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(tmp_path / "merged")]
    arguments = parse_arguments(given)
    assert (arguments.source, arguments.part) == (actor.parent, "actor")
    out = export_checkpoint(arguments.source, arguments.out, arguments.part, arguments.trust_remote_code)
    merged = AutoModelForCausalLM.from_pretrained(out)
    original = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, merged.get_parameter(name)), name
    # veRL's merger: save_pretrained of the model, with the weights, and of the tokenizer.
    original.save_pretrained(tmp_path / "expected")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "expected")
    expected = {path.name for path in (tmp_path / "expected").iterdir()}
    assert {path.name for path in out.iterdir()} == expected
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= expected
    require_model("model.path", str(out))
    with pytest.raises(ConfigError, match="merged: already exists"):
        export_checkpoint(arguments.source, arguments.out, arguments.part, trust_remote_code=False)


def test_one_replica_is_merged(tiny_model: Path, tmp_path: Path):
    _, weights = merge_verl_shards(written(tiny_model, tmp_path / "actor", 2), trust_remote_code=False)
    original = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    assert {path.name for path in (tmp_path / "actor").glob("*_rank_3.pt")} == {"model_world_size_4_rank_3.pt"}
    for name, parameter in original.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_a_model_in_shards_is_named_with_the_command_that_merges_it(actor: Path, tiny_model: Path, tmp_path: Path):
    fix = f"verl-export merge --backend fsdp --local_dir {actor} --target_dir merged"
    for path in (actor / "huggingface", actor, actor.parent):
        with pytest.raises(
            ConfigError, match=f"^model.path='{path}': a checkpoint of veRL .* `{fix}`, and name merged"
        ):
            require_model("model.path", str(path))
    # Saved with the whole model beside the shards, the folder is a model like any other.
    copy = tmp_path / "global_step_1" / "actor"
    shutil.copytree(actor, copy)
    shutil.copy(tiny_model / "model.safetensors", copy / "huggingface")
    require_model("model.path", str(copy / "huggingface"))
    with pytest.raises(ConfigError, match=f"is part of a checkpoint; name its model, {copy}/huggingface"):
        require_model("model.path", str(copy))


class Payload:
    """What a pickle could run."""

    def __reduce__(self):
        return Path.touch, (Path("run"),)


def lie(state: dict, damage: str, rank: int) -> None:
    """Make one tensor's metadata untrue."""
    name = "model.norm.weight"
    tensor = state[name]
    if damage == "of one worker" and rank == 1:
        del state[name]
    elif damage == "placement":
        tensor._spec.placements = (Shard(7),)
    elif damage == "no placement":
        tensor._spec.placements = ()
    elif damage == "mixed" and rank == 0:
        state[name] = torch.ones(64)
    elif damage == "dimensions" and rank == 1:
        tensor._local_tensor = torch.ones(64, 1)
    elif damage == "vast":
        state[name] = torch.ones(1).expand(200000, 100000)
    elif damage == "no numbers":
        state[name] = torch.empty(64, device="meta")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", r"rank_1.pt: is missing; each of the 2 workers saved one"),
        ("payload", rf"rank_1.pt: is damaged, or holds more than tensors; merge it where veRL is installed, `{MERGE} "),
        ("truncated", rf"rank_1.pt: is damaged, or holds more than tensors; .*{MERGE}"),
        ("number", "rank_1.pt: is not a state dict of tensors"),
        ("another size", r"has shards of \[2, 3\] workers; leave those of one saving there"),
        ("adapters", r"has no model.embed_tokens.weight, or under another name \(adapters\?\)"),
        ("shape", r"is in parts \[\[3, 3\], \[3, 3\]\], where huggingface/config.json asks for \["),
        ("bytes", r"rank_1.pt: is damaged, or holds more than tensors"),
        ("workers", r"model_world_size_999999999999_rank_1.pt: is missing"),
        ("of one worker", r"has no model.norm.weight, or under another name"),
        ("placement", r"model.norm.weight is in parts \[\[64\], \[64\]\]"),
        ("no placement", r"model.norm.weight is in parts \[\[64\]\]"),
        ("mixed", r"model.norm.weight is in parts \[\[64\], \[128\]\]"),
        ("dimensions", r"model.norm.weight is in parts \[\[64\], \[64, 1\]\]"),
        ("vast", r"model.norm.weight is in parts \[\[200000, 100000\], \[200000, 100000\]\]"),
        ("no numbers", r"model.norm.weight is in parts \[\[64\], \[64\]\]"),
    ],
)
def test_what_cannot_be_merged_is_one_line(actor: Path, tmp_path: Path, monkeypatch, damage: str, message: str):
    folder = tmp_path / "actor"
    shutil.copytree(actor, folder)
    monkeypatch.chdir(tmp_path)
    last = folder / "model_world_size_2_rank_1.pt"
    if damage == "missing":
        last.unlink()
    elif damage == "payload":
        torch.save({"a": Payload()}, last)
    elif damage == "truncated":
        last.write_bytes(last.read_bytes()[:1000])
    elif damage == "number":
        torch.save({"a": 1}, last)
    elif damage == "another size":
        (folder / "model_world_size_3_rank_0.pt").touch()
    elif damage == "workers":
        for rank in range(2):
            (folder / f"model_world_size_2_rank_{rank}.pt").unlink()
        (folder / "model_world_size_999999999999_rank_0.pt").touch()
    elif damage == "bytes":
        with zipfile.ZipFile(last) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(last, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data.replace(b"model.norm", b"model\xff\xff\xffrm"))
    elif damage not in ("adapters", "shape"):
        for rank in range(2):
            path = folder / f"model_world_size_2_rank_{rank}.pt"
            state = torch.load(path, weights_only=True)
            lie(state, damage, rank)
            torch.save(state, path)
    else:
        changed = {"base_model.model.x": torch.ones(2)}
        if damage == "shape":
            changed = dict.fromkeys(torch.load(last, weights_only=True), torch.ones(3, 3))
        for rank in range(2):
            torch.save(changed, folder / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(ConfigError, match=message) as error:
        merge_verl_shards(folder, trust_remote_code=False)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_old_pickles_are_not_run(actor: Path, tmp_path: Path, monkeypatch):
    shutil.copytree(actor, tmp_path / "actor")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "actor" / "model_world_size_2_rank_0.pt").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ConfigError, match="is damaged, or holds more than tensors"):
        merge_verl_shards(tmp_path / "actor", trust_remote_code=False)
    assert not (tmp_path / "run").exists()


def test_our_own_form_is_as_it_was(tmp_path: Path, capsys):
    given = parse_arguments([str(tmp_path), "--part", "critic"])
    assert (given.source, given.out, given.part) == (tmp_path, None, "critic")
    with pytest.raises(SystemExit):
        parse_arguments(["merge", "--backend", "megatron", "--local_dir", "a", "--target_dir", "b"])
    assert "invalid choice: 'megatron'" in capsys.readouterr().err
