"""Checkpoints of veRL, written by a process that shards as its workers do."""

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
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


def tensors(change: Callable[[dict, int], object]) -> Callable[[Path], None]:
    """Applies ``change`` to the state of every worker, with its rank."""

    def harm(folder: Path) -> None:
        for rank in range(2):
            path = folder / f"model_world_size_2_rank_{rank}.pt"
            state = torch.load(path, weights_only=True)
            change(state, rank)
            torch.save(state, path)

    return harm


def last(harm: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: harm(folder / "model_world_size_2_rank_1.pt")


def rename_adapters(state: dict, rank: int) -> None:
    state.clear()
    state["base_model.model.x"] = torch.ones(2)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (last(Path.unlink), r"rank_1.pt: is missing; each of the 2 workers saved one"),
        (last(lambda path: torch.save({"a": Payload()}, path)), rf"rank_1.pt: is damaged, or .* installed, `{MERGE} "),
        (last(lambda path: path.write_bytes(pickle.dumps(Payload()))), r"rank_1.pt: is damaged, or holds more than"),
        (last(lambda path: path.write_bytes(path.read_bytes()[:1000])), rf"rank_1.pt: is damaged, .*{MERGE}"),
        (last(lambda path: torch.save({"a": 1}, path)), "rank_1.pt: is not a state dict of tensors"),
        (lambda folder: (folder / "model_world_size_3_rank_0.pt").touch(), r"has shards of \[2, 3\] workers; leave"),
        (tensors(rename_adapters), r"has no model.embed_tokens.weight, or under another name \(adapters\?\)"),
        (tensors(lambda state, rank: rank and state.pop(NORM)), r"has no model.norm.weight, or under another name"),
        (
            tensors(lambda state, rank: state.update(dict.fromkeys(state, torch.ones(3, 3)))),
            r"is in parts \[\[3, 3\], \[3, 3\]\], where huggingface/config.json asks for \[",
        ),
        # Untrue metadata: where a tensor was cut, how large it is, and whether it holds numbers.
        (
            tensors(lambda state, rank: setattr(state[NORM]._spec, "placements", (Shard(7),))),
            r"parts \[\[64\], \[64\]\]",
        ),
        (tensors(lambda state, rank: rank or state.update({NORM: torch.ones(64)})), r"in parts \[\[64\], \[128\]\]"),
        (
            tensors(lambda state, rank: state.update({NORM: torch.ones(1).expand(200000, 100000)})),
            r"parts \[\[200000, ",
        ),
        (
            tensors(lambda state, rank: state.update({NORM: torch.empty(64, device="meta")})),
            r"in parts \[\[64\], \[64\]\]",
        ),
    ],
)
def test_what_cannot_be_merged_is_one_line(actor: Path, tmp_path: Path, monkeypatch, harm, message: str):
    folder = tmp_path / "actor"
    shutil.copytree(actor, folder)
    monkeypatch.chdir(tmp_path)
    harm(folder)
    with pytest.raises(ConfigError, match=message) as error:
        merge_verl_shards(folder, trust_remote_code=False)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_our_own_form_is_as_it_was(tmp_path: Path, capsys):
    given = parse_arguments([str(tmp_path), "--part", "critic"])
    assert (given.source, given.out, given.part) == (tmp_path, None, "critic")
    with pytest.raises(SystemExit):
        parse_arguments(["merge", "--backend", "megatron", "--local_dir", "a", "--target_dir", "b"])
    assert "invalid choice: 'megatron'" in capsys.readouterr().err
